# SPDX-License-Identifier: Apache-2.0
"""Adaptive boosting (SpecInfer, Miao et al. 2024): learn what earlier drafts miss.

SpecInfer drops whole prompts that an earlier model continues as the target does. With greedy
answers at hand this can be told for each position: a merged tree needs one model that is right.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.training.shards import TokenData
from vllm_spec_ext.training.target import Target, load_target


def check_earlier(folders: Sequence[Path]) -> None:
    """Raise SpecExtError for a folder that is not there."""
    for folder in folders:
        if not folder.is_dir():
            raise SpecExtError(f"--boost-on {folder}: no such folder; expected a trained draft")


def load_earlier(folders: Sequence[Path], target: Target) -> list[Target]:
    """Earlier drafts on the target's device, frozen.

    Raises:
        SpecExtError: One cannot be loaded, or has ids that the target lacks.
    """
    check_earlier(folders)
    loaded = []
    for folder in folders:
        dtype = next(target.model.parameters()).dtype
        draft = load_target(str(folder), target.device, dtype)
        if draft.vocab_size > target.vocab_size:
            raise SpecExtError(
                f"--boost-on {folder}: vocabulary of {draft.vocab_size}, but {target.name} has "
                f"{target.vocab_size}; expected a draft of this target"
            )
        loaded.append(draft)
    return loaded


def known_ids(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Tokens as a draft reads them: unknown ones as its last, as the engine's model host does."""
    return token_ids.clamp(max=vocab_size - 1)


class MissedPositions:
    """For each position of a text, whether all earlier drafts guess its next token wrongly.

    Found when a text is first asked for, and kept; a batch's ``PositionInputs``.
    """

    def __init__(self, drafts: Sequence[Target], data: TokenData, max_length: int) -> None:
        self._drafts, self._data, self._max_length = drafts, data, max_length
        self._known: dict[int, NDArray[np.int64]] = {}

    def of(self, number: int) -> tuple[NDArray[np.int64]]:
        """([length] 1 = missed,) of one text; positions before its answer count as missed."""
        if number not in self._known:
            self._known[number] = self._search(number)
        return (self._known[number],)

    def _search(self, number: int) -> NDArray[np.int64]:
        text = self._data.sequence(number)
        missed = np.ones(len(text), np.int64)
        used = text[: self._max_length].astype(np.int64)
        first = int(self._data.prompt_lengths[number]) - 1
        for draft in self._drafts:
            ids = known_ids(torch.from_numpy(used)[None].to(draft.device), draft.vocab_size)
            with torch.no_grad():
                states = draft.hidden(ids, torch.ones_like(ids))[0, first:-1]
                guesses = draft.project(states).argmax(-1).cpu().numpy()
            missed[first : len(used) - 1] &= guesses != used[first + 1 :]
        return missed
