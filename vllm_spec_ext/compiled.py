# SPDX-License-Identifier: Apache-2.0
"""The numba settings of compiled loops, for proposers and scorers alike. No vLLM or torch import.

Kernels are serial on purpose: waking a second numba thread can cost milliseconds, far more than
any search here.
"""

import contextlib
import os
from collections.abc import Callable, Set
from types import FunctionType
from typing import Any, TypeVar, cast, overload

import numpy as np

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
            found = numba.njit(cache=True, **settings)(loop)
            _watch_callees(found, cast("FunctionType", loop))
            return found
        except RuntimeError:  # no folder for the cache, e.g. a read-only container without a home
            return numba.njit(**settings)(loop)

    return compiled if function is None else compiled(function)


def _watch_callees(dispatcher: Any, loop: FunctionType) -> None:
    """Let the machine code on disk be old once a kernel that this one calls has changed.

    numba asks for the date of a kernel's own file alone (0.65 ``IndexDataCacheFile``), though
    others' code and constants are part of it. Where another numba keeps no such date, that stays.
    """
    with contextlib.suppress(AttributeError, OSError):  # OSError: a file within a zip
        file = dispatcher._cache._cache_file
        file._source_stamp = file._source_stamp, *sorted(_stamps(loop, set()))


def _stamps(loop: FunctionType, seen: set[FunctionType]) -> set[str]:
    """Files of a kernel and of those that it calls, with their dates; and constants by value."""
    seen.add(loop)
    status = os.stat(loop.__code__.co_filename)
    found = {f"{loop.__module__} {status.st_mtime_ns} {status.st_size}"}
    for name in loop.__code__.co_names:
        value = loop.__globals__.get(name)
        callee = getattr(value, "py_func", None)
        if isinstance(callee, FunctionType):
            found |= _stamps(callee, seen) if callee not in seen else set()
        elif isinstance(value, (bool, int, float, str, np.generic, np.ndarray)):
            found.add(f"{loop.__module__} {name} = {value!r}")
    return found
