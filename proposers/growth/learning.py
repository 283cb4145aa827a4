# SPDX-License-Identifier: Apache-2.0
"""What became of the drafts: how far each model can be trusted, and what it adds to the others."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_spec_ext.proposers.growth.merging import MergedTree
from vllm_spec_ext.proposers.payoff.level_rates import LevelRates, RankRates
from vllm_spec_ext.proposers.payoff.node_payoff import NodePayoff
from vllm_spec_ext.proposers.records import StepOutcome

_MEMORY = 0.98  # of what a model adds: what remains after one more draft
_DOUBTED = 0.7  # what remains of sums when the model is tried again
_PRIOR = 4.0  # accepted tokens that it is trusted with to be new


@dataclass
class ModelRecord:
    """Of one model, over all requests."""

    nodes: NodePayoff = field(default_factory=NodePayoff)  # chosen nodes, by what was promised
    levels: LevelRates = field(default_factory=LevelRates)  # of chosen trees
    drawn_levels: LevelRates = field(default_factory=LevelRates)
    ranks: RankRates = field(default_factory=RankRates)  # of drawn trees
    branches: float = 1.0  # that a pass reads of a request
    _alone: float = 0.0  # accepted tokens that it would have given alone
    _added: float = 0.0  # of those, the ones that no model named before it gave

    @property
    def novelty(self) -> float:
        """Share of its accepted tokens that the models named before it do not give."""
        return (self._added + _PRIOR) / (self._alone + _PRIOR)

    def credit(self, alone: int, added: int) -> None:
        """Count an accepted path.

        Args:
            alone: Its first tokens that this model drafted.
            added: By how many the path is longer than without this model, with those before it.
        """
        self._alone = self._alone * _MEMORY + alone
        self._added = self._added * _MEMORY + added

    def passed(self, pass_sizes: Sequence[int], num_requests: int) -> None:
        """Count the passes of a step: the branches of each after the first, for all requests."""
        for size in pass_sizes:
            self.branches += 0.1 * (size / num_requests - self.branches)

    def doubt(self) -> None:
        """A try again: let a few new observations change what is known."""
        self.nodes.fade(_DOUBTED)
        for rates in (self.levels, self.drawn_levels, self.ranks):
            rates.doubt()
        self._alone *= _DOUBTED
        self._added *= _DOUBTED


class Learning:
    """The records of a method's models, and the drafts that wait for their outcome."""

    def __init__(self, num_models: int) -> None:
        """Nothing is known of the models."""
        self.models = [ModelRecord() for _ in range(num_models)]
        self._waiting: dict[str, MergedTree] = {}

    def drafted(self, request_id: str, tree: MergedTree) -> None:
        """Remember a draft until its outcome."""
        self._waiting[request_id] = tree
        if tree.rows is not None:
            tree.rows = []  # only which nodes were drawn is needed; the rows are large
            return
        for model, record in enumerate(self.models):
            own = [promise[model] for promise in tree.promises if model in promise]
            if own:
                record.nodes.drafted(request_id, np.array(own, np.float32))

    def forget(self, request_id: str) -> None:
        """A draft has no outcome."""
        self._waiting.pop(request_id, None)
        for record in self.models:
            record.nodes.forget(request_id)

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from what the target made of a draft."""
        tree = self._waiting.pop(outcome.request_id, None)
        if tree is None:
            return
        path = list(outcome.accepted)
        size = outcome.num_drafted
        if tree.rows is None:
            self._observe_chosen(outcome, tree, path)
        else:
            self._observe_draws(tree, path, size)
        for model, record in enumerate(self.models):
            levels = record.levels if tree.rows is None else record.drawn_levels
            _observe_levels(levels, tree, path, size, model)
        self._credit(tree, path, size)

    def _observe_chosen(self, outcome: StepOutcome, tree: MergedTree, path: list[int]) -> None:
        for model, record in enumerate(self.models):
            own = [node for node in range(outcome.num_drafted) if model in tree.promises[node]]
            accepted = [place for place, node in enumerate(own) if node in path]
            record.nodes.verified(outcome.request_id, len(own), accepted)

    def _observe_draws(self, tree: MergedTree, path: list[int], size: int) -> None:
        for depth, parent in enumerate([-1, *path]):
            accepted = path[depth] if depth < len(path) else None
            for node in range(size):
                if tree.parents[node] == parent:
                    (model,) = tree.promises[node]
                    self.models[model].ranks.observe(tree.ranks[node], node == accepted)

    def _credit(self, tree: MergedTree, path: list[int], size: int) -> None:
        """Each model is compared with those named before it."""
        took_part = set().union(*tree.promises[:size]) if size else set()
        before = 0
        for model in sorted(took_part):
            together = _prefix(tree, path, set(range(model + 1)) & took_part)
            self.models[model].credit(_prefix(tree, path, {model}), together - before)
            before = together


def _observe_levels(
    levels: LevelRates, tree: MergedTree, path: Sequence[int], size: int, model: int
) -> None:
    """Count the levels that a model drafted below what it had right so far."""
    for depth, parent in enumerate([-1, *path]):
        below = [n for n in range(size) if tree.parents[n] == parent and model in tree.promises[n]]
        if not below:
            if parent >= 0 and model in tree.barren[parent]:
                levels.observe(depth, False)  # the pass was in vain
            return
        right = depth < len(path) and path[depth] in below
        levels.observe(depth, right)
        if not right:
            return


def _prefix(tree: MergedTree, path: Sequence[int], models: set[int]) -> int:
    """How many nodes of a path these models give."""
    length = 0
    for node in path:
        if not models & tree.promises[node].keys():
            break
        length += 1
    return length
