# SPDX-License-Identifier: Apache-2.0
"""What proposers receive and return: plain records, without a trace of the engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.options import RequestOptions

if TYPE_CHECKING:
    import torch

    from vllm_spec_ext.proposers.models import BlockDrafter, DraftModel
    from vllm_spec_ext.proposers.views import TargetView

IntArray = NDArray[np.int32]
Drawn = Literal["iid", "without_replacement"]
Projection = Callable[["torch.Tensor"], "torch.Tensor"]
"""States [n, hidden_size] to their products [n, num_rows] with the rows of a matrix."""

UNSALTED = ""
"""The share group of requests without a ``cache_salt``, where the operator lets these share."""


@dataclass(frozen=True)
class Draft:
    """Draft tokens for one request; empty means "do not speculate in this step".

    A node's parent always stands before it, and the path that the proposer believes in most
    comes first, so that every prefix of a draft is a valid draft.
    """

    tokens: IntArray  # [n] int32 token ids
    parents: IntArray | None = None  # [n] int32 parent node, -1 = last verified token; None = chain
    probs: "torch.Tensor | None" = None
    """[n, vocab] float32 distribution that each node was *drawn* from, given its path, where the
    request has a temperature; None if the tokens were chosen. Neither these nor the shape of the
    draft may depend on which tokens were drawn beside a node, or the output is biased."""
    drawn: Drawn = "iid"
    """How siblings were drawn: independently, or one after the other without replacement."""
    path_probs: "NDArray[np.float32] | None" = None  # [n] the proposer's own estimate, for display
    sources: "tuple[tuple[str, ...], ...] | None" = None
    """[n] names of the models that drafted each node, for display; None = there is one source."""
    strengths: "tuple[tuple[str, ...], ...] | None" = None
    """[n] for each of these names, how strong its evidence is: a few kinds, in words, for display;
    None = it is all of one kind."""

    def __len__(self) -> int:
        return len(self.tokens)


EMPTY_DRAFT = Draft(np.empty(0, np.int32))


def chain(tokens: "IntArray | Sequence[int]") -> Draft:
    """A draft without branches.

    Args:
        tokens: [n] token ids, in order.
    """
    return Draft(np.asarray(tokens, dtype=np.int32))


@dataclass(frozen=True)
class NextTokens:
    """The target's likeliest next tokens at the rows of a step, rejected nodes' rows included."""

    contexts: IntArray  # [num_rows, 2] the two tokens that each row ends with; -1 = there is none
    tokens: IntArray  # [num_rows, m], likeliest first
    probs: NDArray[np.float32]  # [num_rows, m] before any sampling parameters but a grammar


@dataclass(slots=True)
class RequestStep:
    """One request right after a target step that gave it new tokens; to be read, not written.

    Not frozen: one is made for each request in every step, and that would take three times as long.
    """

    request_id: str
    token_ids: IntArray  # [num_tokens] prompt and output; a view, valid during the call only
    num_prompt_tokens: int
    new_tokens: Sequence[int]  # since the proposer was last asked: accepted and bonus tokens, >= 1
    room: int
    """Most draft tokens this request may get: the engine's budget, the request's own limit, and
    what is left to ``max_tokens`` and ``max_model_len``, whichever is smallest. May be 0."""
    options: RequestOptions = field(default_factory=RequestOptions)
    temperature: float = 0.0
    top_k: int = 0  # most tokens that it samples from; 0 or less = all
    top_p: float = 1.0  # least probability of these together
    seed: int | None = None  # of the request's sampling
    share_group: str | None = None
    """Who may see what this request said: what a proposer keeps of a request's tokens, it may use
    for requests of the same group alone; None = for no other request. :data:`UNSALTED`, or one
    group for each ``cache_salt``. A draft shows what it was made of: a step that accepts many
    tokens tells one user what another was answered."""

    ends: frozenset[int] = frozenset()
    """Stop tokens, with which its answer ends. What a draft has behind one is left out, see
    :mod:`.answer_ends`."""
    next_tokens: NextTokens | None = None  # if Needs.next_tokens
    num_steps: int = 1
    """Steps that gave the new tokens. A proposer that runs no model is not asked in every step
    while its drafts lose time; each step but the last then gave one token."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, this step's included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def may_be_drawn(self) -> bool:
        """Whether its drafts may be drawn. A greedy request has nothing to draw; and a seeded one's
        text must not depend on its drafts, so its tokens are chosen."""
        return self.temperature > 0.0 and self.seed is None


