# SPDX-License-Identifier: Apache-2.0
"""Adaptive n-gram drafting: a trigram tree from a corpus and from what the request says itself.

After ADED (*Adaptive Draft-Verification for Efficient LLM Decoding*): a trigram matrix built from
a corpus is adapted while decoding, and a tree search drafts from it. ``reference.py`` has what
differs in the published code. The estimates play no part in acceptance, so output stays lossless.

This module is light; everything compiled is loaded when the engine starts.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers.adaptive_ngram.options import (
    MOST_LATE_BYTES,
    AdaptiveNgramOptions,
)
from vllm_spec_ext.proposers.adaptive_ngram.settings import settings_of
from vllm_spec_ext.proposers.base import (
    BaseProposer,
    Draft,
    EngineHandle,
    IntArray,
    LateDrafter,
    Needs,
    StepContext,
    StepOutcome,
    TargetFacts,
    proposer,
)
from vllm_spec_ext.proposers.candidates.recycled_rows import NUM_KEPT

if TYPE_CHECKING:
    from vllm_spec_ext.proposers.adaptive_ngram.drafter import NgramDrafter
    from vllm_spec_ext.proposers.adaptive_ngram.late_ngram import LateNgram
    from vllm_spec_ext.proposers.adaptive_ngram.more_sources import MoreSources

logger = logging.getLogger("vllm.spec_ext")


@proposer(
    name="adaptive_ngram",
    summary="Drafts a tree of likely continuations from n-grams of a corpus, the prompt and the "
    "output so far.",
    options=AdaptiveNgramOptions,
    num_speculative_tokens=24,
    tree=True,
    best_for="text like a corpus of yours (auto takes one, too); several requests at a time (one "
    "at a time without a corpus, vLLM's suffix is as fast or faster)",
    cost="about 0.3 ms a step, 164 kB a request; no model",
)
class AdaptiveNgram(BaseProposer):
    """See the module; one instance serves one engine."""

    drafter: "NgramDrafter"

    def __init__(self, options: MethodOptions) -> None:
        """Keep the options; everything else happens in :meth:`start`."""
        if not isinstance(options, AdaptiveNgramOptions):
            options = AdaptiveNgramOptions.model_validate(options.model_dump())
        super().__init__(options)
        self.settings = settings_of(options)
        if options.recycled_contexts:
            self.needs = Needs(next_tokens=NUM_KEPT, shares_nodes=True)
        elif options.looks_up:
            self.needs = Needs(shares_nodes=True)
        self._more: MoreSources | None = None

    @classmethod
    def check(cls, options: MethodOptions, target: TargetFacts) -> None:
        """A corpus that cannot be read, or is another tokenizer's; raises SpecExtError."""
        from vllm_spec_ext.proposers.corpus import store

        asked = cast(AdaptiveNgramOptions, options)
        if asked.overlay_file is not None and not target.share_unsalted:
            raise SpecExtError(
                "overlay_file holds what requests without a cache_salt say, and on this engine "
                'they share nothing: leave overlay_file out, or set "share_unsalted": true if all '
                "clients may learn what the others were answered (docs: serving)"
            )
        if asked.overlay in ("shared", "both") and not target.share_unsalted:
            logger.warning(
                "vllm-spec-ext: overlay=%r serves requests with a cache_salt alone here; set "
                '"share_unsalted": true if all clients may learn what the others were answered '
                "(docs: serving)",
                asked.overlay,
            )
        vocab_size, fingerprint = target.vocab_size, None
        if asked.corpus is not None:
            header = store.open_store(asked.corpus, target).header
            vocab_size, fingerprint = header.vocab_size, header.fingerprint
        if asked.overlay_file is not None:
            from vllm_spec_ext.proposers.adaptive_ngram.overlay import check_overlay
            from vllm_spec_ext.proposers.adaptive_ngram.overlay_files import file_to_read

            # Refuses an engine without a tokenizer, too.
            fingerprint = fingerprint or store.target_fingerprint(target)
            path = file_to_read(asked.overlay_file)
            if path.exists():
                check_overlay(path, fingerprint, vocab_size, asked.shared_buckets)

    def start(self, engine: EngineHandle) -> None:
        """Open the store, reserve tables, compile; raises as :class:`NgramDrafter`."""
        from vllm_spec_ext.proposers.adaptive_ngram.drafter import NgramDrafter

        self.drafter = NgramDrafter(self.settings, engine)
        if self.settings.looks_up:
            from vllm_spec_ext.proposers.adaptive_ngram.more_sources import MoreSources

            self._more = MoreSources(self.settings, engine)

    def propose(self, step: StepContext) -> list[Draft]:
        """Learn the new tokens of all requests, then draft for each."""
        if self._more is None:
            return self.drafter.propose(step)
        # All of it, whatever it costs: how much is drafted is decided with the other sources.
        return self._more.merge(step, self.drafter.propose(StepContext(step.requests)))

    @classmethod
    def drafts_late(cls, options: MethodOptions) -> bool:
        """Chains, where it is known without loading anything that the tables are small enough."""
        asked = cast(AdaptiveNgramOptions, options)
        return not asked.tree and asked.fits_a_device

    def late_drafter(self, engine: EngineHandle) -> LateDrafter | str:
        """Of chains, if the tables are not too large for the device."""
        if self.settings.tree:
            return 'its drafts are trees; "tree": false drafts chains'
        return self.why_not_late() or self._late(engine)

    def why_not_late(self) -> str | None:
        """Why its tables cannot stand on a device, now that they are there; None if they can."""
        from vllm_spec_ext.proposers.adaptive_ngram.late_ngram import table_bytes

        needed = table_bytes(self.drafter.learner, self.drafter.base)
        if needed <= MOST_LATE_BYTES:
            return None
        return (
            f"its tables take {needed >> 20} MiB, expected at most {MOST_LATE_BYTES >> 20} on "
            "the device: a smaller corpus, request_buckets, shared_buckets or max_cache_salts"
        )

    def late_behind_copies(self, engine: EngineHandle) -> "LateNgram":
        """Of chains that begin with copies, see :mod:`.late_copies`."""
        return self._late(engine, behind_copies=True)

    def _late(self, engine: EngineHandle, *, behind_copies: bool = False) -> "LateNgram":
        from vllm_spec_ext.proposers.adaptive_ngram.late_ngram import LateNgram

        return LateNgram(self.drafter, engine.num_speculative_tokens, behind_copies=behind_copies)

    def continue_from(self, request_id: str, provisional: Sequence[int], most: int) -> IntArray:
        """See :class:`vllm_spec_ext.proposers.base.Continues`; a search and nothing else."""
        return self.drafter.continue_from(request_id, provisional, most)

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Learn how far estimates can be trusted; tokens are learned from the tokens themselves."""
        if self._more is None:
            self.drafter.observe(outcomes)
        else:  # these are of the merged tree
            self._more.observe(outcomes)

    def finish(self, request_ids: Sequence[str]) -> None:
        """Give the requests' overlays back."""
        self.drafter.finish(request_ids)
        if self._more is not None:
            self._more.finish(request_ids)

    def close(self) -> None:
        """Save the shared overlay."""
        self.drafter.save()
