# SPDX-License-Identifier: Apache-2.0
"""A proposer for tests that drafts with hosted models: chains, and trees whose right path is last.

It knows which nodes of a draft the last model made. Where that model is the target itself, all of
these that were verified must be accepted; what was not is counted in ``num_missed``.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from drafters import Recorder, SteadyOptions

from vllm_spec_ext.options import MethodOptions, RequestOptions
from vllm_spec_ext.proposers.base import (
    EMPTY_DRAFT,
    Branch,
    Draft,
    DraftModel,
    EngineHandle,
    ModelSpec,
    StepContext,
    StepOutcome,
    proposer,
)


class ModelPathsOptions(SteadyOptions):
    """Which models draft what."""

    models: list[str]
    """Folders of draft models; the last one makes the path, the others wrong ones."""

    shape: Literal["chain", "fork", "suffix"] = "chain"
    """The last model's path is made on the trunk; on a fork of it, while the trunk reads a wrong
    token; or on a trunk that read the first token as a suffix of its sync."""

    skip: int = 0
    """In so many of seven steps nothing is drafted or read."""

    depth: int = 4
    """Tokens of a path."""


@proposer(
    "model_paths",
    summary="Test drafter that drafts greedy paths of draft models.",
    options=ModelPathsOptions,
    request_options=RequestOptions,
    num_speculative_tokens=4,
    tree=True,
)
class ModelPaths(Recorder):
    """Greedy paths of hosted models."""

    options: ModelPathsOptions

    def __init__(self, options: MethodOptions) -> None:
        super().__init__(options)
        self.num_steps = 0
        self.num_dead = 0  # branches that found no room
        self.num_right = self.num_missed = 0  # verified nodes of the last model
        self._right: dict[str, list[int]] = {}

    @classmethod
    def models(cls, options: MethodOptions) -> Sequence[ModelSpec]:
        assert isinstance(options, ModelPathsOptions)
        return [ModelSpec(f"draft{i}", folder) for i, folder in enumerate(options.models)]

    def start(self, engine: EngineHandle) -> None:
        self.hosted = engine.models

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        super().observe(outcomes)
        for outcome in outcomes:
            right = self._right[outcome.request_id]
            expected = sum(node < outcome.num_drafted for node in right)
            self.num_right += expected
            self.num_missed += max(0, expected - outcome.num_accepted)

    def propose(self, step: StepContext) -> list[Draft]:
        self.num_steps += 1
        if self.num_steps % 7 < self.options.skip:
            return [EMPTY_DRAFT] * len(step.requests)
        rows = [row for row, request in enumerate(step.requests) if request.room]
        paths: list[list[list[int]]] = [[] for _ in step.requests]
        for model in self.hosted[:-1]:
            live = [trunk for trunk in model.sync(step.requests, rows) if trunk is not None]
            for branch, path in self._follow(model, live).items():
                paths[branch.request].append(path)
        model = self.hosted[-1]
        live = [trunk for trunk in model.sync(step.requests, rows) if trunk is not None]
        first: dict[int, list[int]] = {}
        if self.options.shape == "suffix" and live:
            best = model.logits(live).argmax(dim=1).tolist()
            first = {trunk.request: [token] for trunk, token in zip(live, best, strict=True)}
            again = model.sync(step.requests, list(first), list(first.values()))
            live = [trunk for trunk in again if trunk is not None]
            for trunk in live:
                assert [int(model.all_logits(trunk)[0].argmax())] == first[trunk.request]
        elif self.options.shape == "fork":
            live = self._fork_off_wrong_paths(model, live, paths)
        followed = set()  # the others have wrong paths only
        for branch, path in self._follow(model, live).items():
            paths[branch.request].append([*first.get(branch.request, []), *path])
            followed.add(branch.request)
        drafts = []
        for row, (request, own) in enumerate(zip(step.requests, paths, strict=True)):
            draft, last = _merge(own)
            self._right[request.request_id] = last if row in followed else []
            drafts.append(draft)
        return drafts

    def _fork_off_wrong_paths(
        self,
        model: DraftModel,
        trunks: list[Branch],
        paths: list[list[list[int]]],
    ) -> list[Branch]:
        """Let the trunks read wrong tokens; returns forks that do not know of it."""
        twins = model.fork(trunks)
        self.num_dead += sum(twin is None for twin in twins)
        if trunks:
            wrong = ((model.logits(trunks).argmax(dim=1) + 1) % 500).tolist()
            model.extend(trunks, [[token] for token in wrong])
            for trunk, token in zip(trunks, wrong, strict=True):
                paths[trunk.request].append([token])
                if trunk.alive:
                    paths[trunk.request][-1].append(int(model.logits([trunk])[0].argmax()))
        return [twin for twin in twins if twin is not None]

    def _follow(self, model: DraftModel, live: list[Branch]) -> dict[Branch, list[int]]:
        """The greedy path behind each branch."""
        paths: dict[Branch, list[int]] = {branch: [] for branch in live}
        while live:
            best = model.logits(live).argmax(dim=1).tolist()
            for branch, token in zip(live, best, strict=True):
                paths[branch].append(token)
            live = [branch for branch in live if len(paths[branch]) < self.options.depth]
            model.extend(live, [paths[branch][-1:] for branch in live])
            self.num_dead += sum(not branch.alive for branch in live)
            live = [branch for branch in live if branch.alive]
        return paths


def _merge(paths: Sequence[Sequence[int]]) -> tuple[Draft, list[int]]:
    """A trie of paths, and the nodes of the last one."""
    nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    last: list[int] = []
    for path in paths:
        last, parent = [], -1
        for token in path:
            parent = nodes.setdefault((parent, token), len(nodes))
            last.append(parent)
    tokens = np.array([token for _, token in nodes], np.int32)
    return Draft(tokens, np.array([parent for parent, _ in nodes], np.int32)), last
