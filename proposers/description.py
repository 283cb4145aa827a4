# SPDX-License-Identifier: Apache-2.0
"""How a method presents itself: to users, and to the engine that is to run it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from vllm_spec_ext.options import MethodOptions, RequestOptions

if TYPE_CHECKING:
    from vllm_spec_ext.proposers.base import BaseProposer


@dataclass(frozen=True)
class Needs:
    """What a proposer asks of the engine."""

    hidden_states: bool = False
    """Final hidden state of the last verified position, one row a request."""

    next_tokens: int = 0
    """The target's likeliest next tokens, so many, at every row of a step."""

    shares_nodes: bool = False
    """It divides a step's draft tokens among requests by itself (``StepContext.max_nodes``);
    otherwise each request's room is what it may draft."""

    every_step: bool = False
    """It is asked in every step. Otherwise, while its drafts lose time, it gets the tokens of
    several steps at once (``RequestStep.num_steps``), and the hidden state of the last one."""

    distributions: bool = False
    """Drafts may carry ``probs``: what verifies these is compiled when the engine starts."""


@dataclass(frozen=True)
class ProposerInfo:
    """How a method presents itself to users."""

    name: str
    summary: str  # one sentence
    options: type[MethodOptions]
    request_options: type[RequestOptions]
    num_speculative_tokens: int | None  # default; None = the user must say
    lossless: bool
    needs_checkpoint: bool
    tree: bool  # may draft branches
    best_for: str
    cost: str
    off_on_cpus: str = ""  # what is off on CPUs, why, and how it is put on; empty = nothing

    def drafts_trees(self, options: MethodOptions) -> bool:
        """Whether drafts may branch with these options; ``tree`` says so where there is one."""
        return self.tree and bool(getattr(options, "tree", True))


ProposerT = TypeVar("ProposerT", bound="type[BaseProposer]")


def proposer(
    name: str,
    *,
    summary: str,
    options: type[MethodOptions] = MethodOptions,
    request_options: type[RequestOptions] = RequestOptions,
    num_speculative_tokens: int | None = None,
    lossless: bool = True,
    needs_checkpoint: bool = False,
    tree: bool = False,
    best_for: str = "",
    cost: str = "",
    off_on_cpus: str = "",
) -> Callable[[ProposerT], ProposerT]:
    """Class decorator that names a proposer and says what users need to know about it.

    The class is found through :mod:`vllm_spec_ext.proposers.registry`; other packages list it
    under the entry point group ``vllm_spec_ext.proposers`` with the same name.
    """

    def decorate(cls: ProposerT) -> ProposerT:
        cls.info = ProposerInfo(
            name=name,
            summary=summary,
            options=options,
            request_options=request_options,
            num_speculative_tokens=num_speculative_tokens,
            lossless=lossless,
            needs_checkpoint=needs_checkpoint,
            tree=tree,
            best_for=best_for,
            cost=cost,
            off_on_cpus=off_on_cpus,
        )
        return cls

    return decorate
