# SPDX-License-Identifier: Apache-2.0
"""Has vLLM take its V2 model runner on a CPU; see ``tests/engine_v2/boot/triton_cpu_stub`` for how.

Triton made visible changes the V1 runner, too, so V2 needs a process of its own.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from module_path import put_first

BOOT = str(Path(__file__).resolve().parents[1] / "engine_v2" / "boot")


def make_visible(more: Sequence[str] = ()) -> None:
    """Before Triton, torch and vLLM are imported anywhere, and for the processes that are spawned.

    Args:
        more: Folders of Python modules to come behind the stub's.

    Raises:
        ImportError: One of them is here already.
    """
    put_first([BOOT, *more], before=["triton", "torch", "vllm"])
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["TRITON_CPU_STUB_ASYNC"] = "1"
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)  # vLLM's choice is V2 wherever it sees Triton
