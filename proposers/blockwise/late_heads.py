# SPDX-License-Identifier: Apache-2.0
"""``blockwise`` where the scheduler does not wait: heads read what is on the device already.

The state that gave a text's last token, that token, and what followed where the text's end occurred
before: none of it comes from the host. What was drafted is copied there behind the step's tokens,
and read one step later, to say what became of it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm_spec_ext.proposers.base import EMPTY_DRAFT, DeviceTexts, Draft, RequestStep
from vllm_spec_ext.proposers.blockwise.heads import HeadsConfig, TokensSeen
from vllm_spec_ext.proposers.blockwise.options import BlockwiseOptions
from vllm_spec_ext.proposers.late_drafting import padded

if TYPE_CHECKING:
    import torch

    from vllm_spec_ext.proposers.blockwise import Blockwise

_BLOCK = 1024  # places that one program compares
_CHUNK = 64  # blocks that are put together at once


def why_not_late(options: BlockwiseOptions) -> str | None:
    """Why drafts wait for each step's tokens; None if they need not."""
    if options.tree:
        return 'its drafts are trees; "tree": false drafts chains'
    if options.draw:
        return "draw verifies by probabilities that the host hands over"
    if options.min_confidence > 0.0:
        return "min_confidence shortens drafts on the host"
    return None


def find_settings(config: HeadsConfig) -> dict[str, Any]:
    """Constants of ``find_ends``; a kernel is compiled for each."""
    return {"LONGEST": config.copy_match, "BLOCK": _BLOCK}


def show_settings(config: HeadsConfig) -> dict[str, Any]:
    """The same of ``show_tokens``."""
    heads = config.num_heads
    return {"NUM_HEADS": heads, "PADDED": padded(heads), "CHUNK": _CHUNK}


class _Sent(NamedTuple):
    """Drafts on their way to the host."""

    rows: dict[str, int]  # by request
    tokens: "torch.Tensor"  # [num_requests, num_drafted] int64
    arrived: "torch.cuda.Event | None"  # None: they are there


class LateHeads:
    """Of one engine; see :class:`vllm_spec_ext.proposers.late_drafting.LateDrafter`."""

    def __init__(self, proposer: "Blockwise", config: HeadsConfig, num_drafted: int) -> None:
        """Nothing was drafted yet.

        Args:
            proposer: Has the heads.
            config: Of the heads.
            num_drafted: Tokens of a draft.
        """
        self._proposer, self._config, self._num_drafted = proposer, config, num_drafted
        self._sent: _Sent | None = None

    def start(self, device: "torch.device") -> None:
        """The heads are there."""
        self._proposer.late = self

    def draft(self, requests: Sequence[RequestStep], texts: DeviceTexts) -> "torch.Tensor":
        """One pass of the heads, see :class:`.late_drafting.LateDrafter`."""
        import torch

        self._sent = None
        with torch.inference_mode():
            hidden, seen = texts.hidden_states(), self._seen(requests, texts)
            logits, shown = self._proposer.head_logits(hidden, seen, self._num_drafted)
            assert logits is not None, "vLLM gives rank 0 the logits"
            drafts = self._proposer.tokens(logits.argmax(dim=-1, keepdim=True), shown).squeeze(-1)
            rooms = np.array([request.room for request in requests], np.int64)
            if rooms.min() < drafts.shape[1]:  # what a request does not want is filled up
                place = torch.arange(drafts.shape[1], device=drafts.device)
                wanted = place < texts.upload(rooms)[:, None]
                drafts = drafts.where(wanted, seen.following[:, None])
        rows = {request.request_id: row for row, request in enumerate(requests)}
        # Into pinned memory, behind which nobody waits.
        on_host, arrived = drafts.to("cpu", non_blocking=True), None
        if drafts.is_cuda:
            arrived = torch.cuda.Event(blocking=True)  # as vLLM's: who waits for it sleeps
            arrived.record()
        self._sent = _Sent(rows, on_host, arrived)
        return drafts

    def drafted(self, requests: Sequence[RequestStep]) -> list[Draft]:
        """What was drafted last for each of these; waits for the pass of the heads."""
        sent, self._sent = self._sent, None
        if sent is None:
            return [EMPTY_DRAFT] * len(requests)
        if sent.arrived is not None:
            sent.arrived.synchronize()  # of the step before the one that runs
        tokens = sent.tokens.int().numpy()
        rows = [(sent.rows.get(request.request_id), request.room) for request in requests]
        return [
            EMPTY_DRAFT if row is None or not room else Draft(tokens[row, :room])
            for row, room in rows
        ]

    def _seen(self, requests: Sequence[RequestStep], texts: DeviceTexts) -> TokensSeen:
        if not self._config.copy_match:
            ends = texts.lengths[texts.places].long() - 1
            last = texts.tokens[texts.places, ends].long()
            return TokensSeen(last.clamp(0, self._config.vocab_size - 1))
        import torch

        from vllm_spec_ext.proposers.blockwise.late_kernels import find_ends, show_tokens

        longest = max(len(request.token_ids) for request in requests) + self._num_drafted + 1
        num_requests, num_blocks = len(requests), -(-longest // _BLOCK)
        device, stride = texts.tokens.device, texts.tokens.stride(0)
        inputs = texts.tokens, stride, texts.places, texts.lengths
        found = torch.empty((num_requests, num_blocks), dtype=torch.int64, device=device)
        find_ends[(num_requests, num_blocks)](
            *inputs, found, num_blocks, **find_settings(self._config)
        )
        shape = num_requests, 2 + self._config.num_heads
        shown = torch.empty(shape, dtype=torch.int64, device=device)
        show_tokens[(num_requests,)](
            *inputs,
            found,
            shown,
            num_blocks,
            self._config.vocab_size,
            **show_settings(self._config),
        )
        return TokensSeen.of_rows(shown)
