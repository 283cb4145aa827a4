# SPDX-License-Identifier: Apache-2.0
"""Records what was drafted and what the target made of it, for `vllm-spec explain-step`.

Off unless a caller asks the worker for it; the runner then calls the two methods once a step.
Everything recorded is made of plain lists, which vLLM's RPC can carry.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm_spec_ext.proposers.base import Draft, NextTokens

MAX_STEPS = 10_000


class _Waiting(NamedTuple):
    """A draft until it is verified; a list for each node in all of them."""

    tokens: list[int]
    parents: list[int]
    path_probs: list[float]
    sources: list[list[str]]
    strengths: list[list[str]]


_NOTHING = _Waiting([], [], [], [], [])


class StepLog:
    """The last steps with a draft, and the drafts that wait for their step."""

    def __init__(self) -> None:
        self.steps: deque[dict[str, Any]] = deque(maxlen=MAX_STEPS)
        self._waiting: dict[str, _Waiting] = {}
        self._number = 0

    def next_step(self) -> None:
        """What is verified from now on belongs to another step of the engine; the first is 1."""
        self._number += 1

    def drafted(
        self, request_id: str, tokens: Sequence[int], parents: Sequence[int], draft: Draft
    ) -> None:
        """Remember a draft until it is verified.

        Args:
            request_id: Whose draft.
            tokens: [n] what is left of the draft for the next step.
            parents: [n] parent of each node, -1 = the last verified token.
            draft: As the proposer made it, at least n nodes.
        """
        probs = [] if draft.path_probs is None else draft.path_probs[: len(tokens)].tolist()
        sources = [list(names) for names in (draft.sources or ())[: len(tokens)]]
        strengths = [list(names) for names in (draft.strengths or ())[: len(tokens)]]
        self._waiting[request_id] = _Waiting(list(tokens), list(parents), probs, sources, strengths)

    def verified(
        self,
        request_id: str,
        scheduled: Sequence[int],
        accepted: Sequence[int],
        new: Sequence[int],
        foreseen: NextTokens | None = None,
    ) -> None:
        """Record a step of a request.

        Args:
            request_id: Whose step.
            scheduled: Draft tokens that were really verified, a prefix of the draft.
            accepted: Nodes on the accepted path, in order.
            new: The step's new tokens; the last one is the target's own.
            foreseen: What the target foresaw at its rows, if the proposer reads that.
        """
        draft = self._waiting.pop(request_id, _NOTHING)
        size = len(scheduled)
        if draft.tokens[:size] != list(scheduled):  # placeholders of a resumed request
            draft, size = _NOTHING, 0
        self.steps.append(
            {
                "step": self._number,
                "request_id": request_id,
                **{name: values[:size] for name, values in draft._asdict().items()},
                "accepted": [int(node) for node in accepted] if size else [],
                "new_tokens": [int(token) for token in new],
                "foreseen": _lists(foreseen),
            }
        )

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop the waiting drafts of requests that are gone."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)


def _lists(foreseen: NextTokens | None) -> dict[str, Any] | None:
    if foreseen is None:
        return None
    return {
        "contexts": foreseen.contexts.tolist(),
        "tokens": foreseen.tokens.tolist(),
        "probs": foreseen.probs.tolist(),
    }
