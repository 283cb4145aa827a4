# SPDX-License-Identifier: Apache-2.0
"""Drafting on the device, from tables that lack a text's last tokens.

With asynchronous scheduling the host queues a step while the device runs the one before: at that
time it does not know what this one will say. A proposer that drafts *late* puts on the device what
it knew one step before, and how to go on from there; the device, which has all tokens, looks the
current end of the text up. So nothing waits for the tokens of the step, and only what the tables
hold is old, not what is looked up.

A draft is a guess: what is looked up in old tables is verified like any other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.proposers.records import RequestStep

if TYPE_CHECKING:
    import torch

Upload = Callable[[NDArray[Any]], "torch.Tensor"]
"""A copy of an array on the device, of the same type; nobody waits for it."""


def no_states() -> "torch.Tensor":
    """Where no target ran."""
    raise RuntimeError("there are no states of a target here")


@dataclass(frozen=True)
class DeviceTexts:
    """The texts of a batch on the device, the tokens of the step that is running included."""

    tokens: "torch.Tensor"  # [max_num_seqs, max_model_len] int32 prompt and output, in places
    lengths: "torch.Tensor"  # [max_num_seqs] int32 tokens of each
    places: "torch.Tensor"  # [num_requests] int64 where each request of the batch stands
    places_np: NDArray[np.intp]  # the same, on the host
    upload: Upload
    hidden_states: Callable[[], "torch.Tensor"] = no_states
    """[num_requests, hidden_size] of the target's final layer, after its norm: that by which each
    text's last token was chosen, whose own is not there yet. Of requests in mid-prompt any."""


class LateDrafter(Protocol):
    """The part of a proposer that drafts on the device, see :mod:`.late_drafting`."""

    def start(self, device: "torch.device") -> None:
        """Called once, before anything is drafted, where the engine does draft late.

        Take here what memory is needed from the start: vLLM measures after this how much is left
        for requests.
        """

    def draft(self, requests: Sequence[RequestStep], texts: DeviceTexts) -> "torch.Tensor":
        """Queue the look-up; wait for nothing.

        Args:
            requests: Those of the batch as the host knows them: ``token_ids`` lacks what the step
                says, and ``new_tokens`` is empty. Most were told to ``propose`` as they are; one
                that was not is new, or in mid-prompt.
            texts: In the same order.

        Returns:
            [num_requests, num_speculative_tokens] int64 on the device. All of them are verified;
            where nothing is foreseen, the text's last token fills up.
        """


def why_on_host(drafts_trees: bool) -> str:
    """Why a method that has no late drafter needs each step's tokens."""
    return "its drafts are trees" if drafts_trees else "it looks up on the host alone"


def rows_on_device(rows: Sequence[tuple[int, ...]], texts: DeviceTexts) -> "torch.Tensor":
    """[num_requests, num_columns] int64 what the host knows of each request, for its kernel."""
    return texts.upload(np.array(rows, np.int64))


def drafts_of(
    requests: Sequence[RequestStep], texts: DeviceTexts, num_drafted: int
) -> "torch.Tensor":
    """[num_requests, num_drafted] int64 on the device, to be filled."""
    import torch

    shape = (len(requests), num_drafted)
    return torch.empty(shape, dtype=torch.int64, device=texts.tokens.device)


def padded(number: int) -> int:
    """The next power of two: sizes of blocks on a device."""
    return 1 << max(0, number - 1).bit_length()
