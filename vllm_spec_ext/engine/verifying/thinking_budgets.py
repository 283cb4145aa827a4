# SPDX-License-Identifier: Apache-2.0
"""Thinking budgets for every row of a step: forced where plain decoding would force.

vLLM's ``ThinkingBudgetStateHolder`` counts a request's thinking tokens as they are generated and
forces the end of the thought when the budget is used up. It knows one state a request, and with
drafts it guesses where in them the budget ends. In vLLM 0.32 the state of a rejected draft is not
taken back, a step without any draft forces tokens of the wrong request
(``_apply_forcing_to_logits``), and a request that moves to the place of a finished one inherits its
state (``sync_batch``). Here vLLM's own counting runs over each request's tokens one by one, as in
plain decoding, and goes on from there along the draft, node by node.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm_spec_ext.engine.verifying.draft_batch import DraftBatch

if TYPE_CHECKING:
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

State = dict[str, Any]  # vLLM's


@dataclass
class _Counted:
    """A request's state after some of its output."""

    state: State
    output: list[int]


class ThinkingBudgets:
    """The states of all requests that have a budget."""

    def __init__(self) -> None:
        self._counted: dict[str, _Counted] = {}

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what was counted for requests that are gone."""
        for request_id in request_ids:
            self._counted.pop(request_id, None)

    def of_rows(
        self,
        holder: "ThinkingBudgetStateHolder",
        batch: DraftBatch,
        requests: "Sequence[CachedRequestState]",
        outputs: Sequence[list[int]],
    ) -> "RowBudgets":
        """The tokens to force in a step.

        Args:
            holder: vLLM's ``ThinkingBudgetStateHolder``, for its methods; its states stay unused.
            batch: Rows and draft nodes.
            requests: vLLM's ``CachedRequestState`` of each request of the batch, in its order.
            outputs: Output tokens of each request so far, without drafts.
        """
        forced: dict[int, int] = {}
        for request, known in enumerate(requests):
            if known.sampling_params.thinking_token_budget is None:
                continue
            root_state = self._count(holder, known, outputs[request])
            root = int(batch.root_rows[request])
            first, end = batch.node_starts[request : request + 2].tolist()
            states = {-1: root_state}
            paths: dict[int, list[int]] = {-1: []}
            length, output = len(outputs[request]), list(outputs[request])
            _force(holder, root_state, root, forced)
            for node in range(end - first):
                above = int(batch.parents[first + node])
                paths[node] = [*paths[above], int(batch.tokens[first + node])]
                output[length:] = paths[node]
                state = states[node] = dict(states[above])
                _advance(holder, state, output)
                _force(holder, state, root + 1 + node, forced)
        return RowBudgets(forced)

    def _count(
        self, holder: "ThinkingBudgetStateHolder", known: "CachedRequestState", output: list[int]
    ) -> State:
        """A request's state after all of its output, each token counted once."""
        counted = self._counted.get(known.req_id)
        if counted is None or output[: len(counted.output)] != counted.output:
            state = holder._init_state_entry(
                known.prompt_token_ids, known.sampling_params.thinking_token_budget
            )
            _advance(holder, state, [])
            counted = self._counted[known.req_id] = _Counted(state, [])
        for token in output[len(counted.output) :]:
            counted.output.append(token)
            _advance(holder, counted.state, counted.output)
        return counted.state


def _advance(holder: "ThinkingBudgetStateHolder", state: State, output: list[int]) -> None:
    """One step of plain decoding, as ``ThinkingBudgetStateHolder.update_state`` counts it.

    vLLM looks through all that was said since the last thought for the start and the end of one, in
    every step. Here a token is never the last one twice, so only what is new can complete these.
    """
    state.update(output_tok_ids=output, spec_token_ids=[], in_spec_mode=False, force_index=[])
    holder._update_think_state(state)
    longest = max(len(holder.think_start_token_ids), len(holder.think_end_token_ids))
    state["scan_offset"] = max(state["scan_offset"], len(output) - longest + 1)


def _force(
    holder: "ThinkingBudgetStateHolder", state: State, row: int, forced: dict[int, int]
) -> None:
    end = holder.think_end_token_ids
    if state.get("in_end") and state["force_index"] and state["end_count"] < len(end):
        forced[row] = end[state["end_count"]]


class RowBudgets:
    """Stands in for vLLM's holder in the metadata of rows."""

    def __init__(self, forced: Mapping[int, int]) -> None:
        """Forced tokens by row."""
        self._forced = forced

    def has_tracked_requests(self) -> bool:
        """Whether any row is forced."""
        return bool(self._forced)

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the states are those of this step already."""

    def apply_to_logits(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Leave the forced token alone in its row; called by vLLM's sampler."""
        rows = torch.tensor(list(self._forced), device=logits.device)
        logits[rows] = -torch.inf
        logits[rows, torch.tensor(list(self._forced.values()), device=logits.device)] = 0.0
        return logits