@dataclass(slots=True)
class StepContext:
    """All requests of a batch that got new tokens in this step; to be read, not written."""

    requests: Sequence[RequestStep]
    hidden_states: "torch.Tensor | None" = None  # [num_requests, hidden] if Needs.hidden_states
    min_probability: float | None = None
    """A draft token that is accepted with a smaller probability costs more time than it saves, as
    measured on this machine at this batch size; None while that is not known."""
    plain_seconds: float | None = None
    """A plain step at this batch size, as measured; None while that is not known."""
    fixed_cost: float | None = None
    """Tokens, of all requests together, that a step loses by any draft at all, beside
    ``min_probability`` for each draft token; None as above."""
    max_nodes: int | None = None
    """With ``Needs.shares_nodes``: most draft tokens of all requests together; None = as their
    rooms say."""
    branch_cost: float | None = None
    """Tokens that each branch of a tree costs beside its nodes (the first path is none), as
    measured; None while that is not known."""
    fixed_length: bool = False
    """As many tokens of every request are verified, whatever is drafted (asynchronous scheduling):
    a shorter draft saves nothing."""
    is_shadow: bool = False
    """What is drafted now is not verified, it only shows what drafts would earn. What is dear to
    draft may be left out."""


@dataclass(slots=True)
class StepOutcome:
    """What the target made of one request's previous draft; to be read, not written.

    Of a draft that was not verified, to save time, it is what the target went on to say: such an
    outcome may come some steps later, but before the request is drafted for again, or never.
    """

    request_id: str
    num_drafted: int  # nodes that are known (the scheduler may cut a draft short)
    num_accepted: int  # accepted nodes, the bonus token not counted
    nodes: tuple[int, ...] | None = None  # the accepted ones, a path; None = the first, of a chain
    is_shadow: bool = False  # it was not verified

    @property
    def num_verified(self) -> int:
        """Nodes whose verification took time."""
        return 0 if self.is_shadow else self.num_drafted

    @property
    def accepted(self) -> Sequence[int]:
        """Indices of the accepted nodes in the draft."""
        return range(self.num_accepted) if self.nodes is None else self.nodes


@dataclass(frozen=True)
class TargetFacts:
    """What is known about the target before its weights are loaded."""

    model: str  # name or folder
    vocab_size: int
    hidden_size: int | None  # None = its configuration does not say
    num_speculative_tokens: int
    load_tokenizer: Callable[[], object | None]  # as of EngineHandle
    share_unsalted: bool = True  # requests without a cache_salt are of one share group
    is_level: bool = False  # as of EngineHandle


@dataclass(frozen=True)
class RequestLimits:
    """What bounds the options of every request."""

    vocab_size: int
    max_model_len: int


@dataclass(frozen=True, kw_only=True)
class RequestFacts(RequestLimits):
    """What is known about a request before it is drafted for."""

    prompt: IntArray  # [n] int32 token ids
    tokenizer: Any = None  # the front end's; None in the engine, and where there is none
    is_session: bool = False  # the input comes in pieces: `prompt` is one of them, or empty


def plain_projection(rows: "torch.Tensor") -> Projection:
    """Products with ``rows`` [num_rows, hidden_size], in their type, as torch makes them."""
    from torch.nn import functional

    return lambda states: functional.linear(states.to(rows.dtype), rows)


@dataclass(frozen=True)
class EngineHandle:
    """What a proposer may know about the engine that runs it."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    num_speculative_tokens: int
    model: str  # name or folder of the target
    load_tokenizer: Callable[
        [], object | None
    ]  # Hugging Face tokenizer; None if the engine has none
    target: "torch.nn.Module | None" = None
    device: "torch.device | None" = None
    may_write_files: bool = True
    """False in all processes of a deployment but one: with data parallelism each replica has a
    proposer, and all have the same options. Files may be read everywhere."""
    may_write_own_files: bool = True
    """The same for files that only this process names: true in one process of each replica."""
    models: "Sequence[DraftModel]" = ()
    """The draft models that the method asked for, in its order."""
    block_drafters: "Sequence[BlockDrafter]" = ()
    """Those of them that draft a block in one pass; they are not among ``models``."""
    is_level: bool = False
    """The method is a level of a cascade: it may be asked for more tokens than it can draft."""
    views: "Sequence[TargetView]" = ()
    """The target over the views of its cache that the method asked for, in its order."""
    pack: "Callable[[torch.Tensor], Projection]" = plain_projection
    """Products with rows that never change, in the form that is fastest on the device."""
