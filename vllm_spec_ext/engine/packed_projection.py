# SPDX-License-Identifier: Apache-2.0
"""Vocabulary projections of drafts, by the engine's own kernels.

A small draft model or a few heads spend most of their time in this one matrix. What a draft says
need not be exact: the target verifies it, and a drawn draft tells the probabilities it was drawn
from. So a large matrix is kept in half precision where that is faster.
"""

import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from vllm_spec_ext.proposers.records import Projection, plain_projection

_LARGE = 4 << 20  # entries, 16 MiB in float32; smaller ones fit into a processor's caches


def rounds(rows: torch.Tensor) -> bool:
    """Whether products with this matrix are made in bfloat16 though it has float32.

    On processors with instructions for that, products of few states take a half to a quarter of
    the time: it is the reading of the matrix that takes it.
    """
    return (
        rows.device.type == "cpu"
        and rows.dtype == torch.float32
        and rows.numel() >= _LARGE
        and _multiplies_bfloat16()
    )


def packed_projection(rows: torch.Tensor) -> Projection:
    """Pack a matrix in the form that is fastest here.

    On a CPU as vLLM packs the weights of its linear layers (oneDNN): a product of few states with
    many rows takes half of the time of torch's own. Elsewhere nothing is packed.

    Args:
        rows: [num_rows, hidden_size]; kept, packed, or both.

    Returns:
        States [n, hidden_size] to [n, num_rows], in the type of the rows; see :func:`rounds`.
    """
    if rows.device.type != "cpu":
        return plain_projection(rows)
    dtype = torch.bfloat16 if rounds(rows) else rows.dtype
    shown = rows.dtype
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(rows.to(dtype), requires_grad=False)
    # It keeps the rows where this machine has no kernel for them, and an empty tensor elsewhere.
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)

    def project(states: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = layer.cpu_linear(states.to(dtype), layer.weight, None)
        return found.to(shown)

    return project


def _multiplies_bfloat16() -> bool:
    """Of this processor."""
    asked = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in asked)
