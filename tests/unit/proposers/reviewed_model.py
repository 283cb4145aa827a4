# SPDX-License-Identifier: Apache-2.0
"""A draft model without an engine that reads chunks and goes back, and methods that guess."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from fake_model import FakeBranch, FakeModel, NextLogits

from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers.base import (
    EMPTY_DRAFT,
    BaseProposer,
    Branch,
    Draft,
    IntArray,
    RequestStep,
    StepContext,
    StepOutcome,
    chain,
    proposer,
)


class ReviewedModel(FakeModel):
    """Predicts by a function of the text, and checks that it is read as a trunk is."""

    def __init__(self, next_logits: NextLogits, vocab_size: int, **more: Any) -> None:
        super().__init__(next_logits, vocab_size, **more)
        self.chunks: list[list[int]] = []  # tokens that each request reads, of each pass
        self._lasts: dict[int, tuple[int, int]] = {}  # branch -> length before and behind its pass
        self._synced_at: dict[int, int] = {}  # by request

    def sync(
        self,
        requests: Sequence[RequestStep],
        rows: Sequence[int],
        suffixes: Sequence[Sequence[int]] | None = None,
    ) -> list[Branch | None]:
        trunks = super().sync(requests, rows)
        assert suffixes is not None
        self.chunks.append([1 + len(suffix) for suffix in suffixes])
        self._synced_at.update(dict.fromkeys(rows, self.step))
        for trunk, suffix in zip(trunks, suffixes, strict=True):
            if trunk is not None:
                self._read(self._own(trunk), suffix)
        return trunks

    def extend(self, branches: Sequence[Branch], tokens: Sequence[Sequence[int]]) -> None:
        assert len(branches), "a pass over nothing"
        assert len({id(branch) for branch in branches}) == len(branches)
        self.read.append([])
        self.chunks.append([len(added) for added in tokens])
        for branch, added in zip(map(self._own, branches), tokens, strict=True):
            assert len(added)
            assert branch.alive
            self._read(branch, added)
            self.read[-1].append(list(branch.text))

    def rewind(self, branch: Branch, length: int) -> None:
        own = self._own(branch)
        assert self._starts[own.request] <= length < own.length
        del own.text[length:]
        own.length = length

    def all_logits(self, branch: Branch) -> torch.Tensor:
        own = self._own(branch)
        assert own.alive
        before, behind = self._lasts[id(own)]
        assert behind == own.length, "was rewound"
        rows = [self.next_logits(own.text[:end]) for end in range(before, behind)]
        return torch.from_numpy(np.reshape(rows, (len(rows), self.vocab_size))).float()

    def read_logits(self, branch: Branch) -> torch.Tensor:
        own = self._own(branch)
        assert own.alive
        before, behind = self._lasts[id(own)]
        assert before < behind == own.length, "was rewound"
        rows = [self.next_logits(own.text[:end]) for end in range(before + 1, behind + 1)]
        return torch.from_numpy(np.stack(rows)).float()

    def _own(self, branch: Branch) -> FakeBranch:
        """Other requests of the step may begin later, and one may begin again."""
        assert isinstance(branch, FakeBranch)
        assert branch.step == self._synced_at[branch.request], "another trunk took its place"
        return branch

    def _read(self, branch: FakeBranch, tokens: Sequence[int]) -> None:
        assert all(0 <= token < self.vocab_size for token in tokens)
        before = branch.length
        branch.text += tokens
        branch.length = len(branch.text)
        self._lasts[id(branch)] = before, branch.length
        num_read = branch.length - self._starts[branch.request]
        branch.alive = num_read <= self.most_read and branch.length <= self.max_model_len


class GuessOptions(MethodOptions):
    """Set by the class."""


@proposer("guess", summary="Says what it is told.", options=GuessOptions)
class Guess(BaseProposer):
    """A method that follows the text with a state, and may be told what to foresee."""

    foresee: Callable[[list[int], int], list[int]] = staticmethod(lambda text, most: [])
    """Verified text, most tokens -> tokens."""
    probs: Callable[[list[int], list[int]], torch.Tensor] | None = None
    """Verified text, tokens -> what they were drawn from."""

    def __init__(self, options: MethodOptions) -> None:
        super().__init__(options)
        self.texts: dict[str, list[int]] = {}  # as it was shown them
        self.outcomes: list[StepOutcome] = []
        self.rooms: list[list[int]] = []

    def propose(self, step: StepContext) -> list[Draft]:
        self.rooms.append([request.room for request in step.requests])
        return [self._one(request) for request in step.requests]

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        self.outcomes += outcomes

    def finish(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.texts.pop(request_id, None)

    def _one(self, request: RequestStep) -> Draft:
        text = self.texts[request.request_id] = request.token_ids.tolist()
        if not request.room:
            return EMPTY_DRAFT
        tokens = type(self).foresee(text, request.room)[: request.room]
        probs = type(self).probs
        if probs is None or not tokens:
            return chain(tokens)
        return Draft(np.array(tokens, np.int32), probs=probs(text, tokens))


@proposer("going_on", summary="Says what it is told, again and again.", options=GuessOptions)
class GoingOn(Guess):
    """May be asked again."""

    def continue_from(self, request_id: str, provisional: Sequence[int], most: int) -> IntArray:
        text = [*self.texts[request_id], *provisional]
        return np.array(type(self).foresee(text, most)[:most], np.int32)


GUESSES = {"guess": "reviewed_model:Guess", "going_on": "reviewed_model:GoingOn"}
"""For the registry."""
