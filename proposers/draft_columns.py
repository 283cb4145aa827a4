# SPDX-License-Identifier: Apache-2.0
"""Columns of logits over a draft vocabulary, and one more for a token that is copied.

A draft vocabulary of 16,384 lacks every twentieth token of a chat; of these every fourth was said
earlier in the same answer (docs/nar.md). So a token that a row is *shown*, as it followed at an
earlier place of the text, may be drafted whether it is listed or not: where it is not, the last
column is its own.
"""

from pathlib import Path

import torch
from torch import Tensor

_ABSENT = -1e4  # logit of a token that is not drafted; its probability is 0 in float32


def shapes_and_ids(file: Path) -> tuple[dict[str, tuple[int, ...]], Tensor | None]:
    """Shapes of the tensors in a file, and its draft vocabulary if it has one; no weights are read.

    Raises what safetensors does.
    """
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as opened:
        names = list(opened.keys())
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
        return shapes, opened.get_tensor("draft_vocab") if "draft_vocab" in names else None


def ids_problem(ids: Tensor, vocab_size: int) -> str | None:
    """What is wrong with a draft vocabulary [m] as its file has it; None if nothing is."""
    if not len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        return f"draft_vocab holds token ids outside the vocabulary of {vocab_size}"
    if len(ids.unique()) < len(ids):
        return "draft_vocab names a token more than once"
    return None


class DraftColumns:
    """Of a list of tokens."""

    def __init__(self, ids: Tensor, vocab_size: int) -> None:
        """Know a list.

        Args:
            ids: [m] tokens, each once.
            vocab_size: The target's.
        """
        self.ids = ids.long()
        self._places = torch.full((vocab_size,), -1, device=ids.device)
        self._places[self.ids] = torch.arange(len(ids), device=ids.device)

    def __len__(self) -> int:
        return len(self.ids)

    def places(self, tokens: Tensor, shown: Tensor | None = None) -> Tensor:
        """Column of each token; below 0 where it has none.

        Args:
            tokens: [...] int64; below 0 = none.
            shown: What their rows are shown, of a shape like `tokens`; -1 = nothing.
        """
        found = self._places[tokens.clamp(min=0)].where(tokens >= 0, tokens)
        if shown is None:
            return found
        return found.masked_fill((found < 0) & (tokens >= 0) & (tokens == shown), len(self))

    def tokens(self, places: Tensor, shown: Tensor | None = None) -> Tensor:
        """[n, ...] token ids of columns [n, ...]; `shown` [n] as above."""
        if shown is None:
            return self.ids[places]
        own = shown.clamp(min=0).view(-1, *(1,) * (places.ndim - 1)).expand_as(places)
        return self.ids[places.clamp(max=len(self) - 1)].where(places < len(self), own)

    def append(self, logits: Tensor, own: Tensor, shown: Tensor) -> Tensor:
        """Logits with one more column, by which rows without such a token draft nothing.

        Args:
            logits: [n, m] of the list.
            own: [n] of what each row is shown.
            shown: [n] as above.

        Returns:
            [n, m + 1].
        """
        is_outside = (shown >= 0) & (self.places(shown) < 0)
        return torch.cat([logits, own.to(logits.dtype).where(is_outside, _ABSENT)[:, None]], dim=1)
