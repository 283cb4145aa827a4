# SPDX-License-Identifier: Apache-2.0
"""Whether asking the trained drafter pays in a step, beside what the other sources have."""

from collections.abc import Sequence

from vllm_spec_ext.proposers.payoff.forward_payoff import Retries, TokenCosts

_MEMORY = 0.97  # of what a drafter added, and of what it took, for one more time
_FOLLOW_SHORTER = 0.2  # of a shorter time than usual, at once: pauses only make it longer
_FIRST_TIMES = 3  # of which the shortest counts, as the first one finds its buffers
_FIRST_GAIN = 0.6  # tokens that it is taken to add before anything is known
_CLASSES = 8  # of what the others have, half a token each
_SHADOWS = 16  # steps with drafts that are not verified, from one in which it is asked to the next


class DrafterPayoff:
    """Learns what a drafter adds to a request's tree, by how much the tree is worth without it."""

    def __init__(self) -> None:
        """Try it until it is known what it adds."""
        self._gains = [_FIRST_GAIN] * _CLASSES
        self._seconds: dict[int, float] = {}  # by size class of the batch
        self._times: dict[int, int] = {}  # that it was asked, by the same
        self._retries = Retries()
        self._num_shadows = 0

    def pays(self, gains: Sequence[float], costs: TokenCosts, *, only_others: bool = False) -> bool:
        """Whether to ask it in this step.

        Drafts that are not verified earn nothing. If it were asked for all of these, a fresh engine
        would wait long until it may pay for the next one, and the other sources with it.

        Args:
            gains: Of each request that it would draft for, tokens that its tree earns without it.
            costs: Of the step.
            only_others: Nothing is verified, and the others have something to show alone.
        """
        if only_others:
            self._num_shadows += 1
            return self._num_shadows % _SHADOWS == 0
        size = len(gains).bit_length()
        # The first time says little: the second one comes at once.
        seconds = self._seconds[size] if self._times.get(size, 0) > 1 else None
        cost = costs.in_tokens(seconds)
        added = sum(self._gains[self._class(gain)] for gain in gains)
        if cost is None or added > cost:
            self._retries.pays()
            return True
        return self._retries.due()

    def asked(self, before: Sequence[float], after: Sequence[float], seconds: float) -> None:
        """Learn from a step in which it was asked.

        Args:
            before: As `gains` of :meth:`pays`.
            after: The same with its draft in the tree.
            seconds: What it took.
        """
        size = len(before).bit_length()
        usual = self._seconds.get(size, seconds)
        self._times[size] = self._times.get(size, 0) + 1
        if self._times[size] <= _FIRST_TIMES:
            self._seconds[size] = min(usual, seconds)
        else:
            # A pause, of compilation or another program, is no cost of theirs.
            weight = _FOLLOW_SHORTER if seconds < usual else 1.0 - _MEMORY
            self._seconds[size] = usual + weight * (min(seconds, 4.0 * usual) - usual)
        for old, new in zip(before, after, strict=True):
            place = self._class(old)
            self._gains[place] += (1.0 - _MEMORY) * (new - old - self._gains[place])

    @staticmethod
    def _class(gain: float) -> int:
        return min(_CLASSES - 1, int(2.0 * gain))
