# SPDX-License-Identifier: Apache-2.0
"""One step of the engine: which draft tokens were scheduled, and what the target made of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_spec_ext.engine.trees.plan import RequestRows
from vllm_spec_ext.engine.verifying.likeliest_tokens import LikeliestTokens
from vllm_spec_ext.proposers.base import StepOutcome
from vllm_spec_ext.scorers.walk.tree import Walk

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_spec_ext.engine.requests.state import RequestState


@dataclass
class Step:
    """What the overrides of the runner tell each other about the current step."""

    request_ids: Sequence[str] = ()  # in batch order
    drafts: Sequence[list[int]] = ()  # scheduled draft tokens of each request
    num_scheduled: Sequence[int] = ()  # tokens of each request in the step
    started: float | None = None  # seconds of the clock; None: prefill says nothing of decoding
    likeliest: LikeliestTokens | None = None  # if the proposer needs them
    walk: Walk | None = None  # of our own verification; None = vLLM's, of chains
    states: "Sequence[RequestState]" = ()  # what we keep of each request
    held_generators: dict[int, torch.Generator] = field(default_factory=dict)
    kept: Sequence[int] = ()  # nodes that the plan of its trees has room for; -1, or none said: all

    @classmethod
    def of(
        cls,
        request_ids: Sequence[str],
        scheduler_output: "SchedulerOutput",
        started: float,
        state_of: "Callable[[str], RequestState]",
    ) -> "Step":
        """The step that vLLM has just prepared; `started` as the attribute, with any prefill."""
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        drafts = [scheduled.get(request_id, []) for request_id in request_ids]
        decoded = sum(map(len, drafts)) + len(drafts)
        only_decodes = decoded == scheduler_output.total_num_scheduled_tokens
        num_scheduled = [scheduler_output.num_scheduled_tokens[name] for name in request_ids]
        return cls(
            tuple(request_ids),
            drafts,
            num_scheduled,
            started if only_decodes else None,
            states=[state_of(request_id) for request_id in request_ids],
        )

    def find_drafts(self) -> None:
        """Put in the tokens: an asynchronous scheduler knows only how many there are, all -1."""
        drafts = []
        for state, scheduled in zip(self.states, self.drafts, strict=True):
            waiting = state.draft if scheduled else None
            tokens = [] if waiting is None else waiting.tokens[: len(scheduled)]
            drafts.append([*tokens, *[-1] * (len(scheduled) - len(tokens))])
        self.drafts = drafts

    @cached_property
    def parents(self) -> list[list[int] | None]:
        """Parents of the scheduled nodes of each draft with branches; None of others.

        Asked first before the next drafts take the places of these.
        """
        return [
            state.parents_of(draft) if draft else None
            for state, draft in zip(self.states, self.drafts, strict=True)
        ]

    @cached_property
    def verified(self) -> Sequence[list[int]]:
        """The drafts with -1 in place of nodes that the plan left out: their rows say nothing.

        Asked first when the step is planned.
        """
        if not self.kept:
            return self.drafts
        return [
            draft if kept < 0 else [*draft[:kept], *[-1] * (len(draft) - kept)]
            for draft, kept in zip(self.drafts, self.kept, strict=True)
        ]

    def tree_rows(self, starts: Sequence[int], computed: Sequence[int]) -> list[RequestRows]:
        """Where the rows of each request and its tree stand.

        Args:
            starts: First row of each.
            computed: Tokens of each whose KV is there.
        """
        layout = zip(starts, self.num_scheduled, computed, self.drafts, self.parents, strict=True)
        return [
            RequestRows(start, count, known, parents if count == len(draft) + 1 else None)
            for start, count, known, draft, parents in layout
        ]

    def hold_back(
        self, generators: dict[int, torch.Generator], discarded: NDArray[np.bool_]
    ) -> None:
        """Let requests in mid-prefill, whose samples are discarded, draw nothing from their seeds.

        vLLM takes such a draw back by the generator's offset (0.32 ``_bookkeeping_sync``), which a
        CPU generator does not have: there it ends the engine.
        """
        held = [row for row in generators if discarded[row]]
        self.held_generators = {row: generators.pop(row) for row in held}

    def accepted_nodes(self, row: int, num_accepted: int) -> tuple[int, ...]:
        """The accepted path of a request's draft; the first nodes of a chain."""
        if self.walk is None:
            return tuple(range(num_accepted))
        return self.walk.paths[row][:num_accepted]

    def outcomes(self, new_tokens: Sequence[Sequence[int]]) -> list[StepOutcome]:
        """What became of each draft.

        Args:
            new_tokens: Of each request; empty in an unfinished prefill.
        """
        found = []
        for row, (draft, tokens) in enumerate(zip(self.verified, new_tokens, strict=True)):
            if not draft or not tokens:
                continue
            # Placeholders (-1) are the scheduler's padding of a resumed request, not a draft.
            num_drafted = len(draft) - draft.count(-1)
            if num_drafted:
                # What fills a draft up may be right, too, and is none of it.
                nodes = self.accepted_nodes(row, min(len(tokens) - 1, num_drafted))
                found.append(StepOutcome(self.request_ids[row], num_drafted, len(nodes), nodes))
        return found

    def last_rows(self, new_tokens: Sequence[Sequence[int]]) -> list[int]:
        """Row of the step's logits that gave each request's last new token."""
        rows, offset = [], 0
        for row, (draft, tokens) in enumerate(zip(self.drafts, new_tokens, strict=True)):
            node = len(tokens) - 2  # the node before the last token of a chain, -1 = root
            if self.walk is not None and node >= 0:
                node = int(self.walk.accepted[row, node])
            rows.append(offset + 1 + max(node, -1))
            offset += len(draft) + 1
        return rows
