# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of draft models' small passes: one launch in the place of one for every kernel.

To attention every row of such a pass is a request of its own with one token, behind which lies the
KV of all rows that it sees. So a graph's shape is its number of rows, whatever parts a pass has.
Inputs are copied into buffers that stay where they are, and a pass of fewer rows is filled up: the
rows behind it write no KV and see one token. Longer passes, of prompts, run without.

Graphs hold the addresses of weights, so a drafter that learns while it serves has none.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_spec_ext.engine.models.forward_pass import ForwardPass

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig

REFUSED_BY = "VLLM_SPEC_EXT_DRAFT_GRAPHS"
"""Environment variable: 0 has passes launched kernel by kernel, to compare."""

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MOST_OF_A_PART = 16  # rows: the tokens of a step, and not a prompt
NO_SLOT = -1  # vLLM 0.32 PAD_SLOT_ID: KV of such a row goes nowhere

Inputs = Mapping[str, torch.Tensor | None]
"""Of a module, by name: ``input_ids``, ``positions``, and states or embeddings [num_rows, n]."""


def wants_graphs(vllm_config: "VllmConfig", device: torch.device, *, weights_change: bool) -> bool:
    """Whether draft models of an engine get graphs.

    Args:
        vllm_config: The engine's.
        device: Of the models.
        weights_change: The drafter learns while it serves.
    """
    return (
        os.environ.get(REFUSED_BY) != "0"
        and device.type == "cuda"
        and vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
        and vllm_config.parallel_config.tensor_parallel_size == 1
        and not weights_change
    )


def single_rows(plan: ForwardPass) -> ForwardPass:
    """The same pass with a part for every row."""
    lengths = plan.query_lens
    if plan.num_rows == len(lengths):
        return plan
    part_of = np.repeat(np.arange(len(lengths)), lengths)
    ends = np.cumsum(lengths)
    behind = ends[part_of] - 1 - np.arange(plan.num_rows)  # rows of the part behind each
    return replace(
        plan,
        query_lens=np.ones(plan.num_rows, np.int32),
        seq_lens=(plan.seq_lens[part_of] - behind).astype(np.int32),
        tables=plan.tables[part_of],
    )


class Recorder:
    """Records passes of a module on the device, and plays them again."""

    def __init__(self) -> None:
        """Graphs share the memory of what they compute with; they never run at a time."""
        self._pool = torch.cuda.graph_pool_handle()

    def record(
        self, prepare: Callable[[], Any], run: Callable[[Any], Any]
    ) -> tuple[Any, Callable[[], None]]:
        """Run a pass, and keep what it launched.

        Args:
            prepare: Makes attention metadata, outside of the graph.
            run: The pass, given these.

        Returns:
            Where its output is after each replay, and the replay, which keeps the metadata: the
            graph reads their addresses.
        """
        run(prepare())  # what libraries set up at first is no part of it
        metadata = prepare()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run(metadata)
        return output, partial(_replay, graph, metadata)


def _replay(graph: torch.cuda.CUDAGraph, metadata: object) -> None:
    graph.replay()


class DraftGraphs:
    """The graphs of one draft model on one rank."""

    def __init__(
        self,
        build: Callable[[CommonAttentionMetadata], Any],
        run: Callable[..., Any],
        blank: Inputs,
        *,
        most_blocks: int,
        max_model_len: int,
        recorder: Recorder,
    ) -> None:
        """Record a graph for each of :data:`SIZES`.

        Args:
            build: Makes what the backends want of what attention is told.
            run: A pass of the module, given that, its rows' slots, and its inputs.
            blank: Inputs of as many rows as the largest size, any values.
            most_blocks: Columns of a block table.
            max_model_len: Tokens that a row can see.
            recorder: Of the device.
        """
        most = SIZES[-1]
        some = blank["positions"]
        assert some is not None
        device = some.device
        self._inputs = {
            name: None if value is None else value.clone() for name, value in blank.items()
        }
        self._slots = torch.full((most,), NO_SLOT, dtype=torch.int64, device=device)
        self._seq_lens = torch.ones(most, dtype=torch.int32, device=device)
        self._tables = torch.zeros(most, most_blocks, dtype=torch.int32, device=device)
        self._starts_cpu = torch.arange(most + 1, dtype=torch.int32)
        self._starts = self._starts_cpu.to(device)
        self._longest_cpu = torch.full((most,), max_model_len, dtype=torch.int32)
        self._max_model_len = max_model_len
        self._recorded: dict[int, tuple[Any, Callable[[], None]]] = {}
        for size in reversed(SIZES):  # the largest first: the others use its memory again
            common, inputs = self._common(size), self._part(size)
            self._recorded[size] = recorder.record(
                partial(build, common), partial(run, slots=common.slot_mapping, inputs=inputs)
            )

    def fits(self, plan: ForwardPass) -> bool:
        """Whether there is a graph for a pass.

        Not of a prompt's many tokens: each row reads by itself what it sees.
        """
        return (
            plan.num_rows <= SIZES[-1]
            and int(plan.query_lens.max()) <= MOST_OF_A_PART
            and plan.tables.shape[1] <= self._tables.shape[1]
        )

    def run(self, plan: ForwardPass, inputs: Inputs, slots: torch.Tensor) -> Any:
        """Outputs of the module, of the rows of a pass; they last until the next one.

        Args:
            plan: One that fits.
            inputs: Of its rows.
            slots: [num_rows] int64 of the plan, on the device.
        """
        num_rows = plan.num_rows
        size = next(size for size in SIZES if size >= num_rows)
        rows = single_rows(plan)
        for name, buffer in self._inputs.items():
            given = inputs[name]
            if buffer is not None and given is not None:
                buffer[:num_rows].copy_(given)
        self._slots[:num_rows].copy_(slots)
        self._slots[num_rows:size].fill_(NO_SLOT)
        self._seq_lens[:num_rows].copy_(torch.from_numpy(rows.seq_lens), non_blocking=True)
        self._seq_lens[num_rows:size].fill_(1)
        tables = torch.from_numpy(rows.tables)
        self._tables[:num_rows, : tables.shape[1]].copy_(tables, non_blocking=True)
        output, replay = self._recorded[size]
        replay()
        if isinstance(output, tuple):
            return tuple(part[:num_rows] for part in output)
        return output[:num_rows]

    def _part(self, size: int) -> dict[str, torch.Tensor | None]:
        return {
            name: None if buffer is None else buffer[:size] for name, buffer in self._inputs.items()
        }

    def _common(self, size: int) -> CommonAttentionMetadata:
        return CommonAttentionMetadata(
            query_start_loc=self._starts[: size + 1],
            query_start_loc_cpu=self._starts_cpu[: size + 1],
            seq_lens=self._seq_lens[:size],
            seq_lens_cpu_upper_bound=self._longest_cpu[:size],
            num_reqs=size,
            num_actual_tokens=size,
            max_query_len=1,
            max_seq_len=self._max_model_len,
            block_table_tensor=self._tables[:size],
            slot_mapping=self._slots[:size],
            causal=True,
        )
