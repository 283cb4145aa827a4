# SPDX-License-Identifier: Apache-2.0
"""What a ``nar`` drafter has beyond DFlash: slot queries, copies and guesses in the slots, and the
selector.

Used alike by the trainer, which learns it, and by the engine, which runs it around vLLM's layers.
Everything starts such that it changes nothing: a fresh drafter with extras is the same as one
without. Torch only.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vllm_spec_ext.proposers.blockwise.heads import unit_rms
from vllm_spec_ext.proposers.nar.guesses import SlotGuesses
from vllm_spec_ext.proposers.nar.layout import NarConfig

Embed = Callable[[Tensor], Tensor]
"""Token ids [...] -> the drafter's embeddings [..., hidden]."""


class Copies(NamedTuple):
    """What slots are shown."""

    tokens: Tensor  # [..., num_slots] int64; any value where there is none
    kinds: Tensor  # [..., num_slots] int64, see NarConfig.num_copy_kinds; 0 = none


class SlotExtras(nn.Module):
    """Slots are the rows of a block behind its first token; slot i holds token i + 1 behind it.

    The pairwise selector (as of DFlash 2, with tables that are made of the embeddings): the score
    of a candidate c of slot i behind a candidate p of slot i - 1 is that of the slot alone plus
    ``<(E p P_a) * (H h_i), E c P_b>`` with the slot's final state h_i.
    """

    def __init__(self, config: NarConfig, num_slots: int, hidden_size: int) -> None:
        """Build it in float32.

        Args:
            config: What there is of it.
            num_slots: Most slots of a block: its size - 1.
            hidden_size: The drafter's.
        """
        super().__init__()
        self.config = config
        self.num_slots = num_slots
        if config.slot_queries:
            self.slot_queries = nn.Parameter(torch.zeros(num_slots, hidden_size))
        if config.copy_match:
            kinds = config.num_copy_kinds
            # How strongly a copied token enters its slot, and is preferred behind it: by kind.
            self.copy_gate = nn.Parameter(torch.zeros(kinds, num_slots))
            self.copy_trust = nn.Parameter(torch.zeros(kinds, num_slots))
            self.copy_weight = nn.Parameter(torch.zeros(hidden_size))  # ... and by the slot's state
        if config.selector_rank:
            rank = config.selector_rank
            self.selector_a = nn.Parameter(torch.randn(hidden_size, rank) * hidden_size**-0.5)
            self.selector_b = nn.Parameter(torch.zeros(hidden_size, rank))
            self.selector_h = nn.Parameter(torch.randn(rank, hidden_size) * hidden_size**-0.5)
        self.guesses: SlotGuesses | None = None
        if config.heads is not None:
            self.guesses = SlotGuesses(config.heads, num_slots, hidden_size)
        listed = config.draft_vocab_size
        self.draft_vocab: Tensor | None
        # [draft_vocab_size] int32 token ids, ascending
        self.register_buffer(
            "draft_vocab", None if listed is None else torch.arange(listed, dtype=torch.int32)
        )

    def fill(
        self,
        masks: Tensor,
        slots: Tensor,
        copies: Copies | None,
        embed: Embed,
        guesses: Tensor | None = None,
    ) -> Tensor:
        """What the layers read in slots that hold the mask.

        Args:
            masks: [..., hidden] the mask's embedding.
            slots: [...] int64 numbers of the slots, from 0.
            copies: Of each slot: [...] both.
            embed: The drafter's embeddings.
            guesses: [..., hidden] states of the heads, if there are heads.

        Returns:
            [..., hidden] as `masks`.
        """
        if self.config.slot_queries:
            masks = masks + self.slot_queries[slots].to(masks.dtype)
        if self.config.copy_match and copies is not None:
            gates = self.copy_gate[copies.kinds, slots] * (copies.kinds > 0)
            shown = unit_rms(embed(copies.tokens)) * gates.unsqueeze(-1)
            masks = masks + shown.to(masks.dtype)
        if self.guesses is not None and guesses is not None:
            masks = self.guesses.fill(masks, slots, guesses)
        return masks

    def settle(self, states: Tensor, slots: Tensor, guesses: Tensor | None) -> Tensor:
        """[..., hidden] final states of slots [...], of the layers' states behind the last norm."""
        if self.guesses is None or guesses is None:
            return states
        return self.guesses.corrected(states, slots, guesses)

    def copy_bonus(self, states: Tensor, slots: Tensor, kinds: Tensor) -> Tensor:
        """[...] float32 what the logit of each slot's copied token gains; 0 where there is none.

        Args:
            states: [..., hidden] final states of the slots, after the last norm.
            slots: [...] int64 numbers of the slots.
            kinds: [...] int64 of what each slot was shown.
        """
        trust = self.copy_trust[kinds, slots] + (states.float() * self.copy_weight).sum(-1)
        return trust * (kinds > 0)

    def edges(self, states: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """[..., p, c] float32 what each candidate's score gains behind each one before it.

        Args:
            states: [..., hidden] final states of slots.
            before: [..., p, rank] rows of table A for the tokens that may stand before each.
            candidates: [..., c, rank] rows of table B for its candidates.
        """
        weights = states.float() @ self.selector_h.float().T
        return (before.float() * weights.unsqueeze(-2)) @ candidates.float().transpose(-1, -2)

    def table_a(self, embeddings: Tensor) -> Tensor:
        """[..., rank] rows for tokens that stand before, of their embeddings [..., hidden]."""
        return unit_rms(embeddings) @ self.selector_a.float()

    def table_b(self, embeddings: Tensor) -> Tensor:
        """[..., rank] rows for candidates, of their embeddings [..., hidden]."""
        return unit_rms(embeddings) @ self.selector_b.float()


def conditional_log_probs(
    base: Tensor,  # [..., c] log-probabilities of a slot's candidates
    edges: Tensor,  # [..., p, c] of :meth:`SlotExtras.edges`
) -> Tensor:
    """[..., p, c] float32 log-probability of each candidate behind each token before it.

    The selector moves probability between the candidates; what they have together stays.
    """
    together = base.float().logsumexp(-1, keepdim=True).unsqueeze(-1)
    return (base.float().unsqueeze(-2) + edges).log_softmax(-1) + together
