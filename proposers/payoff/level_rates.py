# SPDX-License-Identifier: Apache-2.0
"""How often a draft goes on to be right, by depth; and draws, by their place among siblings."""

_MEMORY = 0.99  # how much of the past survives one more observation
_STRENGTH = 8.0  # observations that a prior counts as
_WEAK = 3.0  # observations that a doubtful estimate counts as


class _Rates:
    """Shares of successes, with a prior."""

    def __init__(self, priors: list[float]) -> None:
        self._priors = priors
        self._strength = [_STRENGTH] * len(priors)
        self._tried = [0.0] * len(priors)
        self._succeeded = [0.0] * len(priors)

    def _observe(self, place: int, succeeded: bool) -> None:
        place = min(place, len(self._priors) - 1)
        self._tried[place] = self._tried[place] * _MEMORY + 1.0
        self._succeeded[place] = self._succeeded[place] * _MEMORY + succeeded

    def _rate(self, place: int) -> float:
        place = min(place, len(self._priors) - 1)
        known = self._succeeded[place] + self._priors[place] * self._strength[place]
        return known / (self._tried[place] + self._strength[place])

    def doubt(self) -> None:
        """Keep the estimates, but let a few new observations change them."""
        self._priors = [self._rate(place) for place in range(len(self._priors))]
        self._strength = [_WEAK] * len(self._priors)
        self._tried = [0.0] * len(self._priors)
        self._succeeded = [0.0] * len(self._priors)


class LevelRates(_Rates):
    """Probability that one child of an accepted node is accepted, by the child's depth."""

    def __init__(self, first: float = 0.7, further: float = 0.75, num_depths: int = 16) -> None:
        """Start from what is usual.

        Args:
            first: Rate of the first level.
            further: Rate of each deeper one.
            num_depths: Deeper levels count as the last of these.
        """
        super().__init__([first, *[further] * (num_depths - 1)])

    def observe(self, depth: int, accepted: bool) -> None:
        """Count a node at `depth` - 1 that was accepted and had children (the root is at -1)."""
        self._observe(depth, accepted)

    def rate(self, depth: int) -> float:
        """Rate of the children at a depth, 0 for children of the root."""
        return self._rate(depth)


class RankRates(_Rates):
    """Probability that the k-th of several drawn children is the accepted one.

    Children are tried in the order in which they were drawn. The rates do not depend on which
    tokens were drawn, so the shape of a drawn tree may follow them (the positional acceptance
    assumption of Sequoia, Chen et al. 2024, sec. 3.1).
    """

    def __init__(self, first: float = 0.6, second: float = 0.15, num_ranks: int = 8) -> None:
        """Start from what is usual; from the second draw on each has 0.4 of the rate before.

        Args:
            first: Rate of the first draw.
            second: Rate of the second one.
            num_ranks: Later draws count as the last of these.
        """
        super().__init__([first, *(second * 0.4**i for i in range(num_ranks - 1))])

    def observe(self, rank: int, accepted: bool) -> None:
        """Count a draw below a node that was accepted, whether it was tried or not."""
        self._observe(rank, accepted)

    def rates(self, num_ranks: int) -> list[float]:
        """[num_ranks] rate of each draw."""
        return [self._rate(rank) for rank in range(num_ranks)]
