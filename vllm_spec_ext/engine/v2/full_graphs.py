# SPDX-License-Identifier: Apache-2.0
"""Whether CUDA graphs of the V2 runner leave room for branches."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config.compilation import CUDAGraphMode


def no_trees_reason(graphs: "CUDAGraphMode") -> str | None:
    """Why steps cannot have branches; None if they can.

    vLLM takes a full graph for every step where it makes no others, and there is nothing else to
    fall back to.
    """
    if graphs.has_full_cudagraphs() and not graphs.has_piecewise_cudagraphs():
        return f"cudagraph_mode is {graphs}; choose FULL_AND_PIECEWISE or PIECEWISE"
    return None
