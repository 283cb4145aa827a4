# SPDX-License-Identifier: Apache-2.0
"""The arrays of a :class:`.plan.TreePlan` on the device, in one copy for all of them."""

from typing import NamedTuple

import numpy as np
import torch

from vllm_spec_ext.engine.trees.plan import TreePlan

ALIGNED = 4  # int32


class PlanTensors(NamedTuple):
    """As in the plan."""

    rows: torch.Tensor  # int64
    positions: torch.Tensor  # int64
    slots: torch.Tensor  # int64
    shared_rows: torch.Tensor  # int64
    shared_slots: torch.Tensor  # int64
    request_of: torch.Tensor  # int64
    table_rows: torch.Tensor  # int64
    table_columns: torch.Tensor  # int64
    tail_copies: torch.Tensor  # int64, the pairs one behind the other
    query_starts: torch.Tensor  # int32
    seq_lens: torch.Tensor  # int32
    table_blocks: torch.Tensor  # int32


def on_device(plan: TreePlan, device: torch.device) -> PlanTensors:
    """The plan's tensors; copied when they are asked for first."""
    if plan.tensors is None:
        indices = (
            plan.rows,
            plan.positions,
            plan.slots,
            plan.shared_rows,
            plan.shared_slots,
            plan.request_of,
            plan.table_rows,
            plan.table_columns,
            plan.tail_copies.reshape(-1),
        )
        lengths = (plan.query_starts, plan.seq_lens, plan.table_blocks)
        # Triton compiles attention once more for addresses that are no multiples of 16.
        padded = [-(-len(each) // ALIGNED) * ALIGNED for each in lengths]
        split = sum(padded) // 2  # int32 in front, two in the place of an int64
        sizes = list(map(len, indices))
        together = np.zeros(split + sum(sizes), np.int64)
        np.concatenate(indices, out=together[split:])
        start, in_front = 0, together[:split].view(np.int32)
        for each, size in zip(lengths, padded, strict=True):
            in_front[start : start + len(each)] = each
            start += size
        placed = torch.from_numpy(together).to(device, non_blocking=True)
        parts = placed[:split].view(torch.int32).split(padded)
        plan.tensors = PlanTensors(
            *placed[split:].split(sizes),
            *(part[: len(each)] for part, each in zip(parts, lengths, strict=True)),
        )
    return plan.tensors
