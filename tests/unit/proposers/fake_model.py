# SPDX-License-Identifier: Apache-2.0
"""A draft model without an engine, which also checks that it is used as the contract says."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_spec_ext.proposers.base import (
    Branch,
    EngineHandle,
    RequestStep,
    StepContext,
)

NextLogits = Callable[[Sequence[int]], np.ndarray]
"""Text so far -> [vocab] logits of the next token."""


def second_order(table: np.ndarray) -> NextLogits:
    """Of the last two tokens, so that a branch that read another path is found out.

    Args:
        table: [vocab, vocab, vocab] logits.
    """
    return lambda text: table[text[-2], text[-1]]


def random_next_logits(seed: int, vocab_size: int, sharpness: float = 2.0) -> NextLogits:
    """A random function from a text to its next logits."""
    shape = (vocab_size, vocab_size, vocab_size)
    return second_order(np.random.default_rng(seed).normal(0, sharpness, shape))


@dataclass(eq=False)
class FakeBranch(Branch):
    """A branch that knows its text and the step in which it was made."""

    text: list[int] = field(default_factory=list)
    step: int = 0


class FakeModel:
    """Predicts by a function of the text; counts its passes."""

    def __init__(
        self,
        next_logits: NextLogits,
        vocab_size: int,
        *,
        name: str = "fake",
        max_model_len: int = 1000,
        num_forks: int = 10**9,
        most_read: int = 10**9,
        seconds: Callable[[int], float] | None = None,
    ) -> None:
        """Set up its limits.

        Args:
            next_logits: What it predicts.
            vocab_size: Of its logits.
            name: In pictures and metrics.
            max_model_len: Longest text.
            num_forks: Forks that find room in a step.
            most_read: Drafted tokens that a branch has room for.
            seconds: Of a pass over so many tokens; None = never measured.
        """
        self.next_logits, self.vocab_size, self.name = next_logits, vocab_size, name
        self.max_model_len, self.num_forks, self.most_read = max_model_len, num_forks, most_read
        self.seconds = seconds
        self.step = 0
        self.synced: list[list[str]] = []  # requests of each sync
        self.read: list[list[list[int]]] = []  # texts of each extend
        self._left = 0
        self._starts: dict[int, int] = {}

    @property
    def num_passes(self) -> int:
        return len(self.synced) + len(self.read)

    def sync(
        self,
        requests: Sequence[RequestStep],
        rows: Sequence[int],
        suffixes: Sequence[Sequence[int]] | None = None,
    ) -> list[Branch | None]:
        assert len(rows), "a pass over nothing"
        assert len(set(rows)) == len(rows)
        assert suffixes is None
        self.step += 1
        self._left = self.num_forks
        self.synced.append([requests[row].request_id for row in rows])
        trunks: list[Branch | None] = []
        for row in rows:
            text = requests[row].token_ids.tolist()
            self._starts[row] = len(text)
            trunk = FakeBranch(row, len(text), True, text=text, step=self.step)
            trunks.append(trunk if len(text) <= self.max_model_len else None)
        return trunks

    def extend(self, branches: Sequence[Branch], tokens: Sequence[Sequence[int]]) -> None:
        assert len(branches) == len(tokens)
        assert len(branches), "a pass over nothing"
        own = [self._own(branch) for branch in branches]
        assert len({id(branch) for branch in own}) == len(own), "a branch twice in one pass"
        self.read.append([])
        for branch, added in zip(own, tokens, strict=True):
            assert len(added)
            assert all(0 <= token < self.vocab_size for token in added)
            if not branch.alive:
                continue
            branch.text += added
            branch.length = len(branch.text)
            full = branch.length - self._starts[branch.request] > self.most_read
            branch.alive = not full and branch.length <= self.max_model_len
            self.read[-1].append(list(branch.text))

    def fork(self, branches: Sequence[Branch]) -> list[Branch | None]:
        assert len(branches)
        made: list[Branch | None] = []
        for branch in map(self._own, branches):
            assert branch.alive
            self._left -= 1
            fork = FakeBranch(
                branch.request, branch.length, False, text=list(branch.text), step=self.step
            )
            made.append(fork if self._left >= 0 else None)
        return made

    def rewind(self, branch: Branch, length: int) -> None:
        raise AssertionError("trees take nothing back")

    def logits(self, branches: Sequence[Branch]) -> torch.Tensor:
        own = [self._own(branch) for branch in branches]
        assert all(branch.alive for branch in own), "logits of a dead branch are void"
        return torch.from_numpy(np.stack([self.next_logits(branch.text) for branch in own])).float()

    def all_logits(self, branch: Branch) -> torch.Tensor:
        raise AssertionError("trees read one token at a time")

    def read_logits(self, branch: Branch) -> torch.Tensor:
        raise AssertionError("trees read one token at a time")

    def forward_seconds(self, num_rows: int) -> float | None:
        return None if self.seconds is None else self.seconds(num_rows)

    def reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise NotImplementedError("a fake model has no weights")

    def _own(self, branch: Branch) -> FakeBranch:
        assert isinstance(branch, FakeBranch)
        assert branch.step == self.step, "a branch of an earlier step"
        return branch


def engine(*models: FakeModel, num_speculative_tokens: int = 16) -> EngineHandle:
    """What a proposer is started with."""
    return EngineHandle(
        vocab_size=models[0].vocab_size if models else 8,
        max_model_len=1000,
        max_num_seqs=8,
        num_speculative_tokens=num_speculative_tokens,
        model="target",
        load_tokenizer=lambda: None,
        models=models,
    )


def request(
    text: Sequence[int] = (1, 2, 3),
    *,
    name: str = "a",
    room: int = 16,
    temperature: float = 0.0,
    seed: int | None = None,
    num_new: int = 1,
    top_k: int = 0,
    top_p: float = 1.0,
) -> RequestStep:
    """A request of a step."""
    tokens = np.array(text, np.int32)
    return RequestStep(
        name,
        tokens,
        1,
        tokens[-num_new:].tolist(),
        room,
        temperature=temperature,
        seed=seed,
        top_k=top_k,
        top_p=top_p,
    )


def step(
    *requests: RequestStep,
    min_probability: float | None = None,
    plain_seconds: float | None = None,
) -> StepContext:
    """A step of these requests."""
    return StepContext(requests, min_probability=min_probability, plain_seconds=plain_seconds)
