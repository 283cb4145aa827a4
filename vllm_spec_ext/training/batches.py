# SPDX-License-Identifier: Apache-2.0
"""Which sequences and positions make up batch number n: a pure function of seed and n.

Nothing here has state, so a resumed run sees exactly the batches that it would have seen.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.training.shards import TokenData

IGNORED = -100  # target that lies past the end of the text (torch's ignore_index)
_BUCKET = 16  # batches whose sequences are sorted by length together, to pad less


class PositionInputs(Protocol):
    """What a method is shown at every position of a text, beyond its tokens."""

    def of(self, number: int, /) -> Sequence[NDArray[np.int64]]:
        """Arrays of one text of the data, each with one row for each of its tokens."""


@dataclass(frozen=True)
class Batch:
    """Padded sequences, and the positions in them that a drafter is asked about."""

    sequences: NDArray[np.int64]  # [batch] numbers in the data
    token_ids: Tensor  # [batch, length] int64, right-padded with 0
    mask: Tensor  # [batch, length] int64, 1 = a real token
    rows: Tensor  # [n] int64 which sequence a position is in
    columns: Tensor  # [n] int64 position t of the hidden state in it
    next_tokens: Tensor  # [n] int64 x_{t+1}, the target's own next token
    targets: Tensor  # [n, num_ahead] int64 x_{t+2} ..., IGNORED past the end; may be empty
    inputs: tuple[Tensor, ...] = ()  # each [n, ...] int64, what PositionInputs gave


@dataclass(frozen=True)
class Split:
    """Sequences to train on and sequences kept apart."""

    train: NDArray[np.int64]
    held_out: NDArray[np.int64]

    def some_to_train(self, count: int, seed: int) -> NDArray[np.int64]:
        """Sequences of the whole data, ascending: files of prompts lie one behind the other."""
        drawn = np.random.default_rng([seed, 5]).permutation(self.train)[:count]
        return np.sort(drawn)


def used_lengths(data: TokenData, max_length: int) -> NDArray[np.int64]:
    """[len(data)] tokens of each sequence that are used."""
    return np.minimum(np.diff(data.offsets), max_length)


def split_data(data: TokenData, max_length: int, num_held_out: int, seed: int) -> Split:
    """Put some sequences aside, at most a tenth of those long enough to learn from.

    All answers to a prompt are on the same side, or held-out text would be known by heart, and all
    copies of a text without one; it is the different ones that are counted. Which side that is
    follows from the prompt and the seed: with more texts, or fewer put aside, none that was learned
    from before is held out, if there were ten for each that was to be put aside.

    Raises:
        SpecExtError: Fewer than two different sequences have two tokens after their prompt.
    """
    usable = np.flatnonzero(used_lengths(data, max_length) >= data.prompt_lengths + 2)
    first_copy: dict[bytes, int] = {}
    originals = np.array(
        [
            first_copy.setdefault(_hash(_told_apart_by(data, number, max_length), seed), number)
            for number in usable.tolist()
        ],
        np.int64,
    )  # [len(usable)] the first sequence with the same prompt, or text
    if len(first_copy) < 2:
        raise SpecExtError(
            f"{data.folder}: {len(usable)} of {len(data)} sequences have two tokens after their "
            f"prompt within max_length={max_length}, {len(first_copy)} of them different; "
            "expected at least 2. Add prompts or raise --max-length"
        )
    count = min(num_held_out, max(1, len(first_copy) // 10))
    order = [number for _, number in sorted(first_copy.items())]
    aside = np.isin(originals, order[:count])
    return Split(train=usable[~aside], held_out=usable[aside])


def _told_apart_by(data: TokenData, number: int, max_length: int) -> NDArray[np.int32]:
    """Its prompt; of text without one, which begins with its first token, all that is used."""
    prompt = int(data.prompt_lengths[number])
    return data.sequence(number)[: prompt if prompt > 1 else max_length]


def _hash(token_ids: NDArray[np.int32], seed: int) -> bytes:
    person = str(seed).encode()[-16:]
    return hashlib.blake2b(token_ids.tobytes(), digest_size=16, person=person).digest()


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: arrays have no hash
class BatchPlan:
    """All batches of a run."""

    data: TokenData
    sequences: NDArray[np.int64]
    num_ahead: int  # tokens after the next one that are targets at each position; 0 = next only
    batch_size: int
    max_length: int
    positions_per_sequence: int  # 0 = all
    seed: int
    prompt_text: bool = False
    inputs: PositionInputs | None = None

    @property
    def batches_per_epoch(self) -> int:
        """Steps of one pass over the sequences."""
        return -(-len(self.sequences) // self.batch_size)

    @property
    def mean_positions(self) -> float:
        """Positions of an average batch."""
        data, chosen = self.data, self.sequences
        ends = used_lengths(data, self.max_length)[chosen] - _tokens_behind(self.num_ahead)
        counts = ends if self.prompt_text else ends - data.prompt_lengths[chosen] + 1
        if self.positions_per_sequence:
            counts = np.minimum(counts, self.positions_per_sequence)
        return float(counts.sum()) / self.batches_per_epoch

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0; epochs follow each other without end."""
        epoch, index = divmod(step, self.batches_per_epoch)
        chosen = _epoch(self, epoch)[index]
        random = np.random.default_rng([self.seed, 2, step])
        return make_batch(
            self.data,
            chosen,
            self.num_ahead,
            self.max_length,
            positions_per_sequence=self.positions_per_sequence,
            random=random,
            prompt_text=self.prompt_text,
            inputs=self.inputs,
        )


