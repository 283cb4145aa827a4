# SPDX-License-Identifier: Apache-2.0
"""Engines on vLLM's V2 model runner, on a CPU, in a pytest process of their own."""

import os
from pathlib import Path
from typing import Any

import pytest
import triton_on_cpu
from generation import run, tokens
from scenarios import SCENARIOS
from shared_engines import (
    _one_process_many_engines,
    _test_drafters,
    make_engine,
    plain,
    tiny_model,
)

from next_vllm import ensure

__all__ = ["_one_process_many_engines", "_test_drafters", "make_engine", "plain", "tiny_model"]


class Answers(dict[str, Any]):
    """Of an engine that does not draft, by scenario; each is run once, when it is asked for."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._engine = engine

    def __missing__(self, name: str) -> Any:
        self[name] = tokens(run(self._engine, SCENARIOS[name]))
        return self[name]


@pytest.fixture(scope="module")
def expected(plain: Any) -> Answers:
    """Token ids of every completion of every prompt."""
    return Answers(plain)


NEXT_VLLM = os.environ.get("SPEC_EXT_NEXT_VLLM")
"""A newer vLLM whose sources are to run over the binaries of this one, see scripts/next_vllm.py."""

triton_on_cpu.make_visible([str(ensure(NEXT_VLLM))] if NEXT_VLLM else [])
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override kv_cache_memory_bytes
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["VLLM_SPEC_EXT_STRICT"] = "1"  # a proposer that fails must fail the test
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
