# SPDX-License-Identifier: Apache-2.0
"""The tokens that may be drafted, and projections onto them.

After FR-Spec (Zhao et al. 2025): the most frequent tokens make up nearly all of a text, and a
projection onto them alone costs a fraction.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from vllm_spec_ext.proposers.draft_columns import DraftColumns
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

    Columns are *places* in the draft vocabulary; without one, a token's place is its id. A token
    that a row is shown has one more place where it is not listed, as in serving
    (:class:`.proposers.draft_columns.DraftColumns`).
    """

    def __init__(self, target: Target, draft_vocab: Tensor | None) -> None:
        """Prepare the tables.

        Args:
            target: Gives the projection; its weights may change (fine-tuning).
            draft_vocab: [m] ascending token ids; None = all tokens.
        """
        self._target = target
        self._columns: DraftColumns | None = None
        if draft_vocab is not None:
            self._columns = DraftColumns(draft_vocab.to(target.device), target.vocab_size)

    def __call__(self, states: Tensor, shown: Tensor | None = None) -> Tensor:
        """Logits [n, places] of states [n, hidden_size]; `shown` [n] token ids, -1 = none."""
        if self._columns is None:
            return self._target.project(states)
        logits = self._target.project_to(states, self._columns.ids)
        if shown is None:
            return logits
        own = self._target.project_own(states, shown.clamp(min=0))
        return self._columns.append(logits, own, shown)

    @property
    def num_places(self) -> int:
        """Columns of the logits without that of shown tokens: the most candidates of a row."""
        return self._target.vocab_size if self._columns is None else len(self._columns)

    def tokens(self, places: Tensor, shown: Tensor | None = None) -> Tensor:
        """[n, ...] token ids of places."""
        return places if self._columns is None else self._columns.tokens(places, shown)

    def places(self, tokens: Tensor, shown: Tensor | None = None) -> Tensor:
        """Place of each token; IGNORED stays, and is the place of one that cannot be drafted."""
        if self._columns is None:
            return tokens
        found = self._columns.places(tokens, shown)
        return found.masked_fill(found < 0, IGNORED)
