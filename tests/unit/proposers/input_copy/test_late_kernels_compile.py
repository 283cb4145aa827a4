# SPDX-License-Identifier: Apache-2.0
"""The kernels of late drafts compile for GPUs, which takes none; how fast they are it does not say.

In a process of its own: tests of vLLM's V2 runner have Triton interpret kernels.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ARCHITECTURES = (80, 90)  # A100, H100

COMPILE = """
import sys

from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_spec_ext.proposers.input_copy import late_kernels
from vllm_spec_ext.proposers.input_copy.late_copy import gather_settings, search_settings
from vllm_spec_ext.proposers.input_copy.options import InputCopyOptions

TYPES = {"rows_ptr": "*i64", "places_ptr": "*i64", "lengths_ptr": "*i32", "folded_ptr": "*i32",
         "found_ptr": "*i32", "drafts_ptr": "*i64", "unsayable": "i32", "num_blocks": "i32"}
for match in ("unique", "latest", "best"):
    options = InputCopyOptions(match=match)
    settings = {
        late_kernels.search_texts: search_settings(options, 12),
        late_kernels.gather_drafts: gather_settings(options, 12),
    }
    for kernel, constants in settings.items():
        signature = {name: TYPES.get(name, "constexpr") for name in kernel.arg_names}
        made = compile(
            ASTSource(kernel, signature, constants), target=GPUTarget("cuda", int(sys.argv[1]), 32)
        )
        assert made.asm["cubin"], kernel
"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_for_gpus(architecture: int, tmp_path: Path) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run(
        [sys.executable, "-c", COMPILE, str(architecture)],
        env={**env, "TRITON_CACHE_DIR": str(tmp_path)},
        check=True,
        timeout=600,
    )
