# SPDX-License-Identifier: Apache-2.0
"""Draft models as a proposer sees them: forward passes over sequences, without engine or cache.

A method names the models it wants (:meth:`.base.BaseProposer.models`); the engine loads them beside
the target and hands them over as ``EngineHandle.models``, in that order. In each step a proposer
brings a model up to date with the requests (:meth:`DraftModel.sync`), lets it read drafted tokens
(:meth:`DraftModel.extend`), and branches (:meth:`DraftModel.fork`). What was drafted is gone when
``propose`` returns; what the target accepted of it is recognised by the next ``sync``.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.proposers.records import RequestStep
from vllm_spec_ext.proposers.views import ViewSpec

if TYPE_CHECKING:
    import torch

ModelKind = Literal["causal_lm", "eagle3", "dflash"]
"""A model of its own; one layer over the target's hidden states (EAGLE-3); layers over these that
draft a block at once (DFlash)."""


@dataclass(frozen=True)
class ModelSpec:
    """A model that a method wants beside the target."""

    name: str  # in metrics and messages; unique within the method
    model: str  # Hugging Face name or folder
    kind: ModelKind | None = None  # None = as the checkpoint says
    quantization: str | None = None  # as vLLM's option; None = what the checkpoint says
    view: ViewSpec | None = None  # of its own KV, a "stream"; None = all of it


@dataclass(eq=False)
class Branch:
    """Tokens of one request as one model has read them: its trunk, or a fork of that."""

    request: int  # index in the StepContext
    length: int  # tokens read
    is_trunk: bool
    alive: bool = True
    """False once there was no room for more: its logits are void and nothing extends it."""


class DraftModel(Protocol):
    """One model; calls are batched over branches, so make few of them.

    Logits are the target's vocabulary wide: where the model's is smaller the rest is ``-inf``, and
    where it is larger they are cut.
    """

    name: str
    vocab_size: int
    max_model_len: int
    """Most tokens a branch can have; no request gets a branch that would be longer."""

    def sync(
        self,
        requests: Sequence[RequestStep],
        rows: Sequence[int],
        suffixes: Sequence[Sequence[int]] | None = None,
    ) -> list[Branch | None]:
        """Read all that is certain of these requests, in one forward pass.

        What the model read before is not read again, nor what other requests with the same
        beginning read. A step without this costs nothing, and is made up for by the next one: a
        request that is far behind catches up over several steps. A request that is synced twice
        in a step gets a new trunk, and the old one dies.

        Args:
            requests: Of the step.
            rows: Indices of those to read.
            suffixes: Drafted tokens of each row to read behind it in the same pass.

        Returns:
            The trunk of each row, with logits behind its last token; None where the model cannot
            follow: beyond its maximum length, a prompt that has no token ids, no room, or a
            request that has not caught up yet.
        """

    def extend(self, branches: Sequence[Branch], tokens: Sequence[Sequence[int]]) -> None:
        """Read drafted tokens, at least one for each branch, in one forward pass.

        Branches that are not alive are passed over; those that find no room die.
        """

    def fork(self, branches: Sequence[Branch]) -> list[Branch | None]:
        """One more branch with the tokens of each; None where there is no room.

        Fork a branch before it is extended. A fork has the logits of its origin.
        """

    def rewind(self, branch: Branch, length: int) -> None:
        """Take drafted tokens back; never below a fork that is still used.

        Logits are void then, but for tokens of the branch's last pass.

        Raises:
            ValueError: Below the certain tokens of a trunk, or the beginning of a fork.
        """

    def logits(self, branches: Sequence[Branch]) -> "torch.Tensor":
        """[len(branches), vocab_size] float32, of the token behind each branch; read only.

        Raises:
            ValueError: A branch is dead, or was rewound to where its logits are not known.
        """

    def all_logits(self, branch: Branch) -> "torch.Tensor":
        """[n, vocab_size] float32: behind the branch as it was before its last ``extend`` (or the
        ``suffixes`` of ``sync``), and behind each of the tokens that this one read but the last.

        Row i judges token i of that call; :meth:`logits` has the row behind the last one.

        Raises:
            ValueError: The branch was rewound below that, so the first row is not known.
        """

    def read_logits(self, branch: Branch) -> "torch.Tensor":
        """[n, vocab_size] float32: behind each token that its last ``extend`` read and that still
        stands.

        Raises:
            ValueError: None of these stands, or the branch was not extended since it was forked.
        """

    def forward_seconds(self, num_rows: int) -> float | None:
        """A forward pass over this many tokens, as measured; None before two were."""

    def reload(self, weights: "Iterable[tuple[str, torch.Tensor]]") -> None:
        """Run with other weights from now on, and forget what was read with the old ones.

        Between steps, or before anything was synced in one.

        Args:
            weights: Names as in the checkpoint, and tensors; those not named stay.
        """


@dataclass(frozen=True)
class BlockFacts:
    """What a block drafter was trained for."""

    num_slots: int  # most draft tokens of a block
    copy_match: int = 0  # slots may be shown copies, of matches up to this length; 0 = never
    reuse_tail: bool = False  # ... or the rest of a rejected draft
    has_selector: bool = False  # its candidates' probabilities depend on the token before


_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class BlockWeights:
    """All weights of a block drafter, whole ones on the CPU, whatever part of them a rank has."""

    layers: "Mapping[str, torch.Tensor]"  # by their names in the checkpoint
    extras: "Mapping[str, torch.Tensor]"  # of SlotExtras
    mask: "torch.Tensor | None"  # [hidden] its own embedding of the mask, if it has one
    number: int = field(default_factory=lambda: next(_numbers))
    """By which the ranks know them."""


@dataclass(frozen=True)
class SlotHint:
    """Tokens that the slots of one request are shown."""

    tokens: NDArray[np.int32]  # [n] of the first n slots
    kind: int  # see NarConfig.num_copy_kinds


@dataclass(frozen=True)
class SlotCandidates:
    """What a block drafter predicts for one request."""

    tokens: NDArray[np.int32]  # [num_slots, m] the likeliest tokens of each slot by itself
    log_probs: NDArray[np.float32]
    """[num_slots, p, m] log-probability of each candidate behind each candidate of the slot before;
    ``p = 1`` if it does not depend on these. Rows of the first slot are all the same."""


class BlockDrafter(Protocol):
    """A model that drafts a block of tokens in one pass, over the target's hidden states."""

    name: str
    facts: BlockFacts
    max_model_len: int

    def predict(
        self,
        requests: Sequence[RequestStep],
        rows: Sequence[int],
        num_slots: int,
        num_candidates: int,
        hints: Sequence[SlotHint | None] | None = None,
    ) -> list[SlotCandidates | None]:
        """Read one block behind each of these requests, in one forward pass.

        Args:
            requests: Of the step.
            rows: Indices of those to draft for.
            num_slots: Masks of a block; fewer where ``max_model_len`` is near. What a slot predicts
                depends on their number, as all rows of a block see each other.
            num_candidates: Of each slot.
            hints: What the slots of each row are shown.

        Returns:
            Candidates of the first slots of each row, at most as many as its room; None where
            there is no room, or part of the context is missing.
        """

    def forward_seconds(self, num_rows: int) -> float | None:
        """A pass over blocks of so many rows together, as measured; None before any was."""

    def exchange(self, weights: BlockWeights) -> None:
        """Draft with other weights from now on, between steps.

        They make the context's keys and values as the former ones did, so that what is in the cache
        stays. The first time the layers of some weights are laid out, which takes time; then they
        are kept, as those of some others, and an exchange costs nothing.
        """
