# SPDX-License-Identifier: Apache-2.0
"""Engines on a tiny random model, in the test process, shared by all tests of the folder.

``SPEC_EXT_TEST_RUNNER=v2 pytest tests/engine/test_...py`` runs them on vLLM's V2 model runner,
whose kernels are interpreted: that takes several times as long. Continuous integration runs
``tests/engine_v2`` instead, which has the most telling of them. ``SPEC_EXT_NEXT_VLLM=0.33.0`` runs
the Python sources of that vLLM over the binaries of this one, see scripts/next_vllm.py.
"""

import os

# Before vLLM is imported anywhere: engines in this process, a small cache, no downloads.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override kv_cache_memory_bytes
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["VLLM_SPEC_EXT_STRICT"] = "1"  # a proposer that fails must fail the test
# Before torch is: a second thread only spins for these models, ten times slower on busy cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
import triton_on_cpu
from module_path import put_first
from shared_engines import (
    _one_process_many_engines,
    _test_drafters,
    expected,
    expected_long,
    make_engine,
    plain,
    tiny_model,
)

from next_vllm import ensure

__all__ = [
    "_one_process_many_engines",
    "_test_drafters",
    "expected",
    "expected_long",
    "make_engine",
    "plain",
    "tiny_model",
]

ON_V2 = os.environ.get("SPEC_EXT_TEST_RUNNER") == "v2"
NEXT_VLLM = os.environ.get("SPEC_EXT_NEXT_VLLM")
if NEXT_VLLM:
    put_first([str(ensure(NEXT_VLLM))], before=["vllm"])
if ON_V2:
    triton_on_cpu.make_visible()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            if ON_V2 and item.get_closest_marker("v1_runner"):
                item.add_marker(pytest.mark.skip(reason="of the V1 runner alone"))
