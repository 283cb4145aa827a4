# SPDX-License-Identifier: Apache-2.0
"""Proposers for tests: one knows the right continuation, one never does, others do as told."""

import random
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from vllm_spec_ext.options import MethodOptions, RequestOptions
from vllm_spec_ext.proposers.base import (
    EMPTY_DRAFT,
    BaseProposer,
    Draft,
    EngineHandle,
    Needs,
    RequestStep,
    StepContext,
    StepOutcome,
    chain,
    proposer,
)


class OracleRequest(RequestOptions):
    """The request's true output, as plain decoding gave it."""

    truth: list[int] = Field(default_factory=list)


class SteadyOptions(MethodOptions):
    """Drafts are counted, so no clock may hold them back."""

    adaptive_length: bool = False


class OracleOptions(SteadyOptions):
    """How the oracle hides what it knows."""

    wrong: float = 0.2
    """Probability that a drafted token is replaced by a wrong one."""

    branches: int = 1
    """Branches of the drafted tree; the right one is never the first if there are several."""


class Recorder(BaseProposer):
    """Remembers what became of its drafts."""

    def __init__(self, options: MethodOptions) -> None:
        super().__init__(options)
        self.outcomes: list[StepOutcome] = []

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        self.outcomes += outcomes


@proposer(
    "oracle",
    summary="Test drafter that knows the answer.",
    options=OracleOptions,
    request_options=OracleRequest,
    num_speculative_tokens=8,
    tree=True,
)
class Oracle(Recorder):
    """Drafts the request's true continuation, sometimes spoiled."""

    options: OracleOptions

    def __init__(self, options: MethodOptions) -> None:
        super().__init__(options)
        self.wrong_paths: list[StepOutcome] = []
        self._drafted: dict[str, tuple[Draft, list[int]]] = {}

    def propose(self, step: StepContext) -> list[Draft]:
        drafts = [self._draft(request) for request in step.requests]
        for request, draft in zip(step.requests, drafts, strict=True):
            assert isinstance(request.options, OracleRequest)
            following = request.options.truth[request.num_output_tokens :]
            self._drafted[request.request_id] = draft, following
        return drafts

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        super().observe(outcomes)
        for outcome in outcomes:
            draft, truth = self._drafted[outcome.request_id]
            nodes = list(outcome.accepted)
            parents = range(-1, len(draft) - 1) if draft.parents is None else draft.parents
            is_path = [int(parents[node]) for node in nodes] == [-1, *nodes][: len(nodes)]
            if not is_path or draft.tokens[nodes].tolist() != truth[: outcome.num_accepted]:
                self.wrong_paths.append(outcome)

    def _draft(self, request: RequestStep) -> Draft:
        options = request.options
        assert isinstance(options, OracleRequest)
        position = request.num_output_tokens
        rng = random.Random(f"{len(request.token_ids)}-{int(request.token_ids[-1])}")
        right = options.truth[position : position + rng.randint(1, 8)]
        right = [t if rng.random() > self.options.wrong else (t + 1) % 500 for t in right]
        right = right[: request.room]
        if not right:
            return EMPTY_DRAFT
        if self.options.branches == 1:
            return chain(right)
        return _hide_in_tree(right, request.room, self.options.branches, rng)


def _hide_in_tree(right: list[int], room: int, branches: int, rng: random.Random) -> Draft:
    """A tree whose later branches hold the right tokens, forking at the root and below it."""
    tokens: list[int] = []
    parents: list[int] = []

    def add(branch: Sequence[int], parent: int) -> int:
        for token in branch:
            tokens.append(token)
            parents.append(parent)
            parent = len(tokens) - 1
        return parent

    add([(right[0] + 2 + i) % 500 for i in range(rng.randint(1, 3))], -1)
    for extra in range(branches - 2):
        add([(right[0] + 7 + extra) % 500], -1)
    fork = rng.randint(1, len(right))
    last = add(right[:fork], -1)
    if fork < len(right):
        add([(right[fork] + 3) % 500], last)
        add(right[fork:], last)
    return Draft(np.array(tokens[:room], np.int32), np.array(parents[:room], np.int32))


