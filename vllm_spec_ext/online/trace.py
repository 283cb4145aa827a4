# SPDX-License-Identifier: Apache-2.0
"""What is recorded of a request, and how traces are packed into a shard.

A position is the index of a token in the request's text. *Row* t is the target's distribution
behind token t, so of token t + 1. A draft that *starts* at t is made from the hidden state of
token t, when the target has drawn token t + 1; its d-th token (from 1) stands at t + 1 + d, so the
row that teaches it is t + d. Rows are of the verified text alone: what a rejected draft token would
have led to is never recorded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_spec_ext.errors import SpecExtError


@dataclass(frozen=True)
class Trace:
    """A stretch of one request."""

    token_ids: NDArray[np.int32]  # [n] all of the text, prompt included
    rows: NDArray[np.int32]  # [r] positions whose distribution is known, ascending
    top_tokens: NDArray[np.int32]  # [r, m] the target's likeliest tokens there
    top_probs: NDArray[np.float32]  # [r, m] of the model, before any sampling parameters
    tails: NDArray[np.float32]  # [r] probability of all other tokens together
    starts: NDArray[np.int32]  # [s] positions where drafts start, ascending
    failed_at: NDArray[np.int32]
    """[s] which draft token the target refused, from 1; 0 = it accepted all, or there was none. A
    bonus token behind a draft that was accepted in full is no failure."""
    states: Tensor  # [s, hidden_size] bfloat16 final hidden states at the starts; width 0 for
    # drafters that do not read them
    chances: NDArray[np.float32]
    """[s] with which such a start is recorded: 1 where a draft failed."""
    temperature: float = 1.0
    """What the request divides its logits by; 0 = it takes the likeliest token."""
    num_prompt_tokens: int | None = None
    """None: not known, in shards of an earlier version."""

    @property
    def num_bytes(self) -> int:
        """In memory, and nearly so on disk."""
        arrays = (self.token_ids, self.rows, self.top_tokens, self.top_probs, self.tails)
        more = (self.starts, self.failed_at, self.chances)
        return sum(a.nbytes for a in (*arrays, *more)) + 2 * self.states.numel()

    def cut(self, likeliest: int) -> "Trace":
        """The same with fewer of the likeliest tokens.

        Raises:
            SpecExtError: It has fewer than these.
        """
        found = self.top_tokens.shape[1]
        if found == likeliest:
            return self
        if found < likeliest:
            raise SpecExtError(
                f"recorded with online.likeliest={found}, expected {likeliest} or more"
            )
        rest = self.top_probs[:, likeliest:].sum(axis=1)
        return replace(
            self,
            top_tokens=self.top_tokens[:, :likeliest],
            top_probs=self.top_probs[:, :likeliest],
            tails=self.tails + rest,
        )


_PER_ROW = ("rows", "top_tokens", "top_probs", "tails")
_PER_START = ("starts", "failed_at", "chances")


def pack(traces: Sequence[Trace]) -> dict[str, Tensor]:
    """Tensors of a shard."""
    packed: dict[str, Tensor] = {}
    for names, lengths in (
        (("token_ids",), [len(t.token_ids) for t in traces]),
        (_PER_ROW, [len(t.rows) for t in traces]),
        (_PER_START, [len(t.starts) for t in traces]),
    ):
        packed[f"{names[0]}_ends"] = torch.from_numpy(np.cumsum(lengths, dtype=np.int64))
        for name in names:
            joined = np.concatenate([getattr(trace, name) for trace in traces])
            packed[name] = torch.from_numpy(joined)
    packed["states"] = torch.cat([trace.states for trace in traces])
    packed["temperature"] = torch.tensor([trace.temperature for trace in traces])
    prompts = [-1 if t.num_prompt_tokens is None else t.num_prompt_tokens for t in traces]
    packed["prompts"] = torch.tensor(prompts)
    return packed


def unpack(packed: Mapping[str, Tensor]) -> list[Trace]:
    """The traces of a shard.

    Raises:
        SpecExtError: It holds something else.
    """
    parts: dict[str, list[NDArray[np.int32]]] = {}
    try:
        for names in (("token_ids",), _PER_ROW, _PER_START):
            ends = packed[f"{names[0]}_ends"].numpy()
            for name in names:
                values = packed[name].numpy()
                if len(values) != (int(ends[-1]) if len(ends) else 0):
                    raise SpecExtError(f"{name}: found {len(values)} entries, expected {ends[-1]}")
                parts[name] = np.split(values, ends[:-1])
        states = torch.tensor_split(packed["states"], packed["starts_ends"][:-1])
        temperatures = packed["temperature"].tolist()
        prompts = packed["prompts"].tolist() if "prompts" in packed else [-1] * len(temperatures)
        return [
            Trace(
                states=state,
                temperature=temperatures[i],
                num_prompt_tokens=None if prompts[i] < 0 else prompts[i],
                **{name: values[i] for name, values in parts.items()},  # type: ignore[arg-type]
            )
            for i, state in enumerate(states)
        ]
    except (KeyError, IndexError) as error:
        raise SpecExtError(f"not a shard of samples ({error!r})") from error
