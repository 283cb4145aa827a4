# SPDX-License-Identifier: Apache-2.0
"""The target between its steps, as a proposer sees it: passes over a part of its own KV cache.

A method names the views it wants (:meth:`.base.BaseProposer.views`); the engine hands them over as
``EngineHandle.views``, in that order, on a CPU without those that are not for CPUs. In a *round*
(:meth:`TargetView.begin`) the target reads drafted tokens behind the certain ones, and attends to
what the view shows. What it wrote is overwritten by the next step of the target; a round ends with
``propose``, or with the next one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from vllm_spec_ext.proposers.records import RequestStep

if TYPE_CHECKING:
    import torch

ViewKind = Literal["full", "stream", "retrieval"]
"""All KV; the first and the last tokens (StreamingLLM, Xiao et al. 2023); these and the pages in
between that suit the query best, chosen for each layer (TriForce, Sun et al. 2024)."""


@dataclass(frozen=True)
class ViewSpec:
    """What part of a request's KV a pass sees. Tokens are rounded up to whole KV blocks.

    A request that has no more than `budget` tokens shows all of them.
    """

    name: str  # in metrics and messages; unique within the method
    kind: ViewKind = "retrieval"
    budget: int = 1024  # tokens in sight, those of `sink` and `recent` included
    sink: int = 32  # first tokens, always in sight
    recent: int = 128  # last tokens, always in sight; "stream" shows all of the budget but the sink
    refresh: int = 1  # "retrieval": rounds of a request from one choice of pages to the next
    dense_layers: tuple[int, ...] = ()  # layers that see everything
    on_cpus: bool = True  # False: on a CPU the engine leaves the view out


@dataclass(frozen=True)
class ReadFacts:
    """What a pass of the target reads from memory, on one rank."""

    weight_bytes: int  # all weights, once a pass; of a mixture of experts it may be less
    token_bytes: int  # KV of one token in all layers


class ViewRound(Protocol):
    """Some requests of a step while the target drafts, or reviews drafts, for them."""

    @property
    def rows(self) -> Sequence[int]:
        """Indices in the step of the requests that take part. Those left out had no room, or a
        prompt that has no token ids.
        """

    @property
    def rooms(self) -> Sequence[int]:
        """Of each, the most tokens that it can read behind its certain ones, at most its room."""

    def run(self, tokens: Sequence[Sequence[int]]) -> "torch.Tensor":
        """Read more tokens, in one forward pass.

        Args:
            tokens: Of each of :attr:`rows`, in that order; none: it sits this pass out. The first
                token that a request reads in a round is its last certain one, as the target has
                not read that one yet.

        Returns:
            [n, vocab_size] float32 logits behind each of the n tokens, request by request; read
            only.

        Raises:
            ValueError: Another first token, more tokens than there is room for, or the round is
                over.
        """

    def keep(self, counts: Sequence[int]) -> None:
        """Take tokens of the last pass back; without this call all of them stay.

        Args:
            counts: Of each of :attr:`rows`, how many of its tokens stay. The next pass goes on
                behind these.

        Raises:
            ValueError: More than were read, or the round is over.
        """


class TargetView(Protocol):
    """The target over one view of its cache. One round at a time, over all views."""

    @property
    def spec(self) -> ViewSpec:
        """What it shows."""

    @property
    def reads(self) -> ReadFacts:
        """What a pass reads: whether it pays depends on this and on the lengths of requests."""

    def begin(self, requests: Sequence[RequestStep], rows: Sequence[int]) -> ViewRound:
        """Begin a round: what each request sees is fixed until it ends.

        Args:
            requests: Of the step.
            rows: Indices of those that shall take part.
        """

    def seen(self, length: int) -> int:
        """Tokens whose KV a pass reads for a request of this length."""

    def forward_seconds(self, num_rows: int) -> float | None:
        """A pass over this many tokens, as measured; None before any was."""
