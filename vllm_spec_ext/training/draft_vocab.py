# SPDX-License-Identifier: Apache-2.0
"""The tokens that may be drafted, and projections onto them.

After FR-Spec (Zhao et al. 2025): the most frequent tokens make up nearly all of a text, and a
projection onto them alone costs a fraction.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from vllm_spec_ext.training.batches import IGNORED
from vllm_spec_ext.training.shards import TokenData
from vllm_spec_ext.training.target import Target


def frequent_tokens(
    data: TokenData, sequences: Iterable[int], size: int, vocab_size: int
) -> Tensor:
    """[min(size, vocab_size)] int32 most frequent tokens of these continuations, ascending.

    Prompts do not count: they are never drafted. Among equals the lower id is taken.
    """
    counts = np.zeros(vocab_size, np.int64)
    for i in sequences:
        tokens = data.sequence(i)[int(data.prompt_lengths[i]) :]
        np.add.at(counts, tokens, 1)
    chosen = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(chosen).astype(np.int32))


class DraftProjection:
    """The target's projection as a drafter uses it: onto all tokens, or onto a draft vocabulary.

    Columns are *places* in the draft vocabulary; without one, a token's place is its id.
    """

    def __init__(self, target: Target, draft_vocab: Tensor | None) -> None:
        """Prepare the tables.

        Args:
            target: Gives the projection; its weights may change (fine-tuning).
            draft_vocab: [m] ascending token ids; None = all tokens.
        """
        self._target = target
        self._ids = None if draft_vocab is None else draft_vocab.to(target.device, torch.int64)
        self._places: Tensor | None = None
        if self._ids is not None:
            self._places = torch.full((target.vocab_size,), IGNORED, device=target.device)
            self._places[self._ids] = torch.arange(len(self._ids), device=target.device)

    def __call__(self, states: Tensor) -> Tensor:
        """Logits [n, places] of states [n, hidden_size]."""
        if self._ids is None:
            return self._target.project(states)
        return self._target.project_to(states, self._ids)

    @property
    def num_places(self) -> int:
        """Columns of the logits."""
        return self._target.vocab_size if self._ids is None else len(self._ids)

    def tokens(self, places: Tensor) -> Tensor:
        """Token ids of places."""
        return places if self._ids is None else self._ids[places]

    def places(self, tokens: Tensor) -> Tensor:
        """Place of each token; IGNORED stays, and is the place of a token that is not listed."""
        if self._places is None:
            return tokens
        return torch.where(tokens == IGNORED, tokens, self._places[tokens.clamp(min=0)])
