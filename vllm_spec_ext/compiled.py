# SPDX-License-Identifier: Apache-2.0
"""The numba settings of compiled loops, for proposers and scorers alike. No vLLM or torch import.

Kernels are serial on purpose: waking a second numba thread can cost milliseconds, far more than
any search here. numba checks only a kernel's own file when it reads its cache: after editing a
kernel that others call, touch the callers' files or set ``NUMBA_CACHE_DIR`` to a fresh folder.
"""

from collections.abc import Callable, Set
from typing import TypeVar, overload

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


@overload
def kernel(function: FunctionT) -> FunctionT: ...


@overload
def kernel(*, fastmath: Set[str]) -> Callable[[FunctionT], FunctionT]: ...


def kernel(
    function: FunctionT | None = None, *, fastmath: Set[str] = frozenset()
) -> FunctionT | Callable[[FunctionT], FunctionT]:
    """Compile without the GIL, keep the machine code on disk where some folder is writable.

    Where numba is missing (training heads on a machine without vLLM), the same code is interpreted.

    Args:
        function: The loop; left out where there are settings: ``@kernel(fastmath={"reassoc"})``.
        fastmath: LLVM's names of what float arithmetic may ignore, e.g. the order of a sum.
    """

    def compiled(loop: FunctionT) -> FunctionT:
        try:
            import numba
        except ModuleNotFoundError as error:
            if error.name != "numba":  # numba is there and something that it needs is not
                raise
            return loop
        settings = {"nogil": True, "fastmath": set(fastmath)}
        try:
            return numba.njit(cache=True, **settings)(loop)
        except RuntimeError:  # no folder for the cache, e.g. a read-only container without a home
            return numba.njit(**settings)(loop)

    return compiled if function is None else compiled(function)
