# SPDX-License-Identifier: Apache-2.0
"""What a scorer is: the flattened batch it verifies and the mask it returns.

A scorer answers one question for every draft node: *may this token stand, although the target may
have chosen another one?* The engine says which row belongs to which node and draws the target's own
token at every row; :func:`..walk.tree.walk` goes from the root to the nodes that stand.

What ``tolerated`` means:

* greedy request (temperature 0): the whole acceptance rule. A node stands iff its entry is True;
  the exact match is always among them.
* sampled request (temperature > 0): True means accepted for certain, False means the ordinary
  lossless rule. So the exact rule returns False for all of them.

A rule at its strict end (``k=1``, ``beta=1``, ``tau=0``, ``epsilon=0``, ``length=1``) *is* the
exact rule, ties and sampled requests included.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from vllm_spec_ext.scorers.rules.ranking import first_argmax, stands

if TYPE_CHECKING:
    from vllm_spec_ext.scorers.options import ScorerOptions


@dataclass(frozen=True)
class Verification:
    """All draft nodes of one step, flattened request by request.

    ``logits`` are the target's float32 logits *before* temperature, top-k and top-p, so that a
    tolerance in nats means the same at every temperature, but *after* everything that changes what
    the target would choose: penalties, allowed tokens, bad words, minimum length, grammar. That is
    what vLLM 0.32 ``Sampler.apply_logits_processors`` returns. A token at ``-inf`` is forbidden and
    never tolerated. They are read, never written.

    Nodes of one request stand together, in the order of its draft (parents before children, the
    first path first); requests stand in batch order.
    """

    logits: Tensor  # [num_rows, vocab] float32; row i verifies node i unless `rows` says otherwise
    draft_token_ids: Tensor  # [num_nodes] int64; ids outside the vocabulary are never tolerated
    depths: Tensor  # [num_nodes] int64, 0 for children of the root
    request_index: Tensor  # [num_nodes] int64, ascending
    exact_only: Tensor  # [num_nodes] bool: stop and EOS ids, requests that switched the rule off
    rows: Tensor | None = None  # [num_nodes] int64 row of the node's parent: siblings share it
    parents: Tensor | None = None  # [num_nodes] int64 within the request, -1 = root; None = chains
    sampled: Tensor | None = None  # [num_nodes] bool, temperature > 0; None = all greedy

    @property
    def num_nodes(self) -> int:
        """Number of draft nodes in the batch."""
        return self.draft_token_ids.shape[0]

    @cached_property
    def verifying_rows(self) -> Tensor:
        """[num_nodes] int64 index into ``logits``."""
        if self.rows is not None:
            return self.rows
        return torch.arange(self.num_nodes, device=self.logits.device)

    @cached_property
    def known(self) -> Tensor:
        """[num_nodes] bool: the draft token is an id of the vocabulary (vLLM pads with -1)."""
        return (self.draft_token_ids >= 0) & (self.draft_token_ids < self.logits.shape[1])

    @cached_property
    def tokens(self) -> Tensor:
        """[num_nodes] int64 draft tokens, unknown ids replaced by 0 so that they can index."""
        return torch.where(self.known, self.draft_token_ids, 0)

    @cached_property
    def draft_logits(self) -> Tensor:
        """[num_nodes] float32 target logit of each draft token; ``-inf`` for unknown ids."""
        values = self.logits[self.verifying_rows, self.tokens]
        return torch.where(self.known, values, -torch.inf)

    @cached_property
    def choice(self) -> Tensor:
        """[num_nodes] int64: ``torch.argmax`` of the row that verifies the node."""
        return first_argmax(self.logits)[self.verifying_rows]

    @cached_property
    def free(self) -> Tensor:
        """[num_nodes] bool: a relaxed rule has a say here (not exact-only, not forbidden)."""
        return ~self.exact_only & (self.draft_logits > -torch.inf)

    @cached_property
    def matches(self) -> Tensor:
        """[num_nodes] bool: greedy request and the draft token is the target's choice."""
        one = torch.ones_like(self.tokens)
        no_margin = torch.full_like(self.draft_logits, torch.inf)
        # Cheaper than `choice`: a wrong draft is known as such after a few blocks of its row.
        exact = stands(self.logits, self.verifying_rows, self.tokens, one, no_margin) & self.known
        return exact if self.sampled is None else exact & ~self.sampled


class Scorer(Protocol):
    """An acceptance rule.

    Parameters of a rule are numbers, or, after ``for_batch``, tensors ``[num_requests]`` that are
    gathered by ``request_index``, so that requests with narrowed rules cost nothing extra.
    """

    lossless: ClassVar[bool]

    @classmethod
    def of(cls, rule: Any, vocab_size: int | None) -> Self:
        """The rule with the parameters of its options.

        Args:
            rule: Of the options class that stands beside the scorer in the registry; never one
                whose parameters are at their strict end.
            vocab_size: Width of the target's logits; None where it is not known yet.
        """

    def relaxed(self, v: Verification) -> Tensor:
        """[num_nodes] bool: as ``tolerated``, but may leave out exact matches (for unions)."""

    def tolerated(self, v: Verification) -> Tensor:
        """[num_nodes] bool, see the module's docstring."""

    def for_batch(
        self, rules: Sequence["ScorerOptions | None"], device: torch.device | str
    ) -> Self:
        """The same rule with one set of parameters a request.

        Args:
            rules: One per request of the batch: what :func:`..narrow.narrow` returned for it, or
                None for the server's own parameters.
            device: Where the batch's tensors live.
        """


def per_node(value: float | Tensor, v: Verification, dtype: torch.dtype) -> Tensor:
    """A rule's parameter spread over the nodes.

    Args:
        value: A number, or [num_requests].
        v: The batch.
        dtype: Of the result.

    Returns:
        [num_nodes] of that dtype.
    """
    if isinstance(value, Tensor):
        return value.to(dtype)[v.request_index]
    return torch.full((v.num_nodes,), value, dtype=dtype, device=v.logits.device)