@lru_cache(maxsize=2)
def _epoch(plan: BatchPlan, epoch: int) -> list[NDArray[np.int64]]:
    """Sequence numbers of every batch of an epoch."""
    random = np.random.default_rng([plan.seed, 1, epoch])
    order = random.permutation(plan.sequences)
    lengths = used_lengths(plan.data, plan.max_length)
    size, window = plan.batch_size, plan.batch_size * _BUCKET
    batches = []
    for start in range(0, len(order), window):
        part = order[start : start + window]
        part = part[np.argsort(lengths[part], kind="stable")]
        batches += [part[i : i + size] for i in range(0, len(part), size)]
    return [batches[i] for i in random.permutation(len(batches))]


def _tokens_behind(num_ahead: int) -> int:
    """Tokens that a text must have behind a position for it to count."""
    return 2 if num_ahead else 1


def make_batch(
    data: TokenData,
    chosen: NDArray[np.int64],
    num_ahead: int,
    max_length: int,
    *,
    positions_per_sequence: int = 0,
    random: np.random.Generator | None = None,
    prompt_text: bool = False,
    inputs: PositionInputs | None = None,
) -> Batch:
    """Pad sequences and pick positions in them.

    A position t counts from the prompt's last token (whose hidden state gives the first generated
    token) to the last one with a token to be drafted: x_{t+2}, or x_{t+1} if ``num_ahead`` is 0.

    Args:
        data: All sequences.
        chosen: [batch] sequence numbers.
        num_ahead: Targets at each position: x_{t+2}, x_{t+3}, ...; 0 = only ``next_tokens``.
        max_length: Tokens used of each sequence.
        positions_per_sequence: Random positions per sequence; 0 = all, in order.
        random: Source of the positions; unused for all.
        prompt_text: Pick positions of the prompts too.
        inputs: What the method is shown beside the tokens; None = nothing.
    """
    texts = [data.sequence(int(i))[:max_length] for i in chosen]
    width = max(len(text) for text in texts)
    ids = np.zeros((len(texts), width), np.int64)
    mask = np.zeros((len(texts), width), np.int64)
    rows, columns = [], []
    shown: list[list[NDArray[np.int64]]] = []
    for row, (number, text) in enumerate(zip(chosen, texts, strict=True)):
        ids[row, : len(text)] = text
        mask[row, : len(text)] = 1
        first = 0 if prompt_text else data.prompt_lengths[number] - 1
        valid = np.arange(first, len(text) - _tokens_behind(num_ahead))
        if positions_per_sequence and random is not None and len(valid) > positions_per_sequence:
            valid = np.sort(random.choice(valid, positions_per_sequence, replace=False))
        columns.append(valid)
        rows.append(np.full(len(valid), row))
        if inputs is not None:
            shown.append([values[valid] for values in inputs.of(int(number))])
    flat_rows, flat_columns = np.concatenate(rows), np.concatenate(columns)
    ahead = flat_columns[:, None] + np.arange(2, num_ahead + 2)  # [n, num_ahead]
    inside = ahead < mask.sum(axis=1)[flat_rows][:, None]
    targets = ids[flat_rows[:, None], np.minimum(ahead, width - 1)]
    return Batch(
        sequences=np.asarray(chosen, np.int64),
        token_ids=torch.from_numpy(ids),
        mask=torch.from_numpy(mask),
        rows=torch.from_numpy(flat_rows),
        columns=torch.from_numpy(flat_columns),
        next_tokens=torch.from_numpy(ids[flat_rows, flat_columns + 1]),
        targets=torch.from_numpy(np.where(inside, targets, IGNORED)),
        inputs=tuple(torch.from_numpy(np.concatenate(parts)) for parts in zip(*shown, strict=True)),
    )
