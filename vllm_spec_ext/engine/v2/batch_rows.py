# SPDX-License-Identifier: Apache-2.0
"""The requests of a step of the V2 runner, as draft models and views see them."""

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from vllm_spec_ext.engine.models.hosted_model import BatchRow
from vllm_spec_ext.engine.models.target_states import state_rows
from vllm_spec_ext.engine.step import Step
from vllm_spec_ext.engine.v2.known_requests import KnownRequests

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import BatchReqState
    from vllm.v1.worker.gpu.states import RequestState


def computed_tokens(
    known: KnownRequests, states: "RequestState", batch: "BatchReqState"
) -> list[int]:
    """Tokens of each request whose KV the target has before the step."""
    computed: list[int] = states.num_computed_tokens_np[batch.idx_mapping_np].tolist()
    for row, request_id in enumerate(batch.req_ids):
        # All but the last token, whatever the scheduler believed of the step before.
        if not batch.is_prefilling_np[row]:
            computed[row] = known.num_tokens(request_id) - 1
    return computed


def batch_rows(
    known: KnownRequests,
    step: Step,
    computed: Sequence[int],
    new_tokens: Sequence[Sequence[int]],
    group: int,
) -> list[BatchRow]:
    """The requests of a batch after its step.

    Args:
        known: With the new tokens of the step.
        step: After its verification.
        computed: Tokens of each request whose KV the target had before the step.
        new_tokens: Of each; empty in an unfinished prefill.
        group: KV group of the models.
    """
    starts = [0, *accumulate(step.num_scheduled)]
    states = state_rows(step, starts[:-1], new_tokens)
    rows = []
    for row, request_id in enumerate(step.request_ids):
        is_prefill = not new_tokens[row]
        tokens = known.get(request_id).token_ids
        end = computed[row] + step.num_scheduled[row] if is_prefill else len(tokens)
        rows.append(
            BatchRow(
                request_id,
                known.blocks(request_id, group),
                tokens[:end],
                is_prefill,
                known.num_ids(request_id),
                computed[row],
                # Of an unfinished prompt the token behind the chunk is known, else it is the last.
                tokens[1 : end + is_prefill],
                states[row],
            )
        )
    return rows
