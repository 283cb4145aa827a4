# SPDX-License-Identifier: Apache-2.0
"""The arrays of a :class:`.plan.TreePlan` on the device, in two copies for all of them."""

from typing import NamedTuple

import numpy as np
import torch

from vllm_spec_ext.engine.trees.plan import IntArray, TreePlan


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
        )
        lengths = (plan.query_starts, plan.seq_lens, plan.table_blocks)
        plan.tensors = PlanTensors(
            *_copied(indices, np.int64, device), *_copied(lengths, np.int32, device)
        )
    return plan.tensors


def _copied(
    arrays: tuple[IntArray, ...], dtype: type[np.integer], device: torch.device
) -> tuple[torch.Tensor, ...]:
    together = torch.from_numpy(np.concatenate(arrays, dtype=dtype))
    return together.to(device, non_blocking=True).split([len(array) for array in arrays])
