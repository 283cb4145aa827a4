# SPDX-License-Identifier: Apache-2.0
"""What lets several engines live in one process, or be forked from it, and start quickly."""

import gc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock


def without_collection() -> AbstractContextManager[Any]:
    """No explicit garbage collection within.

    vLLM collects five times while an engine starts, and more when it ends. That is nine tenths of
    the time that a tiny one takes, as all that was ever imported is looked through.
    """
    return mock.patch.object(gc, "collect", return_value=0)


def once(register_kernels: Callable[[Any], None]) -> Callable[[Any], None]:
    """In place of ``vllm.triton_utils.dispatcher.register_kernels``, which does its work once.

    vLLM 0.32's CPU worker registers its kernels once per worker and trips over llvmlite when it
    does so after numba was imported (``dispatcher._rebind_kernels``), as the unit tests do when
    they are collected; once is enough, and llvmlite holds none of the kernels.
    """
    seen: list[bool] = []

    def register_once(overrides: Any) -> None:
        if not seen:
            seen.append(True)
            hidden = {name: sys.modules[name] for name in sys.modules if "llvmlite" in name}
            for name in hidden:
                del sys.modules[name]
            try:
                register_kernels(overrides)
            finally:
                sys.modules.update(hidden)

    return register_once
