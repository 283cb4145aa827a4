# SPDX-License-Identifier: Apache-2.0
"""The level ``ngram``: what followed when the end of the text occurred in it before.

The statistical level of Cascade Speculative Drafting (Chen et al. 2023, "max-gram"): the longest
suffix that occurs in prompt or output, and its continuation. The paper falls back to a table of
bigrams, which is one tokenizer's; here nothing is foreseen then. It looks a suffix up and keeps
nothing of it, so it may be shown what is not verified.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers.base import (
    EMPTY_DRAFT,
    BaseProposer,
    Draft,
    EngineHandle,
    IntArray,
    RequestStep,
    StepContext,
    chain,
    proposer,
)
from vllm_spec_ext.proposers.input_copy.options import refuse_crossed


class NgramOptions(MethodOptions):
    """Options of the level ``ngram``."""

    max_ngram: int = Field(default=16, ge=1, le=64)
    """Longest suffix, in tokens, that is looked up."""

    min_ngram: int = Field(default=1, ge=1, le=64)
    """Shortest suffix that counts as found."""

    @model_validator(mode="after")
    def _check_ngrams(self) -> Self:
        refuse_crossed(self.min_ngram, self.max_ngram)
        return self


@proposer(
    "ngram",
    summary="What followed when the end of the text occurred in it before.",
    options=NgramOptions,
    num_speculative_tokens=8,
)
class SuffixLookup(BaseProposer):
    """A level of cascades; as a method of its own `input_copy` does this better."""

    options: NgramOptions

    def start(self, engine: EngineHandle) -> None:
        """Compile the search."""
        from vllm_spec_ext.proposers.text_index.occurrence_index import warm_up
        from vllm_spec_ext.proposers.text_index.request_texts import RequestTexts

        warm_up()
        self._texts = RequestTexts()

    def propose(self, step: StepContext) -> list[Draft]:
        """One chain a request; empty where the end of its text is new."""
        return [self._propose_one(request) for request in step.requests]

    def continue_from(self, request_id: str, provisional: Sequence[int], most: int) -> IntArray:
        """See :class:`vllm_spec_ext.proposers.base.Continues`; searches the verified text."""
        text = self._texts.known(request_id)
        if text is None:
            return EMPTY_DRAFT.tokens
        options = self.options
        added = np.asarray(provisional, np.int32)
        suffix = np.concatenate([text.tokens[-options.max_ngram :], added])[-options.max_ngram :]
        match = text.longest(suffix, options.max_ngram, own=not len(added))
        if match.length < options.min_ngram:
            return EMPTY_DRAFT.tokens
        whole = text.tokens[match.latest : match.latest + most]
        if len(whole) < most:  # a repetition shorter than what is wanted repeats itself
            whole = np.concatenate([whole, added])
        return whole[np.arange(most) % len(whole)] if len(whole) else EMPTY_DRAFT.tokens

    def finish(self, request_ids: Sequence[str]) -> None:
        """Forget the texts."""
        for request_id in request_ids:
            self._texts.forget(request_id)

    def _propose_one(self, request: RequestStep) -> Draft:
        if not request.options.enabled:
            return EMPTY_DRAFT
        self._texts.of(request)
        if request.room <= 0:
            return EMPTY_DRAFT
        return chain(self.continue_from(request.request_id, (), request.room))
