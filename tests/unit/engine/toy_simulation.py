# SPDX-License-Identifier: Apache-2.0
"""Requests come and go on a toy of the engine while a random proposer uses draft models."""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from paged_toy import VOCAB, ToyRequest, ToyScheduler, ToyStep

from vllm_spec_ext.engine.models.batch_events import BlockEvents
from vllm_spec_ext.engine.models.block_model import BlockModel
from vllm_spec_ext.engine.models.hosted_model import HostedModel
from vllm_spec_ext.proposers.models import Branch
from vllm_spec_ext.proposers.records import RequestStep

BLOCK, BLOCKS, SCRATCH = 4, 40, 24
PREFIXES = [[i % VOCAB for i in range(20)], [(3 * i + 1) % VOCAB for i in range(13)]]
Drafts = dict[int, list[int]]  # by the place of a request in the step
Floats = NDArray[np.float64]


class Simulation(ABC):
    """Compares every row of logits that a proposer could see with a dense computation."""

    def __init__(self, seed: int, skip: float = 0.3, *, ahead: int, sessions: float) -> None:
        """Empty.

        Args:
            seed: Of all that happens.
            skip: Share of the steps in which nothing is drafted.
            ahead: See :class:`.paged_toy.ToyScheduler`.
            sessions: See there.
        """
        self.skip, self.rng = skip, random.Random(seed)
        self.scheduler = ToyScheduler(BLOCKS, BLOCK, 24, self.rng, ahead=ahead, sessions=sessions)
        self.rows = self.wrong = 0  # compared; those that differ
        self.found_no_room = 0
        self.models: list[HostedModel] = []
        self.texts: dict[int, list[int]] = {}  # of each branch

    @abstractmethod
    def truth(self, tokens: Sequence[int]) -> int:
        """The target's next token."""

    @abstractmethod
    def drafts(self, requests: Sequence[RequestStep]) -> Drafts:
        """Use the models; a path of drafted tokens for some requests."""

    @abstractmethod
    def dense(self, model: HostedModel, text: Sequence[int], num_certain: int) -> Floats:
        """[n, VOCAB] logits behind the last n tokens, at least behind all drafted ones."""

    def begin_step(self, step: ToyStep) -> None:
        """The target ran; before any draft."""

    def run(self, num_steps: int) -> "Simulation":
        """So many steps."""
        for number in range(num_steps):
            while len(self.scheduler.waiting) < 2:
                prompt = list(self.rng.choice(PREFIXES))[: self.rng.randint(5, 20)]
                prompt += [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 6))]
                name = f"{number}-{len(self.scheduler.waiting)}"
                self.scheduler.waiting.append(
                    ToyRequest(name, prompt, len(prompt), self.rng.randint(2, 25))
                )
            self._step()
        return self

    def _step(self) -> None:
        step = self.scheduler.step(self.truth)
        self.begin_step(step)
        for model in self.models:
            update(model, step.events)
            model.begin_step(step.rows)
        requests = [
            RequestStep(r.name, np.array(r.tokens, np.int32), r.num_prompt, r.tokens[-n:], 4)
            for r, n in zip(step.decoded, step.new_tokens, strict=True)
        ]
        if self.rng.random() >= self.skip:
            for index, tokens in self.drafts(requests).items():
                step.decoded[index].draft = tokens
        for model in self.models:
            model.end_step(bool(requests))
        ended = BlockEvents()
        self.scheduler.end(ended)
        for model in self.models:
            update(model, ended)

    def draft_with(
        self, model: HostedModel, requests: Sequence[RequestStep], rows: Sequence[int]
    ) -> tuple[Drafts, list[int]]:
        """Use a model in every way.

        Returns:
            Paths of drafted tokens, and the requests that it could not follow.
        """
        suffixes = None
        if self.rng.random() < 0.3:
            suffixes = [self.some_tokens(0, 3) for _ in rows]
        trunks = model.sync(requests, rows, suffixes)
        live: list[Branch] = []
        for place, (row, trunk) in enumerate(zip(rows, trunks, strict=True)):
            if trunk is None:
                continue
            suffix = [] if suffixes is None else suffixes[place]
            self.texts[id(trunk)] = [*requests[row].token_ids.tolist(), *suffix]
            self._compare(model, requests, trunk, len(suffix))
            live.append(trunk)
        for _ in range(self.rng.randint(0, 4)):
            self._fork_some(model, requests, live)
            self._extend_some(model, requests, live)
        paths = {
            branch.request: self.texts[id(branch)][len(requests[branch.request].token_ids) :]
            for branch in live
        }
        return paths, [row for row, trunk in zip(rows, trunks, strict=True) if trunk is None]

    def _fork_some(
        self, model: HostedModel, requests: Sequence[RequestStep], live: list[Branch]
    ) -> None:
        origins = [branch for branch in live if self.rng.random() < 0.4]
        for origin, twin in zip(origins, model.fork(origins), strict=True):
            if twin is None:
                self.found_no_room += 1
                continue
            self.texts[id(twin)] = list(self.texts[id(origin)])
            self._compare(model, requests, twin, 0)
            live.append(twin)

    def _extend_some(
        self, model: HostedModel, requests: Sequence[RequestStep], live: list[Branch]
    ) -> None:
        grown = [branch for branch in live if self.rng.random() < 0.8]
        more = [
            [int(model.logits([branch])[0].argmax())]
            if self.rng.random() < 0.6
            else self.some_tokens(1, 4)
            for branch in grown
        ]
        model.extend(grown, more)
        for branch, tokens in zip(grown, more, strict=True):
            if not branch.alive:
                self.found_no_room += 1
                live.remove(branch)
                continue
            self.texts[id(branch)] = self.texts[id(branch)] + tokens
            self._compare(model, requests, branch, len(tokens))
            length = branch.length - self.rng.randint(1, len(tokens))
            others = [other.length for other in live if other is not branch]
            if self.rng.random() < 0.25 and all(other <= length for other in others):
                taken = branch.length - length
                model.rewind(branch, length)
                del self.texts[id(branch)][-taken:]
                self._compare(model, requests, branch, 0, after_rewind=True)

    def _compare(
        self,
        model: HostedModel,
        requests: Sequence[RequestStep],
        branch: Branch,
        num: int,
        after_rewind: bool = False,
    ) -> None:
        """The logits behind a branch, and those of its last pass."""
        text = self.texts[id(branch)]
        self.check_length(branch, text)
        dense = self.dense(model, text, len(requests[branch.request].token_ids))
        found = model.logits([branch])
        assert found.shape == (1, VOCAB)
        rows = found if after_rewind else torch.cat([model.all_logits(branch), found])
        expected = dense[len(dense) - 1 - (0 if after_rewind else num) :]
        assert len(rows) == len(expected)
        if num and branch.length - num >= len(requests[branch.request].token_ids):
            read = model.read_logits(branch)  # of a suffix or an extension
            assert np.array_equal(read.numpy(), rows[len(rows) - num :].numpy())
        bad = ~np.isclose(rows.numpy(), expected, atol=1e-5).all(axis=1)
        self.rows += len(rows)
        self.wrong += int(bad.sum())

    def check_length(self, branch: Branch, text: Sequence[int]) -> None:
        """A branch is as long as its text."""
        assert branch.length == len(text)

    def some_tokens(self, low: int, high: int) -> list[int]:
        """Random tokens, so many."""
        return [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(low, high))]


def update(model: HostedModel | BlockModel, events: BlockEvents) -> None:
    """As the host does it."""
    if isinstance(model, BlockModel) and events.change_hands:
        model.settle()
    model.forget(events.gone)
    model.blocks.copied(events.copied)
    for blocks in events.allocated:
        model.blocks.allocate(blocks)
    for blocks, num_computed in events.entered:
        model.blocks.enter(blocks, num_computed)
