# SPDX-License-Identifier: Apache-2.0
"""A proposer for tests that reviews tokens over views: several tokens a pass, and trees.

One view hides nothing, so what it says is what the target will say; the other is used before it in
every step, and must leave nothing behind.
"""

from collections.abc import Sequence

import numpy as np
from drafters import Recorder, SteadyOptions

from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers.base import (
    EMPTY_DRAFT,
    Draft,
    EngineHandle,
    StepContext,
    ViewSpec,
    proposer,
)

DEPTH = 3
PARENTS = np.array([-1, -1, 1, 2], np.int32)  # a wrong token first, then the path


@proposer(
    "view_reviews",
    summary="Test drafter that reviews tokens over views of the target's cache.",
    options=SteadyOptions,
    num_speculative_tokens=4,
    tree=True,
)
class ViewReviews(Recorder):
    """Drafts trees whose right path is the last one."""

    @classmethod
    def views(cls, options: MethodOptions) -> Sequence[ViewSpec]:
        return [
            ViewSpec("part", "retrieval", budget=64, sink=0, recent=32),
            ViewSpec("whole", "full"),
        ]

    def start(self, engine: EngineHandle) -> None:
        self._part, self._whole = engine.views
        self._vocab_size = engine.vocab_size

    def propose(self, step: StepContext) -> list[Draft]:
        drafts = [EMPTY_DRAFT] * len(step.requests)
        rows = [row for row, request in enumerate(step.requests) if request.room >= len(PARENTS)]
        if not rows:
            return drafts
        guesses = self._guess(step, rows)
        round_ = self._whole.begin(step.requests, rows)
        # All guesses in one pass; what is right of them stays, and the rest is read again.
        roots = [int(step.requests[row].token_ids[-1]) for row in round_.rows]
        fed = [[root, *guesses[row]] for root, row in zip(roots, round_.rows, strict=True)]
        said = round_.run(fed).argmax(dim=-1).tolist()
        kept, paths = [], []
        for tokens in fed:
            own, said = said[: len(tokens)], said[len(tokens) :]
            right = 0
            while right < len(tokens) - 1 and tokens[right + 1] == own[right]:
                right += 1
            kept.append(1 + right)
            paths.append(own[: right + 1])
        round_.keep(kept)
        while any(len(path) < DEPTH for path in paths):
            fed = [[path[-1]] if len(path) < DEPTH else [] for path in paths]
            more = iter(round_.run(fed).argmax(dim=-1).tolist())
            for path in paths:
                if len(path) < DEPTH:
                    path.append(next(more))
        for row, path in zip(round_.rows, paths, strict=True):
            wrong = (path[0] + 1) % self._vocab_size
            drafts[row] = Draft(np.array([wrong, *path[:DEPTH]], np.int32), PARENTS)
        return drafts

    def _guess(self, step: StepContext, rows: Sequence[int]) -> dict[int, list[int]]:
        """Two tokens by the part."""
        round_ = self._part.begin(step.requests, rows)
        last = [[int(step.requests[row].token_ids[-1])] for row in round_.rows]
        found: dict[int, list[int]] = {row: [] for row in rows}
        for _ in range(2):
            last = [[token] for token in round_.run(last).argmax(dim=-1).tolist()]
            for row, (token,) in zip(round_.rows, last, strict=True):
                found[row].append(token)
        return found
