# SPDX-License-Identifier: Apache-2.0
"""Environment variables that engines ask for, in all of their processes."""

import os

STRICT = "VLLM_SPEC_EXT_STRICT"
"""A proposer that fails raises, and costs the engine its life instead of a draft; for tests."""

READ_ONLY = "VLLM_SPEC_EXT_READ_ONLY"
"""Proposers write no files: what a benchmark's requests say is nothing to keep."""


def is_set(name: str) -> bool:
    """Whether a variable says yes."""
    return os.environ.get(name, "0") not in ("", "0")
