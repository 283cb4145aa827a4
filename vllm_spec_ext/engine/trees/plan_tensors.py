# SPDX-License-Identifier: Apache-2.0
"""The arrays of a :class:`.plan.TreePlan` on the device, in one copy for all of them."""

from typing import NamedTuple

import numpy as np
import torch

from vllm_spec_ext.engine.trees.plan import TreePlan


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
        index_sizes, length_sizes = list(map(len, indices)), list(map(len, lengths))
        split, num_lengths = sum(index_sizes), sum(length_sizes)
        together = np.empty(split + (num_lengths + 1) // 2, np.int64)
        np.concatenate(indices, out=together[:split])
        np.concatenate(
            lengths, out=together[split:].view(np.int32)[:num_lengths], casting="same_kind"
        )
        placed = torch.from_numpy(together).to(device, non_blocking=True)
        plan.tensors = PlanTensors(
            *placed[:split].split(index_sizes),
            *placed[split:].view(torch.int32)[:num_lengths].split(length_sizes),
        )
    return plan.tensors
