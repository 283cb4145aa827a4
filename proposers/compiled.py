# SPDX-License-Identifier: Apache-2.0
"""The numba settings of compiled loops.

Kernels are serial on purpose: waking a second numba thread can cost milliseconds, far more than
any search here. numba checks only a kernel's own file when it reads its cache: after editing a
kernel that others call, touch the callers' files or set ``NUMBA_CACHE_DIR`` to a fresh folder.
"""

from collections.abc import Callable
from typing import TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


def kernel(function: FunctionT) -> FunctionT:
    """Compile without the GIL, keep the machine code on disk where some folder is writable.

    Where numba is missing (training heads on a machine without vLLM), the same code is interpreted.
    """
    try:
        import numba
    except ModuleNotFoundError as error:
        if error.name != "numba":  # numba is there and something that it needs is not
            raise
        return function
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder for the cache, e.g. a read-only container without a home
        return numba.njit(nogil=True)(function)
