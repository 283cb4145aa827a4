# SPDX-License-Identifier: Apache-2.0
"""Blockwise heads in a block: slots start from their guesses, and the layers correct these.

A head sees one hidden state and guesses one place; no head knows what another one guessed. The
block's layers read all guesses at once, beside the context, and add to the heads' states what they
know better. At first they add nothing, so that a drafter which starts from trained heads drafts as
these do, and a short training only gains. Torch only.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from vllm_spec_ext.proposers.blockwise.heads import (
    BlockwiseHeads,
    HeadsConfig,
    TokensSeen,
    check_heads,
    load_heads,
    unit_rms,
)

# The trainer takes the heads from here: of other methods it knows nothing.
__all__ = ["BlockwiseHeads", "HeadsConfig", "SlotGuesses", "check_heads", "load_heads"]


class SlotGuesses(nn.Module):
    """Heads of the first slots; slots behind these have no guess."""

    def __init__(self, config: HeadsConfig, num_slots: int, hidden_size: int) -> None:
        """Build it in float32.

        Args:
            config: Of the heads; at most as many as slots.
            num_slots: Most slots of a block.
            hidden_size: The target's, and the drafter's.
        """
        super().__init__()
        self.num_slots = num_slots
        self.heads = BlockwiseHeads(config)
        # How strongly a slot's guess enters its row, and how strongly the layers' state is added.
        self.shown = nn.Parameter(torch.zeros(num_slots, hidden_size))
        self.correction = nn.Parameter(torch.ones(num_slots, hidden_size))
        with torch.no_grad():
            self.correction[: config.num_heads] = 0.0

    @classmethod
    def shapes(
        cls, config: HeadsConfig, num_slots: int, hidden_size: int
    ) -> dict[str, tuple[int, ...]]:
        """Shapes of its tensors, by name; nothing is allocated."""
        with torch.device("meta"):
            tensors = cls(config, num_slots, hidden_size).state_dict()
        return {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def forward(
        self,
        finals: Tensor,  # [n, hidden] the target's final states in front of the block's first token
        first: Tensor,  # [n] int64 that token
        copied: Tensor | None,  # [n, k] int64 tokens that the slots are shown
        lengths: Tensor | None,  # [n] int64 tokens that agree with their place; 0 = none
        embed: Callable[[Tensor], Tensor],  # the target's
    ) -> Tensor:
        """[n, num_slots, hidden] the heads' states; zeros where there is no head."""
        config = self.heads.config
        seen = TokensSeen(first)
        if config.copy_match:
            if copied is None or lengths is None:
                copied, lengths = first.new_zeros(len(first), 0), torch.zeros_like(first)
            copied = functional.pad(copied, (0, config.num_heads))[:, : config.num_heads]
            # Heads know no rest of a rejected draft, which has the number behind theirs.
            lengths = torch.where(lengths > config.copy_match, 0, lengths)
            seen = TokensSeen(first, copied, lengths)
        states: Tensor = self.heads(finals, seen, embed)
        return functional.pad(states, (0, 0, 0, self.num_slots - config.num_heads))

    def fill(self, rows: Tensor, slots: Tensor, guesses: Tensor) -> Tensor:
        """[..., hidden] what the layers read in slots [...] with these guesses [..., hidden]."""
        return rows + (self.shown[slots] * unit_rms(guesses)).to(rows.dtype)

    def corrected(self, states: Tensor, slots: Tensor, guesses: Tensor) -> Tensor:
        """[..., hidden] final states: the guesses, and what the layers add to them."""
        return guesses + (self.correction[slots] * states).to(guesses.dtype)
