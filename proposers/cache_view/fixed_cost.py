# SPDX-License-Identifier: Apache-2.0
"""What part of a plain step a pass over a view takes, for the contexts at hand.

A pass of the target takes as long as what it reads: fixed things, which are its weights and the
launching of its kernels, and the KV in sight. Counted in tokens of KV, one number says it all:

    share = (fixed + tokens in sight) / (fixed + all tokens)

At first `fixed` is the weights' bytes over those of a token's KV; then it is learned from what
passes took beside plain steps. From it follow the context lengths at which a view can pay.
"""

from vllm_spec_ext.proposers.views import ReadFacts

_SPAN = 1000.0  # how far from the guess by bytes it may go, as a factor
_MOST_WEIGHT = 0.3  # of one measurement


class FixedCost:
    """Of one engine; learned for each class of batch sizes."""

    def __init__(self, reads: ReadFacts) -> None:
        """Start from bytes.

        Args:
            reads: What a pass reads.
        """
        self._guess = reads.weight_bytes / reads.token_bytes
        self._learned: dict[int, float] = {}  # by the number of bits of the batch size

    def tokens(self, num_requests: int) -> float:
        """Tokens of KV that take as long to read as a pass takes beside KV."""
        if not self._learned:
            return self._guess
        key = num_requests.bit_length()
        nearest = min(self._learned, key=lambda known: abs(known - key))
        return self._learned[nearest]

    def share(self, num_requests: int, total: int, seen: int) -> float:
        """A pass over a view, in plain steps.

        Args:
            num_requests: Of the step.
            total: Tokens of KV that the plain step reads, of all requests.
            seen: Tokens of KV that the pass reads.
        """
        fixed = self.tokens(num_requests)
        return (fixed + seen) / (fixed + max(total, 1))

    def observe(self, num_requests: int, total: int, seen: int, share: float) -> None:
        """Learn from a pass.

        Args:
            num_requests: Of its step.
            total: As of :meth:`share`.
            seen: As of :meth:`share`.
            share: What the pass took, in plain steps.
        """
        hidden = total - seen
        if hidden <= 0 or share <= 0.0:
            return
        before = self.tokens(num_requests)
        most = _SPAN * self._guess
        found = (share * total - seen) / (1.0 - share) if share < 1.0 else most
        found = min(most, max(self._guess / _SPAN, found))
        # The less is hidden the less a pass says about it. The mean is one of factors: a pass that
        # was slow once must not outweigh what a hundred others say.
        weight = min(_MOST_WEIGHT, hidden / (before + total))
        self._learned[num_requests.bit_length()] = before * (found / before) ** weight
