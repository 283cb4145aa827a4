# SPDX-License-Identifier: Apache-2.0
"""What `auto` drafts where the scheduler does not wait for a step's tokens: copies, on the device.

Trees wait for those tokens, and steps with branches get no full CUDA graph: on an H200 that took
two to three times the time of plain decoding's steps, and so more than trees gain (docs/gpu.md).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm_spec_ext.proposers.auto.options import AutoOptions
from vllm_spec_ext.proposers.base import DeviceTexts, EngineHandle, RequestStep
from vllm_spec_ext.proposers.input_copy import InputCopy
from vllm_spec_ext.proposers.input_copy.options import InputCopyOptions

if TYPE_CHECKING:
    import torch


def why_not_late(options: AutoOptions) -> str | None:
    """Why drafts wait for each step's tokens; None if they need not."""
    if options.drafter is not None:
        return "its drafter reads them on the host"
    if not options.copy_input:
        return "copy_input is off, and other sources alone are looked up on the host"
    return None


class LateAuto:
    """Of one engine; see :class:`vllm_spec_ext.proposers.late_drafting.LateDrafter`."""

    def __init__(
        self, options: AutoOptions, engine: EngineHandle, begins: Callable[[InputCopy], None]
    ) -> None:
        """Nothing is on the device yet.

        Args:
            options: Of `auto`: which texts are copied from.
            engine: The proposer's.
            begins: Told what drafts from now on, if the engine does draft late.
        """
        self._copies = InputCopy(
            InputCopyOptions(
                also_output=options.own_text,
                earlier_answers=options.earlier_answers,
                max_ngram=options.max_ngram,
                max_cache_salts=options.max_cache_salts,
            )
        )
        self._copies.start(engine)
        self._late = self._copies.late_drafter(engine)
        self._begins = begins

    def start(self, device: "torch.device") -> None:
        """As :class:`LateCopy`."""
        self._late.start(device)
        self._begins(self._copies)

    def draft(self, requests: Sequence[RequestStep], texts: DeviceTexts) -> "torch.Tensor":
        """As :class:`LateCopy`."""
        return self._late.draft(requests, texts)
