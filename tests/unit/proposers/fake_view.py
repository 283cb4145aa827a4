# SPDX-License-Identifier: Apache-2.0
"""A view without an engine, which also checks that it is used as the contract says."""

from collections.abc import Sequence

import torch
from fake_model import NextLogits

from vllm_spec_ext.proposers.base import EngineHandle, RequestStep, ViewSpec
from vllm_spec_ext.proposers.views import ReadFacts


class FakeView:
    """Predicts by a function of the text; counts its passes."""

    def __init__(
        self,
        next_logits: NextLogits,
        *,
        budget: int = 8,
        fixed: int = 100,
        seconds: float | None = None,
        most_room: int = 10**9,
        refuses: Sequence[str] = (),
    ) -> None:
        """Set it up.

        Args:
            next_logits: What it predicts.
            budget: Tokens in sight.
            fixed: What a pass costs beside KV, in tokens.
            seconds: That a pass takes, as measured.
            most_room: Tokens that it can read for a request.
            refuses: Requests that cannot take part.
        """
        self.next_logits, self.budget, self.seconds, self.most_room = (
            next_logits,
            budget,
            seconds,
            most_room,
        )
        self.spec = ViewSpec("fake", "stream", budget)
        self.reads = ReadFacts(fixed * 10, 10)
        self.refuses = refuses
        self.passes: list[int] = []  # rows of each
        self.round: FakeRound | None = None

    def begin(self, requests: Sequence[RequestStep], rows: Sequence[int]) -> "FakeRound":
        self.round = FakeRound(self, requests, rows)
        return self.round

    def seen(self, length: int) -> int:
        return min(length, self.budget)

    def forward_seconds(self, num_rows: int) -> float | None:
        return self.seconds if self.passes else None


class FakeRound:
    """Follows the texts."""

    def __init__(
        self, view: FakeView, requests: Sequence[RequestStep], rows: Sequence[int]
    ) -> None:
        self.rows = [row for row in rows if requests[row].request_id not in view.refuses]
        asked = [requests[row] for row in self.rows]
        self.rooms = [min(request.room, view.most_room) for request in asked]
        self._view = view
        self._texts = [request.token_ids.tolist()[:-1] for request in asked]
        lengths = [len(request.token_ids) for request in asked]
        self._ends = [length + room for length, room in zip(lengths, self.rooms, strict=True)]
        self._roots = [int(request.token_ids[-1]) for request in asked]
        self._certain = [len(text) for text in self._texts]
        self._last = [0] * len(asked)

    def run(self, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        assert self._view.round is self
        assert len(tokens) == len(self.rows)
        logits = []
        for place, some in enumerate(tokens):
            text = self._texts[place]
            if some and len(text) == self._certain[place]:
                assert some[0] == self._roots[place]
            for token in some:
                text.append(token)
                logits.append(torch.from_numpy(self._view.next_logits(text)).float())
            self._last[place] = len(some)
            assert len(text) <= self._ends[place]
        self._view.passes.append(len(logits))
        return torch.stack(logits)

    def keep(self, counts: Sequence[int]) -> None:
        for place, count in enumerate(counts):
            assert 0 <= count <= self._last[place]
            del self._texts[place][len(self._texts[place]) - self._last[place] + count :]


def engine_of(views: Sequence[FakeView], vocab_size: int, num_tokens: int = 4) -> EngineHandle:
    """As the drafter makes it, on a GPU as far as a proposer can tell."""
    return EngineHandle(
        vocab_size=vocab_size,
        max_model_len=1000,
        max_num_seqs=8,
        num_speculative_tokens=num_tokens,
        model="fake",
        load_tokenizer=lambda: None,
        device=torch.device("cuda"),
        views=views,
    )
