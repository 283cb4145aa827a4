# SPDX-License-Identifier: Apache-2.0
"""What a level must be to review: a model that reads several tokens a request in one pass.

A level above the methods *reviews*: it reads what the levels below it wrote behind the verified
text, and says token by token what it would have written. Two things can do that: a draft model that
the engine hosts (:class:`HostedReviewer`), and the target over a view of its own KV cache
(:mod:`.view_reviewer`). Both are used in three steps, so a cascade knows neither blocks nor caches:

1. :meth:`Reviewer.begin`, once a step for each level that is used, with all requests of the round.
   Nothing runs yet. A view fixes its pages here; ``room`` bounds how far a request may be read.
2. :meth:`ReviewRound.run`, one forward pass for all requests that have something to read. The first
   tokens of a request begin with its *root*, the last verified token: nobody has read it yet. Each
   token read gives one row of logits, of the token behind it.
3. :meth:`ReviewRound.keep`, before the next pass: how many of the tokens that a request was given
   in this round still stand; the next pass goes on behind them. A reviewer may be taken back below
   its last pass, as a level above it may reject what it had accepted. One token at least is always
   read again or anew, so no logits need to be kept from one pass to the next.

When the step's drafting is over all of it is void. What the target accepts of it, a reviewer
recognises by itself.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from vllm_spec_ext.proposers.models import Branch, DraftModel
from vllm_spec_ext.proposers.records import RequestStep

if TYPE_CHECKING:
    import torch


class ReviewRound(Protocol):
    """What one level reads in one step."""

    def run(self, tokens: Sequence[Sequence[int]]) -> "list[torch.Tensor | None]":
        """Read in one forward pass.

        Args:
            tokens: [num_requests] of each request of :meth:`Reviewer.begin` what it reads behind
                what it kept, the root first; empty = it sits out.

        Returns:
            Of each request [len(tokens), vocab] logits behind each token; None where it sat out, or
            cannot be read: there was no room, or the level cannot follow this request. Such a
            request is not given to this level again in this round.
        """

    def keep(self, counts: Sequence[int]) -> None:
        """Go back.

        Args:
            counts: [num_requests] of all tokens that a request was given in this round, root
                included, how many stand; no more than it was given. With 0 it begins again.
        """


class Reviewer(Protocol):
    """One level that reviews; lives as long as the engine."""

    name: str

    def begin(
        self, requests: Sequence[RequestStep], rows: Sequence[int], room: Sequence[int]
    ) -> ReviewRound:
        """A round over some requests of a step.

        Args:
            requests: Of the step.
            rows: [num_requests] indices of those of the round.
            room: [num_requests] most tokens that each may be given behind its root.
        """

    def forward_seconds(self, num_rows: int) -> float | None:
        """A pass over this many tokens, as measured; None before any was."""


class HostedReviewer:
    """A draft model that the engine hosts."""

    def __init__(self, model: DraftModel) -> None:
        """Review with a model."""
        self._model = model
        self.name = model.name

    def begin(
        self, requests: Sequence[RequestStep], rows: Sequence[int], room: Sequence[int]
    ) -> ReviewRound:
        """See :meth:`Reviewer.begin`; the model's blocks bound its room."""
        return _HostedRound(self._model, requests, rows)

    def forward_seconds(self, num_rows: int) -> float | None:
        """See :meth:`Reviewer.forward_seconds`."""
        return self._model.forward_seconds(num_rows)


class _HostedRound:
    """The trunks of one step. The first pass of a request brings the model up to date with it."""

    def __init__(
        self, model: DraftModel, requests: Sequence[RequestStep], rows: Sequence[int]
    ) -> None:
        self._model = model
        self._requests = requests
        self._rows = rows
        self._trunks: list[Branch | None] = [None] * len(rows)
        self._is_begun = [False] * len(rows)
        self._starts = [0] * len(rows)  # length of each trunk without its root

    def run(self, tokens: Sequence[Sequence[int]]) -> "list[torch.Tensor | None]":
        """See :meth:`ReviewRound.run`; requests that begin and others take a pass each."""
        import torch

        wanted = [place for place, more in enumerate(tokens) if len(more)]
        first = [place for place in wanted if not self._is_begun[place]]
        later = [place for place in wanted if self._is_begun[place]]
        if first:
            rows = [self._rows[place] for place in first]
            suffixes = [tokens[place][1:] for place in first]
            trunks = self._model.sync(self._requests, rows, suffixes)
            for place, trunk in zip(first, trunks, strict=True):
                self._trunks[place], self._is_begun[place] = trunk, True
                if trunk is not None:
                    # An EAGLE-3 head reads each token with the state before it: one token fewer.
                    self._starts[place] = trunk.length - len(tokens[place])
        going = [(trunk, place) for place in later if (trunk := self._trunks[place]) is not None]
        if going:
            self._model.extend([trunk for trunk, _ in going], [tokens[place] for _, place in going])
        found: list[torch.Tensor | None] = [None] * len(tokens)
        for place in wanted:
            trunk = self._trunks[place]
            if trunk is None or not trunk.alive:
                self._trunks[place] = None
                continue
            if place in later:
                found[place] = self._model.read_logits(trunk)
            elif len(tokens[place]) == 1:  # the root alone
                found[place] = self._model.logits([trunk])
            else:  # the root's row comes with the chunk's
                rows = [self._model.all_logits(trunk), self._model.logits([trunk])]
                found[place] = torch.cat(rows)
        return found

    def keep(self, counts: Sequence[int]) -> None:
        """See :meth:`ReviewRound.keep`."""
        for place, trunk in enumerate(self._trunks):
            if trunk is None or not trunk.alive:
                continue
            length = self._starts[place] + counts[place]
            if not counts[place]:
                # The root is no draft, so it is not taken back; a new trunk reads it again.
                self._trunks[place], self._is_begun[place] = None, False
            elif length < trunk.length:
                self._model.rewind(trunk, length)
