# SPDX-License-Identifier: Apache-2.0
"""What `auto` drafts where the scheduler does not wait for a step's tokens: chains, on the device.

Copies; with a corpus its tri-grams and those of the request's own text, where copies end or are
weak; and where there are heads theirs in front of all: heads were shown what followed before,
and know when not to go by it; what the others foresee stands behind the last head. Trees wait for a
step's tokens, and steps with branches get no full CUDA graph: on an H200 that took two to six
times the time of plain decoding's steps, and so more than trees gain (docs/gpu.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from vllm_spec_ext.proposers.adaptive_ngram.options import AdaptiveNgramOptions
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
from vllm_spec_ext.proposers.candidates.evidence import COPY, CORPUS, NAMES, OWN
from vllm_spec_ext.proposers.input_copy import InputCopy
from vllm_spec_ext.proposers.input_copy.options import InputCopyOptions

if TYPE_CHECKING:
    import torch

    from vllm_spec_ext.proposers.adaptive_ngram import AdaptiveNgram
    from vllm_spec_ext.proposers.adaptive_ngram.late_ngram import LateNgram

_COPY = (NAMES[COPY],)


def why_not_late(options: AutoOptions) -> str | None:
    """Why drafts wait for each step's tokens, whatever a corpus takes; None if they need not."""
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


def ngrams_of(options: AutoOptions) -> AdaptiveNgramOptions | None:
    """Chains of tri-grams from its corpus and the request's own text; None without a corpus."""
    if options.corpus is None:
        return None
    return AdaptiveNgramOptions(
        corpus=options.corpus,
        tree=False,
        overlay="request" if options.own_text else "none",
        min_confidence=0.0,
        adaptive_length=False,
    )


class LateAuto:
    """Of one engine; see :class:`vllm_spec_ext.proposers.late_drafting.LateDrafter`."""

    def __init__(
        self,
        options: AutoOptions,
        engine: EngineHandle,
        drafter: BaseProposer | None,
        ngrams: "AdaptiveNgram | None",
        begins: Callable[["LateAuto"], None],
    ) -> None:
        """Nothing is on the device yet.

        Args:
            options: Of `auto`: which texts are copied from.
            engine: The proposer's.
            drafter: Drafts chains late, and was started; None: nothing goes before copies.
            ngrams: Of :func:`ngrams_of`, started; None: nothing goes behind them.
            begins: Told that this drafts from now on, if the engine does draft late.
        """
        self.copies = InputCopy(
            InputCopyOptions(
                source="auto" if options.own_text else "last_user",
                also_output=options.own_text,
                earlier_answers=options.earlier_answers,
                max_ngram=options.max_ngram,
                max_cache_salts=options.max_cache_salts,
            )
        )
        self.copies.start(engine)
        self.drafter = drafter
        self.needs = self.copies.needs
        self._late_copies = self.copies.late_drafter(engine)
        self._late_first: LateDrafter | None = None
        if drafter is not None:
            made = drafter.late_drafter(engine)
            assert not isinstance(made, str), made
            self._late_first = made
            self.needs = replace(self.needs, hidden_states=drafter.needs.hidden_states)
        self._ngrams = ngrams
        # In one table, which does not tell them apart.
        own = (NAMES[OWN],) if options.own_text else ()
        self._ngram_names = (*own, NAMES[CORPUS])
        self._late_ngrams: LateNgram | None = None
        if ngrams is not None:
            self._late_ngrams = ngrams.late_behind_copies(engine)
        self._begins = begins

    # On the device.

    def start(self, device: "torch.device") -> None:
        """What the sources need there."""
        for late in (self._late_copies, self._late_ngrams, self._late_first):
            if late is not None:
                late.start(device)
        self._begins(self)

    def draft(self, requests: Sequence[RequestStep], texts: DeviceTexts) -> "torch.Tensor":
        """Copies, tri-grams behind them, and the drafter's tokens in the place of the first."""
        drafts, copied = self._late_copies.draft_counted(requests, texts)
        if self._late_ngrams is not None:
            self._late_ngrams.draft_behind(requests, texts, drafts, copied)
        if self._late_first is not None:
            first = self._late_first.draft(requests, texts)
            drafts[:, : first.shape[1]] = first
        return drafts

    # On the host, one step late.

    def propose(self, step: StepContext) -> list[Draft]:
        """What was drafted."""
        drafts = self.copies.propose(step)
        if self._ngrams is not None:
            drafts = self._with_ngrams(self._ngrams, step, drafts)
        if self.drafter is None:
            return drafts
        return list(map(self._behind, self.drafter.propose(step), drafts))

    def _with_ngrams(
        self, ngrams: "AdaptiveNgram", step: StepContext, copies: Sequence[Draft]
    ) -> list[Draft]:
        from vllm_spec_ext.proposers.adaptive_ngram.late_copies import Copied, behind_copies

        copied = [
            Copied(copy.tokens, self.copies.num_before(request.request_id) if len(copy) else 0)
            for request, copy in zip(step.requests, copies, strict=True)
        ]
        chains = behind_copies(ngrams.drafter, step, copied)
        ngrams.drafter.learn_known(step.requests)
        return [
            Draft(
                np.concatenate([copy, behind]),
                sources=(_COPY,) * len(copy) + (self._ngram_names,) * len(behind),
            )
            for copy, behind in chains
        ]

    def _behind(self, first: Draft, others: Draft) -> Draft:
        assert self.drafter is not None
        rest = others.tokens[len(first) :]
        names = others.sources or (_COPY,) * len(others)
        names = ((self.drafter.info.name,),) * len(first) + names[len(first) :]
        return Draft(np.concatenate([first.tokens, rest]), sources=names)

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """What copies alone are worth; of a mixed draft nobody knows it."""
        if self.drafter is None and self._ngrams is None:
            self.copies.observe(outcomes)

    def finish(self, request_ids: Sequence[str]) -> None:
        """Forget the requests, and keep their answers for later ones."""
        self.copies.finish(request_ids)
        if self._ngrams is not None:
            self._ngrams.finish(request_ids)
