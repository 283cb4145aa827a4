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


def check(kernel, types, settings):
    options = {name: settings.pop(name) for name in ("num_warps", "enable_fp_fusion")
               if name in settings}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, settings)
    made = compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=options)
    assert made.asm["cubin"], kernel

"""

INPUT_COPY = """
from vllm_spec_ext.proposers.input_copy import late_kernels
from vllm_spec_ext.proposers.input_copy.late_copy import gather_settings, search_settings
from vllm_spec_ext.proposers.input_copy.options import InputCopyOptions

TYPES = {"rows_ptr": "*i64", "places_ptr": "*i64", "lengths_ptr": "*i32", "folded_ptr": "*i32",
         "found_ptr": "*i32", "drafts_ptr": "*i64", "copied_ptr": "*i32", "unsayable": "i32",
         "num_blocks": "i32"}
for match in ("unique", "latest", "best"):
    options = InputCopyOptions(match=match)
    check(late_kernels.search_texts, TYPES, search_settings(options, 12))
    check(late_kernels.gather_drafts, TYPES, gather_settings(options, 12))
"""

ADAPTIVE_NGRAM = """
from vllm_spec_ext.proposers.adaptive_ngram.late_kernels import walk_tables
from vllm_spec_ext.proposers.adaptive_ngram.late_ngram import walk_settings
from vllm_spec_ext.proposers.adaptive_ngram.lookup import BACKOFF

TYPES = {"rows_ptr": "*i64", "places_ptr": "*i64", "lengths_ptr": "*i32", "texts_ptr": "*i32",
         "text_stride": "i32", "longs_ptr": "*i64", "ints_ptr": "*i32", "floats_ptr": "*fp32",
         "top_ptr": "*u32", "w2_ptr": "*u16", "off_ptr": "*u32", "tok_ptr": "*u16",
         "codes_ptr": "*u8", "probs_ptr": "*fp32", "frequent_tokens_ptr": "*u16",
         "frequent_probs_ptr": "*fp32", "numbers_ptr": "*fp64", "copied_ptr": "*i32",
         "drafts_ptr": "*i64", "vocab_size": "i32", "num_corpus_rows": "i32",
         "num_corpus_entries": "i32", "num_frequent": "i32"}
for backoff in BACKOFF.values():
    for tables in ((False, 2048, 0), (True, 0, 0), (True, 2048, 65536)):
        check(walk_tables, TYPES, walk_settings(backoff, *tables, 12))
for tables in ((True, 0, 0), (True, 2048, 0)):
    check(walk_tables, TYPES, walk_settings(BACKOFF["mix"], *tables, 12, behind=True))
"""

BLOCKWISE = """
from vllm_spec_ext.proposers.blockwise.heads import HeadsConfig
from vllm_spec_ext.proposers.blockwise.late_heads import find_settings, show_settings
from vllm_spec_ext.proposers.blockwise.late_kernels import find_ends, show_tokens

TYPES = {"texts_ptr": "*i32", "text_stride": "i32", "places_ptr": "*i64", "lengths_ptr": "*i32",
         "found_ptr": "*i64", "shown_ptr": "*i64", "num_blocks": "i32", "vocab_size": "i32"}
for heads in (1, 4, 7):
    config = HeadsConfig(target="t", hidden_size=8, vocab_size=9, num_heads=heads, head_width=4,
                         copy_match=8)
    check(find_ends, TYPES, find_settings(config))
    check(show_tokens, TYPES, show_settings(config))
"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "kernels", [INPUT_COPY, ADAPTIVE_NGRAM, BLOCKWISE], ids=["copy", "ngram", "heads"]
)
def test_for_gpus(kernels: str, architecture: int, tmp_path: Path) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run(
        [sys.executable, "-c", COMPILE + kernels, str(architecture)],
        env={**env, "TRITON_CACHE_DIR": str(tmp_path)},
        check=True,
        timeout=800,
    )
