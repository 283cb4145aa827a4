# SPDX-License-Identifier: Apache-2.0
"""Keeps steps with draft trees out of full CUDA graphs, which have a fixed number of requests."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher


@contextmanager
def no_full_graph(dispatcher: "CudagraphDispatcher") -> Iterator[None]:
    """Keep vLLM's CUDA graph dispatcher from choosing a full graph."""
    from vllm.config import CUDAGraphMode

    dispatch = dispatcher.dispatch

    @functools.wraps(dispatch)
    def without_full(*args: Any, invalid_modes: Any = None, **kwargs: Any) -> Any:
        refused = {CUDAGraphMode.FULL, *(invalid_modes or ())}
        return dispatch(*args, invalid_modes=refused, **kwargs)

    dispatcher.dispatch = without_full
    try:
        yield
    finally:
        del dispatcher.dispatch