@proposer(
    "branches",
    summary="Test drafter whose drafts all have the same form.",
    options=OracleOptions,
    request_options=OracleRequest,
    num_speculative_tokens=16,
    tree=True,
)
class Branches(BaseProposer):
    """As many chains side by side as it is told, each equally long; the last one is right.

    But every third token of it is wrong, so that some of it is accepted.
    """

    options: OracleOptions
    num_nodes: int

    def start(self, engine: EngineHandle) -> None:
        self.num_nodes = engine.num_speculative_tokens

    def propose(self, step: StepContext) -> list[Draft]:
        return [self._draft(request) for request in step.requests]

    def _draft(self, request: RequestStep) -> Draft:
        options, branches = request.options, self.options.branches
        assert isinstance(options, OracleRequest)
        length, place = self.num_nodes // branches, request.num_output_tokens
        right = np.array(options.truth[place : place + length], np.int32)
        if len(right) < length or request.room < self.num_nodes:
            return EMPTY_DRAFT
        wrong = (np.arange(length) + place) % 3 == 2
        right[wrong] = (right[wrong] + 1) % 500
        others = [(right + 2 + branch) % 500 for branch in range(branches - 1)]
        tokens = np.concatenate([*others, right]).astype(np.int32)
        parents = np.arange(-1, self.num_nodes - 1, dtype=np.int32)
        parents[::length] = -1
        return Draft(tokens, parents if branches > 1 else None)


@proposer(
    "noise",
    summary="Test drafter that is always wrong.",
    options=SteadyOptions,
    request_options=OracleRequest,
    num_speculative_tokens=8,
    tree=True,
)
class Noise(Recorder):
    """Drafts tokens that are never the true ones."""

    def propose(self, step: StepContext) -> list[Draft]:
        return [self._draft(request) for request in step.requests]

    @staticmethod
    def _draft(request: RequestStep) -> Draft:
        options = request.options
        assert isinstance(options, OracleRequest)
        position = request.num_output_tokens
        following = options.truth[position : position + request.room]
        return chain([(token + 11) % 500 for token in following])


class FixedRequest(RequestOptions):
    """The draft itself, the same in every step."""

    tokens: list[int] = Field(default_factory=list)
    parents: list[int] | None = None


@proposer(
    "fixed",
    summary="Test drafter that drafts what the request says.",
    options=SteadyOptions,
    request_options=FixedRequest,
    num_speculative_tokens=16,
    tree=True,
)
class Fixed(Recorder):
    """Drafts one given tree or chain, whatever came before."""

    def propose(self, step: StepContext) -> list[Draft]:
        return [self._draft(request) for request in step.requests]

    @staticmethod
    def _draft(request: RequestStep) -> Draft:
        options = request.options
        assert isinstance(options, FixedRequest)
        tokens = np.array(options.tokens[: request.room], np.int32)
        if options.parents is None:
            return chain(tokens)
        return Draft(tokens, np.array(options.parents[: len(tokens)], np.int32))


class DrawnRequest(RequestOptions):
    """The distribution to draw from, the same at every node, and the tree to fill."""

    distribution: dict[int, float] = Field(default_factory=dict)
    parents: list[int] = Field(default_factory=list)
    drawn: Literal["iid", "without_replacement"] = "iid"

    show_distributions: bool = True
    """Hand the distribution over with the draft, as one must."""

    chosen: bool = False
    """The known bug: the best tokens are chosen, and the probabilities handed over."""


