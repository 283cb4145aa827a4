# SPDX-License-Identifier: Apache-2.0
"""Options of ``adaptive_ngram``."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers.adaptive_ngram.reference import ADED_REFERENCE, INTERNAL

BUCKET_BYTES = 320
MANY_REQUESTS = 1024
MOST_LATE_BYTES = 1 << 30  # of tables on the device


class AdaptiveNgramOptions(MethodOptions):
    """Options of ``adaptive_ngram`` (adaptive trigram tree, after ADED)."""

    moved_options: ClassVar[Mapping[str, str]] = INTERNAL

    preset: Literal["default", "aded_reference"] = "default"
    """``aded_reference`` drafts and learns as ADED's published code does: its search, and its
    values of all options that are not given. Use it with ``num_speculative_tokens=64``."""

    corpus: str | None = None
    """Folder or file made by ``vllm-spec corpus build``; without one the method learns from the
    prompt and the output alone."""

    overlay: Literal["request", "shared", "both", "none"] = "request"
    """What adapts: a table of each request alone, one shared by requests with the same
    ``cache_salt`` (their phrases then influence each other's speed), both, or none (the corpus
    alone). Requests without a salt share on a server only with ``share_unsalted``."""

    max_cache_salts: int = Field(default=8, ge=1, le=4096)
    """Number of ``cache_salt`` values that have a shared overlay at a time; the one unused for
    longest is emptied first. Requests without a salt do not count."""

    overlay_file: str | None = None
    """The shared overlay of requests without a ``cache_salt`` is read from here at start, if the
    file exists, and saved here; those with one are never saved. For several replicas write
    ``{replica}``: each saves a file of its own, and reads the one where it says ``merged``."""

    overlay_save_every: int = Field(default=200_000, ge=0)
    """Tokens learned between two saves of ``overlay_file``, which is also saved a minute after
    the last time if anything was learned; 0 saves at exit only, which workers on Ray have none
    of, nor servers without ``--shutdown-timeout``: these are killed."""

    tree: bool = True
    """Draft branches; ``false`` drafts the single greedy path."""

    max_depth: int | None = Field(default=None, ge=1, le=64)
    """Longest path in tokens; by default 12 for a tree and no limit for a chain."""

    min_confidence: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Nodes whose path has a lower estimated probability are not drafted. With `adaptive_length`
    what a node costs decides instead, as soon as it was measured."""

    backoff: Literal["mix", "empty", "off"] = "mix"
    """Successors of the last token alone: for the probability that the two-token context leaves
    open (``mix``), only where that context is unknown (``empty``), or never (``off``)."""

    backoff_weight: float = Field(default=0.8, gt=0.0, le=1.0)
    """Trust in backed-off probabilities."""

    learn_prompt: bool = True
    """Learn the prompt, too, not the output alone."""

    prompt_window: int = Field(default=8192, ge=0, le=1 << 20)
    """At most this many last tokens are learned at once."""

    cap: float = Field(default=3.0, gt=0.0, le=1000.0)
    """Highest weight of one successor; one observation weighs 1."""

    half_life: float = Field(default=500.0, ge=0.0)
    """Learned tokens after which a weight has halved (the shared overlay: times the number of
    requests in the batch); 0 never forgets."""

    request_buckets: int = Field(default=512, ge=16, le=1 << 16)
    """Buckets of four rows in each request's overlay, a power of two; 320 bytes a bucket."""

    shared_buckets: int = Field(default=1 << 14, ge=16, le=1 << 20)
    """Buckets of four rows in each shared overlay, a power of two; 320 bytes a bucket."""

    request_weight: float = Field(default=2.0, gt=0.0, le=100.0)
    """Weight of the request's overlay beside the corpus, whose rows sum to at most 1."""

    shared_weight: float = Field(default=0.5, gt=0.0, le=100.0)
    """Weight of the shared overlay beside the corpus."""

    unseen_weight: float = Field(default=1.0, ge=0.0, le=100.0)
    """Weight of all that never followed a context, beside what did; one observation weighs as much
    as its overlay. 0 takes what was seen once for certain."""

    own_text: bool = False
    """Into the same tree: what followed where the end of the text occurred in prompt or output
    before, as ``suffix_tree`` looks it up."""

    earlier_answers: int = Field(default=0, ge=0)
    """The same in this many tokens of earlier requests' answers, shared as overlays are."""

    recycled_contexts: int = Field(default=0, ge=0, le=1 << 24)
    """Into the same tree: what the target foresaw before, as ``recycling`` keeps it for this many
    contexts, shared as overlays are; 80 bytes each."""

    @property
    def looks_up(self) -> bool:
        """Whether there are sources beside n-grams."""
        return self.own_text or self.earlier_answers > 0 or self.recycled_contexts > 0

    def overlay_bytes(self, num_requests: int) -> int:
        """What all overlays take, with so many requests at a time."""
        own = num_requests * self.request_buckets if self.overlay in ("request", "both") else 0
        salts = self.max_cache_salts + 1 if self.overlay in ("shared", "both") else 0
        return BUCKET_BYTES * (own + salts * self.shared_buckets)

    @property
    def fits_a_device(self) -> bool:
        """Whether its tables are small enough for one, as far as that is known without reading
        them; not if the corpus is not there."""
        from vllm_spec_ext.proposers.corpus.store import store_path

        size = self.overlay_bytes(MANY_REQUESTS)
        if self.corpus is not None:
            try:
                size += store_path(self.corpus).stat().st_size
            except (SpecExtError, OSError):
                return False
        return size <= MOST_LATE_BYTES

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("preset") == "aded_reference":
            known = {name: v for name, v in ADED_REFERENCE.items() if name in cls.model_fields}
            return {**known, **given}
        return given

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        for name in ("request_buckets", "shared_buckets"):
            value = getattr(self, name)
            if value & (value - 1):
                raise ValueError(
                    f"{name}={value} is no power of two; try {1 << value.bit_length()}"
                )
        if self.overlay == "none" and self.corpus is None:
            raise ValueError("overlay='none' without a corpus knows nothing; give one of the two")
        if self.overlay_file is not None and self.overlay not in ("shared", "both"):
            raise ValueError(
                f"overlay_file holds a shared overlay, but overlay={self.overlay!r}; "
                "set overlay to 'shared' or 'both'"
            )
        if self.preset == "aded_reference" and self.min_confidence > 0:
            raise ValueError(
                "min_confidence needs probabilities, and preset 'aded_reference' makes none; leave "
                "min_confidence out, or the preset"
            )
        if self.looks_up and (self.preset == "aded_reference" or not self.tree):
            raise ValueError(
                "own_text, earlier_answers and recycled_contexts join a tree of probabilities; "
                "leave them out, or tree=false and the preset 'aded_reference'"
            )
        if self.preset == "aded_reference" and not self.tree:
            raise ValueError(
                "preset 'aded_reference' drafts trees alone; leave tree=false out, or the preset"
            )
        return self
