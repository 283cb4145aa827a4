# SPDX-License-Identifier: Apache-2.0
"""The proposer that methods with draft models share: which model drafts what, if it pays."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers.base import (
    EMPTY_DRAFT,
    BaseProposer,
    Draft,
    DraftModel,
    EngineHandle,
    Needs,
    RequestStep,
    StepContext,
    StepOutcome,
)
from vllm_spec_ext.proposers.growth.grown_tree import GrownTree, Wish
from vllm_spec_ext.proposers.growth.learning import Learning
from vllm_spec_ext.proposers.growth.level_payoff import LevelPayoff
from vllm_spec_ext.proposers.growth.merging import join_drawn, merge_chosen
from vllm_spec_ext.proposers.growth.shapes import Shape, best_shapes
from vllm_spec_ext.proposers.payoff.forward_payoff import Retries, TokenCosts, TokenSeconds

_MAX_RANKS = 8  # draws of a model below one node whose rates are told apart


@dataclass(frozen=True)
class Extent:
    """What trees a method grows."""

    expansion: tuple[int, ...] | None  # children of each node, level by level; None = dynamic
    candidates: int  # dynamic: children of a node
    max_depth: int  # dynamic: levels
    max_branches: int  # dynamic: nodes of a level and request that are read
    draws: bool  # for requests with a temperature and no seed

    def num_children(self, depth: int) -> int:
        """Most children of a node, by their depth."""
        return self.candidates if self.expansion is None else self.expansion[depth]


class TreeDrafting(BaseProposer):
    """Trees of one or several draft models; a method says which, and how far they grow."""

    def __init__(self, options: MethodOptions) -> None:
        """Keep the options; the models come with :meth:`start`."""
        super().__init__(options)
        self._extent = self.extent()
        self.needs = Needs(distributions=self._extent.draws)
        self._models: Sequence[DraftModel] = ()
        self._read: list[dict[str, int]] = []  # of each model: request -> tokens at the last pass
        self._value = TokenSeconds()

    @abstractmethod
    def extent(self) -> Extent:
        """What trees these options ask for; a chain's depth is only known to :meth:`start`."""

    def start(self, engine: EngineHandle) -> None:
        """Take the models that the engine has loaded.

        Raises:
            SpecExtError: There is no engine that runs models, as in a replay of recorded texts.
        """
        self._models = self.loaded_models(engine)
        wanted = len(self._models)
        self._max_depth = min(self._extent.max_depth, engine.num_speculative_tokens)
        self._learning = Learning(wanted)
        self._retries = [Retries() for _ in range(wanted)]
        self._read = [{} for _ in range(wanted)]

    def propose(self, step: StepContext) -> list[Draft]:
        """One draft a request; no pass of any model where none pays."""
        import torch

        drafts = [EMPTY_DRAFT] * len(step.requests)
        rows = [row for row, request in enumerate(step.requests) if request.room > 0]
        costs = self._observe_step(step)
        if not rows:
            return drafts
        for row in rows:
            self._learning.forget(step.requests[row].request_id)  # a draft that had no outcome
        with torch.inference_mode():
            grown = self._grow(step, rows, costs)
        for row, trees in grown.items():
            drafts[row] = self._merge(step.requests[row], trees)
        return drafts

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Learn how far each model can be trusted."""
        for outcome in outcomes:
            self._value.verified(outcome.num_verified)
            self._learning.observe(outcome)

    def finish(self, request_ids: Sequence[str]) -> None:
        """Forget the outcomes that will not come."""
        for request_id in request_ids:
            for read in self._read:
                read.pop(request_id, None)
            if self._models:
                self._learning.forget(request_id)

    def _observe_step(self, step: StepContext) -> TokenCosts:
        """Costs in this step; nothing is known, so nothing held back, with adaptive_length off."""
        costs = self._value.begin(step)
        return costs if self.options.adaptive_length else TokenCosts()

    def _grow(
        self, step: StepContext, rows: list[int], costs: TokenCosts
    ) -> dict[int, list[tuple[int, GrownTree]]]:
        """Trees of each request by all models that pay."""
        from vllm_spec_ext.proposers.growth.levels import Reach, grow

        payoffs = [
            LevelPayoff(model, record, costs, record.novelty if number else 1.0)
            for number, (model, record) in enumerate(
                zip(self._models, self._learning.models, strict=True)
            )
        ]
        served = [self._served(number, step, rows, payoff) for number, payoff in enumerate(payoffs)]
        shapes = self._shapes(step, served, [payoff.node_cost for payoff in payoffs])
        reach = Reach(self._max_depth, self._extent.num_children, self._extent.max_branches)
        grown: dict[int, list[tuple[int, GrownTree]]] = {}
        for number, payoff in enumerate(payoffs):
            wishes = [
                Wish(row, step.requests[row].room, shapes[row, number])
                if (row, number) in shapes
                else Wish(row, step.requests[row].room, None, payoff.min_log_prob)
                for row in served[number]
            ]
            wishes = [wish for wish in wishes if wish.shape is None or len(wish.shape)]
            if not wishes:
                continue
            model, record = self._models[number], self._learning.models[number]
            noise = partial(_noise, number)
            growth = grow(model, step.requests, wishes, reach, noise, payoff.choose)
            record.passed(growth.pass_sizes, len(wishes))
            for tree in growth.trees:
                request = step.requests[tree.wish.request]
                self._read[number][request.request_id] = len(request.token_ids)
                if len(tree):
                    grown.setdefault(tree.wish.request, []).append((number, tree))
                elif tree.read:
                    record.levels.observe(0, False)  # the pass was in vain
            for size in (len(wishes), *growth.pass_sizes):
                self._value.spend(model.forward_seconds(size) or 0.0)
        return grown

    def _served(
        self, number: int, step: StepContext, rows: list[int], payoff: LevelPayoff
    ) -> list[int]:
        """Requests that a model drafts for: those that pay, one to try it again, or none."""
        some = [
            row
            for row in rows
            if (payoff.draws_pay if self._draws(step.requests[row]) else payoff.choices_pay)
        ]
        num_drawn = sum(self._draws(step.requests[row]) for row in some)
        if some and payoff.pays(len(some) - num_drawn, num_drawn, self._max_depth):
            self._retries[number].pays()
            return some
        if not payoff.could_pay(len(rows), self._max_depth) or not self._retries[number].due():
            return []
        self._learning.models[number].doubt()
        payoff.hold_nothing_back()
        read = self._read[number]

        def num_unread(row: int) -> int:
            request = step.requests[row]
            return len(request.token_ids) - read.get(request.request_id, 0)

        return [min(rows, key=num_unread)]

    def _draws(self, request: RequestStep) -> bool:
        return self._extent.draws and request.may_be_drawn

    def _shapes(
        self, step: StepContext, served: list[list[int]], node_costs: list[float]
    ) -> dict[tuple[int, int], Shape]:
        """Shapes of the drawn trees by request and model; the models share a request's room."""
        found: dict[tuple[int, int], Shape] = {}
        known: dict[tuple[tuple[int, ...], int], list[Shape]] = {}
        by_model = [set(rows) for rows in served]
        for row in sorted(set().union(*by_model)):
            request = step.requests[row]
            if not self._draws(request):
                continue
            models = tuple(number for number, rows in enumerate(by_model) if row in rows)
            key = models, request.room
            if key not in known:
                known[key] = best_shapes(
                    [self._learning.models[number].ranks.rates(_MAX_RANKS) for number in models],
                    self._extent.num_children,
                    self._max_depth,
                    request.room,
                    min(node_costs[number] for number in models),
                )
            found |= {
                (row, number): shape for number, shape in zip(models, known[key], strict=True)
            }
        return found

    def _merge(self, request: RequestStep, trees: list[tuple[int, GrownTree]]) -> Draft:
        """The draft of a request, and a note of what is promised."""
        if trees[0][1].wish.shape is not None:
            merged = join_drawn(trees)
        else:
            estimated = [(number, tree, self._acceptance(number, tree)) for number, tree in trees]
            merged = merge_chosen(estimated, request.room)
        draft = merged.draft([model.name for model in self._models])
        self._learning.drafted(request.request_id, merged)
        return draft

    def _acceptance(self, number: int, tree: GrownTree) -> list[float]:
        """[n] probability that each node is accepted, as learned."""
        promised = np.exp(np.array(tree.log_probs)).astype(np.float32)
        return self._learning.models[number].nodes.acceptance(promised).tolist()


def _noise(number: int, request: RequestStep, size: int) -> NDArray[np.float64]:
    from vllm_spec_ext.proposers.growth.drawing import uniforms

    return uniforms(request.request_id, len(request.token_ids), number, size)
