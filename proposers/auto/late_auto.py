# SPDX-License-Identifier: Apache-2.0
"""What `auto` drafts where the scheduler does not wait for a step's tokens: chains, on the device.

Copies, and where there are heads theirs in front of them: heads were shown what followed before,
and know when not to go by it; what copies foresee stands behind the last head. Trees wait for a
step's tokens, and steps with branches get no full CUDA graph: on an H200 that took two to six
times the time of plain decoding's steps, and so more than trees gain (docs/gpu.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vllm_spec_ext.proposers.auto.options import AutoOptions
from vllm_spec_ext.proposers.base import (
    BaseProposer,
    DeviceTexts,
    Draft,
    EngineHandle,
    LateDrafter,
    RequestStep,
    StepContext,
    StepOutcome,
)
from vllm_spec_ext.proposers.candidates.evidence import NAMES
from vllm_spec_ext.proposers.input_copy import InputCopy
from vllm_spec_ext.proposers.input_copy.options import InputCopyOptions

if TYPE_CHECKING:
    import torch

_COPY = (NAMES[-1],)


def why_not_late(options: AutoOptions) -> str | None:
    """Why drafts wait for each step's tokens; None if they need not."""
    if options.corpus is not None:
        return "its corpus is looked up on the host"
    asked = options.drafter
    if asked is not None and asked.options.get("tree"):
        return 'its drafter drafts trees; leave "tree" out'
    if asked is not None and not asked.proposer().drafts_late(asked.as_chain):
        return "its drafter reads them on the host"
    if asked is not None and not asked.proposer().needs.hidden_states:
        # As long as copies are, it would leave none.
        return f"chains of {asked.method} would stand in the place of all copies"
    if not options.copy_input:
        return "copy_input is off, and other sources alone are looked up on the host"
    return None


class LateAuto:
    """Of one engine; see :class:`vllm_spec_ext.proposers.late_drafting.LateDrafter`."""

    def __init__(
        self,
        options: AutoOptions,
        engine: EngineHandle,
        drafter: BaseProposer | None,
        begins: Callable[["LateAuto"], None],
    ) -> None:
        """Nothing is on the device yet.

        Args:
            options: Of `auto`: which texts are copied from.
            engine: The proposer's.
            drafter: Drafts chains late, and was started; None: copies alone.
            begins: Told that this drafts from now on, if the engine does draft late.
        """
        self.copies = InputCopy(
            InputCopyOptions(
                also_output=options.own_text,
                earlier_answers=options.earlier_answers,
                max_ngram=options.max_ngram,
                max_cache_salts=options.max_cache_salts,
            )
        )
        self.copies.start(engine)
        self.drafter = drafter
        self.needs = self.copies.needs
        self._late: list[LateDrafter] = [self.copies.late_drafter(engine)]
        if drafter is not None:
            made = drafter.late_drafter(engine)
            assert not isinstance(made, str), made
            self._late.append(made)
            self.needs = replace(self.needs, hidden_states=drafter.needs.hidden_states)
        self._begins = begins

    # On the device.

    def start(self, device: "torch.device") -> None:
        """What the sources need there."""
        for late in self._late:
            late.start(device)
        self._begins(self)

    def draft(self, requests: Sequence[RequestStep], texts: DeviceTexts) -> "torch.Tensor":
        """Copies, and the drafter's tokens in the place of the first of them."""
        drafts, *others = [late.draft(requests, texts) for late in self._late]
        for first in others:
            drafts[:, : first.shape[1]] = first
        return drafts

    # On the host, one step late.

    def propose(self, step: StepContext) -> list[Draft]:
        """What was drafted."""
        copies = self.copies.propose(step)
        if self.drafter is None:
            return copies
        return list(map(self._behind, self.drafter.propose(step), copies))

    def _behind(self, first: Draft, copy: Draft) -> Draft:
        assert self.drafter is not None
        rest = copy.tokens[len(first) :]
        names = ((self.drafter.info.name,),) * len(first) + (_COPY,) * len(rest)
        return Draft(np.concatenate([first.tokens, rest]), sources=names)

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """What copies alone are worth; of a mixed draft nobody knows it."""
        if self.drafter is None:
            self.copies.observe(outcomes)

    def finish(self, request_ids: Sequence[str]) -> None:
        """Forget the requests, and keep their answers for later ones."""
        self.copies.finish(request_ids)
