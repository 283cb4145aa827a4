# SPDX-License-Identifier: Apache-2.0
"""The numba settings of every kernel of this method.

Kernels are serial on purpose: waking a second numba thread can cost milliseconds, far more than
the search. numba checks only a kernel's own file when it reads its cache: after editing a kernel
that others call, touch the callers' files or set ``NUMBA_CACHE_DIR`` to a fresh folder.
"""

from collections.abc import Callable
from typing import TypeVar

import numba

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


def kernel(function: FunctionT) -> FunctionT:
    """Compile without the GIL, keep the machine code on disk where some folder is writable."""
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder for the cache, e.g. a read-only container without a home
        return numba.njit(nogil=True)(function)