@proposer(
    "drawn",
    summary="Test drafter that draws its tokens.",
    options=SteadyOptions,
    request_options=DrawnRequest,
    num_speculative_tokens=8,
    tree=True,
)
class Drawn(Recorder):
    """Fills a given tree with draws from a given distribution."""

    needs = Needs(distributions=True)

    def start(self, engine: EngineHandle) -> None:
        self._vocab_size = engine.vocab_size
        self._random = np.random.default_rng(0)

    def propose(self, step: StepContext) -> list[Draft]:
        return [self._draft(request) for request in step.requests]

    def _draft(self, request: RequestStep) -> Draft:
        import torch

        options = request.options
        assert isinstance(options, DrawnRequest)
        parents = options.parents[: request.room]
        if not parents:
            return EMPTY_DRAFT
        ids = np.array(list(options.distribution), np.int32)
        weights = np.array(list(options.distribution.values()))
        tokens = np.empty(len(parents), np.int32)
        for parent in set(parents):
            nodes = [i for i, p in enumerate(parents) if p == parent]
            if options.chosen:
                drawn = np.argsort(-weights)[: len(nodes)]
            else:
                replace = options.drawn == "iid"
                drawn = self._random.choice(len(ids), len(nodes), replace=replace, p=weights)
            tokens[nodes] = ids[drawn]
        row = torch.zeros(self._vocab_size)
        row[torch.from_numpy(ids).long()] = torch.from_numpy(weights).float()
        probs = row.repeat(len(parents), 1) if options.show_distributions else None
        return Draft(tokens, np.array(parents, np.int32), probs, drawn=options.drawn)


@proposer(
    "broken",
    summary="Test drafter that does everything wrong.",
    options=SteadyOptions,
    num_speculative_tokens=4,
    tree=True,
)
class Broken(Recorder):
    """Fails in every way, one step so and the next step otherwise."""

    FAULTS = ("ids", "negative", "parents", "shape", "probs", "type")

    def __init__(self, options: MethodOptions) -> None:
        super().__init__(options)
        self.num_steps = 0

    def start(self, engine: EngineHandle) -> None:
        self._vocab_size = engine.vocab_size

    def propose(self, step: StepContext) -> list[Draft]:
        self.num_steps += 1
        if self.num_steps % 5 == 1:
            raise KeyError("no such request")
        drafts = [self._draft(request) for request in step.requests]
        return drafts[1:] if self.num_steps % 5 == 2 else drafts

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        super().observe(outcomes)
        raise IndexError("an outcome of an unknown request")

    def finish(self, request_ids: Sequence[str]) -> None:
        raise RuntimeError("already finished")

    def _draft(self, request: RequestStep) -> Any:
        import torch

        fault = self.FAULTS[(self.num_steps + request.num_output_tokens) % len(self.FAULTS)]
        tokens = np.arange(3, dtype=np.int32)
        nan = torch.full((3, self._vocab_size), float("nan"))
        return {
            "ids": chain(np.array([1, 2**31 - 1], np.int32)),
            "negative": chain([-1, 5]),
            "parents": Draft(tokens, np.array([0, 1, 2], np.int32)),
            "shape": Draft(tokens.reshape(1, 3)),
            "probs": Draft(tokens, probs=nan),
            "type": None,
        }[fault]


class ScriptRequest(RequestOptions):
    """One draft for each number of output tokens."""

    drafts: dict[int, tuple[list[int], list[int]]] = Field(default_factory=dict)
    """Output tokens so far -> tokens and parents."""


@proposer(
    "script",
    summary="Test drafter that follows a script.",
    options=SteadyOptions,
    request_options=ScriptRequest,
    num_speculative_tokens=8,
    tree=True,
)
class Script(Recorder):
    """Drafts what the request's script says for this place; nothing where it says nothing."""

    def propose(self, step: StepContext) -> list[Draft]:
        return [self._draft(request) for request in step.requests]

    @staticmethod
    def _draft(request: RequestStep) -> Draft:
        options = request.options
        assert isinstance(options, ScriptRequest)
        tokens, parents = options.drafts.get(request.num_output_tokens, ([], []))
        if not tokens:
            return EMPTY_DRAFT
        room = request.room
        return Draft(np.array(tokens[:room], np.int32), np.array(parents[:room], np.int32))
