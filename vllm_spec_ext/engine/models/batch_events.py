# SPDX-License-Identifier: Apache-2.0
"""What vLLM's scheduler and V1 runner say of requests and their KV blocks, in plain numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_spec_ext.engine.models.hosted_model import BatchRow
from vllm_spec_ext.engine.models.target_states import state_rows

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    from vllm_spec_ext.engine.runner import SpecRunnerMixin
    from vllm_spec_ext.engine.step import Step


@dataclass
class BlockEvents:
    """Which KV blocks change their contents before a step."""

    gone: list[str] = field(default_factory=list)  # requests whose blocks are no longer theirs
    copied: list[tuple[int, int]] = field(default_factory=list)  # (from, to), all layers
    allocated: list[Sequence[int]] = field(default_factory=list)  # to requests that go on
    entered: list[tuple[Sequence[int], int]] = field(default_factory=list)
    """All blocks of a request that came or came back, and its computed tokens: what lies behind
    these was allocated just now, what lies in front was found in the prefix cache."""

    @property
    def change_hands(self) -> bool:
        """Whether blocks that somebody used may be another's now, or are copied."""
        return bool(self.gone or self.copied or self.entered)


def block_events(
    scheduler_output: "SchedulerOutput", gone: Sequence[str], group: int
) -> BlockEvents:
    """Read them off the scheduler's output (vLLM 0.32 ``GPUModelRunner._update_states``).

    A block's contents change in no other way: the block manager lists every block that it
    allocates, with the request that it is for, in the step in which that request is scheduled.

    Args:
        scheduler_output: Of the step to come.
        gone: Requests that finished or were preempted, and sessions that go on with other tokens.
        group: KV group of the models.
    """
    events = BlockEvents(list(gone))
    for copy in scheduler_output.kv_cache_block_copies or ():
        events.copied.append((copy.src_block_id, copy.dst_block_id))
    for new in scheduler_output.scheduled_new_reqs:
        events.entered.append((new.block_ids[group], new.num_computed_tokens))
    cached = scheduler_output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[index]
        if blocks is None:
            continue
        if request_id in cached.resumed_req_ids:
            # Preempted by force, a request may come back in the same step.
            events.gone.append(request_id)
            events.entered.append((blocks[group], cached.num_computed_tokens[index]))
        else:
            events.allocated.append(blocks[group])
    return events


def leading_ids(request: "CachedRequestState | NewRequestData") -> int | None:
    """Tokens of a prompt in front of the first that has no id; None: all have one."""
    if request.prompt_embeds is not None:
        return 0
    return min((feature.mm_position.offset for feature in request.mm_features), default=None)


def batch_rows(
    runner: "SpecRunnerMixin",
    step: "Step",
    new_tokens: Sequence[Sequence[int]],
    group: int,
) -> list[BatchRow]:
    """The requests of a batch after its step.

    Args:
        runner: After its bookkeeping: it knows the new tokens of the step.
        step: After its verification.
        new_tokens: Of each; empty in an unfinished prefill.
        group: KV group of the models.
    """
    batch = runner.input_batch
    table = batch.block_table[group]
    starts = runner.query_start_loc.np[: len(new_tokens)].tolist()
    states = state_rows(step, starts, new_tokens)
    rows = []
    for row, request_id in enumerate(batch.req_ids):
        is_prefill = not new_tokens[row]
        computed = int(batch.num_computed_tokens_cpu[row])
        if is_prefill:
            end = computed + int(step.num_scheduled[row])
        else:
            end = int(batch.num_tokens_no_spec[row])
        state = runner.requests[request_id]
        rows.append(
            BatchRow(
                request_id,
                table.block_table.np[row, : table.num_blocks_per_row[row]],
                batch.token_ids_cpu[row, :end],
                is_prefill,
                leading_ids(state),
                computed,
                # Of an unfinished prompt the token behind the chunk is known, else it is the last.
                batch.token_ids_cpu[row, 1 : end + is_prefill],
                states[row],
            )
        )
    return rows
