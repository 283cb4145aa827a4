# SPDX-License-Identifier: Apache-2.0
"""Whether a model's passes pay in one step: to start at all, and for each further level."""

import math
from collections.abc import Sequence

import numpy as np

from vllm_spec_ext.proposers.growth.grown_tree import GrownTree
from vllm_spec_ext.proposers.growth.learning import ModelRecord
from vllm_spec_ext.proposers.models import DraftModel
from vllm_spec_ext.proposers.payoff.forward_payoff import TokenCosts, paying, profit_by_depth


class LevelPayoff:
    """Of one model in one step."""

    def __init__(
        self, model: DraftModel, record: ModelRecord, costs: TokenCosts, novelty: float
    ) -> None:
        """Put together what is known.

        Args:
            model: Whose passes cost something.
            record: What it is worth.
            costs: Of this step.
            novelty: Share of its accepted tokens that no other model of the step gives.
        """
        self._model = model
        self._record = record
        self._costs = costs
        self._novelty = novelty
        self.min_log_prob = -math.inf
        """Chosen nodes whose path is less likely do not pay their verification; +inf if none do."""
        if costs.min_probability is not None:
            confidence = record.nodes.confidence(costs.min_probability)
            self.min_log_prob = math.log(confidence) if confidence > 0.0 else -math.inf

    def pays(self, num_chosen: int, num_drawn: int, max_depth: int) -> bool:
        """Whether drafting for so many requests earns the time that it takes.

        Args:
            num_chosen: Requests whose draft tokens are chosen.
            num_drawn: Requests whose draft tokens are drawn.
            max_depth: Most levels.
        """
        levels = self._record.levels, self._record.drawn_levels
        gains = []
        paths = [1.0, 1.0]
        for depth in range(max_depth):
            paths = [path * rates.rate(depth) for path, rates in zip(paths, levels, strict=True)]
            each = [max(0.0, self._novelty * path - self._costs.node) for path in paths]
            gains.append(num_chosen * each[0] + num_drawn * each[1])
        return self._profit(gains, num_chosen + num_drawn) > 0.0

    def could_pay(self, num_requests: int, max_depth: int) -> bool:
        """Whether it would pay if every draft token were accepted."""
        gain = num_requests * (1.0 - self._costs.node)
        return gain > 0.0 and self._profit([gain] * max_depth, num_requests) > 0.0

    def _profit(self, gains: Sequence[float], num_requests: int) -> float:
        # approximation: the first pass reads one token a request, as it does unless a whole draft
        # was accepted or the accepted path was not the first one.
        first = self._cost(num_requests)
        further = self._cost(max(1, round(num_requests * self._record.branches)))
        if first is None or further is None:
            return math.inf
        return profit_by_depth(gains, first, further)[1]

    @property
    def choices_pay(self) -> bool:
        """Whether there are chosen nodes that pay their verification."""
        return self.min_log_prob <= 0.0

    @property
    def draws_pay(self) -> bool:
        """Whether the first draw pays its verification."""
        return self._record.ranks.rates(1)[0] >= self._costs.node

    @property
    def node_cost(self) -> float:
        """Tokens that the verification of one draft token costs."""
        return self._costs.node

    def hold_nothing_back(self) -> None:
        """Draft as if nothing cost anything, to see what it is worth now."""
        self._costs = TokenCosts()
        self.min_log_prob = -math.inf

    def choose(self, nodes: list[tuple[GrownTree, int]]) -> list[int]:
        """Which nodes are worth reading, so that their children can be drafted.

        For a drawn tree this depends on its shape alone, not on what was drawn.
        """
        if not nodes or self._costs.token_seconds is None:
            return list(range(len(nodes)))
        least = self._costs.node
        paths = np.array([math.exp(tree.log_probs[node]) for tree, node in nodes], np.float32)
        accepted = self._record.nodes.acceptance(paths)
        gains = []
        for (tree, node), probability in zip(nodes, accepted.tolist(), strict=True):
            shape = tree.wish.shape
            if shape is None:
                rate = self._record.levels.rate(tree.depths[node] + 1)
                gains.append(max(0.0, self._novelty * probability * rate - least))
            else:
                below = [shape.reach[child] for child in shape.children(tree.places[node])]
                gains.append(sum(max(0.0, self._novelty * reach - least) for reach in below))
        return paying(gains, self._cost)

    def _cost(self, num_rows: int) -> float | None:
        return self._costs.in_tokens(self._model.forward_seconds(num_rows))
