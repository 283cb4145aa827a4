# SPDX-License-Identifier: Apache-2.0
"""Options of ``input_copy``, for the engine and for one request."""

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from vllm_spec_ext.errors import shown
from vllm_spec_ext.options import MethodOptions, RequestOptions

MAX_MARKER_LENGTH = 1000


def refuse_crossed(min_ngram: int, max_ngram: int) -> None:
    """Lengths of suffixes between which there is none; raises ValueError."""
    if min_ngram > max_ngram:
        raise ValueError(f"min_ngram={min_ngram} is above max_ngram={max_ngram}; lower min_ngram")


class InputCopyOptions(MethodOptions):
    """Options of ``input_copy`` (input-guided aggressive decoding)."""

    source: Literal["auto", "last_user", "prompt"] = "auto"
    """Where copies come from when the request names no source: the whole prompt, where that is a
    chat beginning with its last user message (``auto``), that message alone (``last_user``), or the
    prompt from its first token on (``prompt``)."""

    max_ngram: int = Field(default=16, ge=1, le=64)
    """Longest generated suffix, in tokens, that is looked up in the source."""

    min_ngram: int = Field(default=1, ge=1, le=64)
    """Shortest generated suffix, in tokens, that counts as a match."""

    match: Literal["unique", "latest", "best"] = "best"
    """Which occurrence counts when the longest matching suffix occurs more than once in the
    source: the first one after the point where copying last stopped, else the last (``best``),
    always the last (``latest``), or none (``unique``, the paper's rule, but see ``near``)."""

    near: int = Field(default=64, ge=0)
    """With ``unique``, an ambiguous match still counts if an occurrence lies at most this many
    tokens behind the point where copying last stopped; 0 is the paper's strict rule."""

    fold_case: bool = True
    """Compare tokens without regard to upper case and a leading space."""

    growth: int = Field(default=8, ge=0)
    """Draft at most this many tokens for each token that agrees with the source so far, and at
    least ``first_draft``: a weak match then costs little. 0 always drafts to the cap."""

    first_draft: int = Field(default=12, ge=1)
    """Draft tokens after the weakest match, see ``growth``."""

    realign: int = Field(default=4, ge=0, le=64)
    """After the target replaced one source token by another, assume that the source goes on
    behind the replaced token and draft this many tokens from there; 0 waits for a match."""

    also_output: bool = True
    """Match the request's own output where it agrees in more tokens than the source does."""

    output_min_ngram: int = Field(default=1, ge=1, le=64)
    """Shortest suffix that counts as a match in the request's own output."""

    earlier_answers: int = Field(default=16_384, ge=0)
    """Tokens of earlier requests' answers that are kept to copy from where they agree in more
    tokens than everything else. Kept apart for each ``cache_salt``; requests without one share on
    a server only with ``share_unsalted``. 0 keeps none."""

    max_cache_salts: int = Field(default=16, ge=1, le=4096)
    """Number of ``cache_salt`` values whose earlier answers are kept at a time; the one unused for
    longest is forgotten first. Requests without a salt do not count."""

    @model_validator(mode="after")
    def _check_ngrams(self) -> Self:
        refuse_crossed(self.min_ngram, self.max_ngram)
        return self


class InputCopyRequest(RequestOptions):
    """What a request may say about its source; at most one of the source fields."""

    source_span: tuple[int, int] | None = None
    """Token span ``[start, end)`` of the prompt to copy from."""

    source_markers: (
        tuple[
            Annotated[str, StringConstraints(min_length=1, max_length=MAX_MARKER_LENGTH)],
            Annotated[str, StringConstraints(min_length=1, max_length=MAX_MARKER_LENGTH)],
        ]
        | None
    ) = None
    """Two texts; the source is what stands between their last occurrence in the prompt."""

    source_text: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Text to copy from that need not be in the prompt at all."""

    source_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(fail_fast=True)] | None
    ) = None
    """As ``source_text``, already tokenised."""

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        fields = ("source_span", "source_markers", "source_text", "source_token_ids")
        given = [name for name in fields if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one source, not {len(given)}: {', '.join(given)}")
        if self.source_span is not None and not 0 <= self.source_span[0] < self.source_span[1]:
            raise ValueError(
                f"source_span={shown(list(self.source_span))} is empty or negative; "
                "expected [start, end) with 0 <= start < end"
            )
        return self
