# SPDX-License-Identifier: Apache-2.0
"""What attention is told of a pass of ours; its backends build their own metadata of it."""

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.attention.backend import CommonAttentionMetadata


def common_metadata(
    query_lens: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    tables: torch.Tensor,
    slots: torch.Tensor,
) -> CommonAttentionMetadata:
    """Of a causal pass.

    Args:
        query_lens: [num_requests] rows of each.
        seq_lens: [num_requests] tokens of each that attention sees, its rows included.
        tables: [num_requests, most blocks] their KV blocks; on the device of the pass.
        slots: [num_rows] where the KV of each row goes; on the same device.
    """
    starts = np.zeros(len(query_lens) + 1, np.int32)
    np.cumsum(query_lens, out=starts[1:])
    starts_cpu, lens_cpu = torch.from_numpy(starts), torch.from_numpy(seq_lens)
    return CommonAttentionMetadata(
        query_start_loc=starts_cpu.to(slots.device, non_blocking=True),
        query_start_loc_cpu=starts_cpu,
        seq_lens=lens_cpu.to(slots.device, non_blocking=True),
        seq_lens_cpu_upper_bound=lens_cpu,
        num_reqs=len(query_lens),
        num_actual_tokens=len(slots),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=tables,
        slot_mapping=slots,
        causal=True,
    )
