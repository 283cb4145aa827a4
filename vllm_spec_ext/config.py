# SPDX-License-Identifier: Apache-2.0
"""Every option of every method, with its type, bounds, default and documentation.

The classes here are the only place where options are defined: the command line, the JSON of
``--speculative-config``, the per-request options and the docs are all made from them.
No vLLM or torch import: this module loads in milliseconds.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from vllm_spec_ext.errors import SpecExtError, UnknownNameError

OptionsT = TypeVar("OptionsT", bound="Options")


class Options(BaseModel):
    """Base of all option classes: frozen, and no unknown key is accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class MethodOptions(Options):
    """Options of one method, set once for the engine beside vLLM's own in the same JSON."""


class RequestOptions(Options):
    """Options one request may set in ``SamplingParams.extra_args`` / ``vllm_xargs``."""

    enabled: bool = True
    """Draft for this request at all; ``false`` decodes it plainly."""

    max_draft_tokens: int | None = Field(default=None, ge=0)
    """Upper bound on draft tokens per step for this request; never raises the engine's own."""


class InputCopyOptions(MethodOptions):
    """Options of ``input_copy`` (input-guided aggressive decoding, METHODS.md 2)."""

    source: Literal["auto", "last_user", "prompt"] = "auto"
    """Where copies come from when the request names no source: the last user message of a chat
    prompt (``last_user``), the whole prompt (``prompt``), or the former where the prompt has
    chat markers and the latter where it has none (``auto``)."""

    max_ngram: int = Field(default=16, ge=1, le=64)
    """Longest generated suffix, in tokens, that is looked up in the source."""

    min_ngram: int = Field(default=1, ge=1, le=64)
    """Shortest generated suffix, in tokens, that counts as a match."""

    match: Literal["unique", "latest", "best"] = "unique"
    """What to do when the longest matching suffix occurs more than once in the source: draft
    nothing (``unique``, the paper's rule), take the last occurrence (``latest``), or the first
    one after the point where copying last stopped (``best``)."""

    also_output: bool = True
    """Match the request's own output when the source has no match."""

    realign: int = Field(default=4, ge=0, le=64)
    """After the target replaced one source token by another, assume that the source goes on
    behind the replaced token and draft this many tokens from there; 0 waits for a match."""

    @model_validator(mode="after")
    def _check_ngrams(self) -> Self:
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram={self.min_ngram} is above max_ngram={self.max_ngram}; lower min_ngram"
            )
        return self


class InputCopyRequest(RequestOptions):
    """What a request may say about its source; at most one of the source fields."""

    source_span: tuple[int, int] | None = None
    """Token span ``[start, end)`` of the prompt to copy from."""

    source_markers: (
        tuple[
            Annotated[str, StringConstraints(min_length=1)],
            Annotated[str, StringConstraints(min_length=1)],
        ]
        | None
    ) = None
    """Two texts; the source is what stands between their last occurrence in the prompt."""

    source_text: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Text to copy from that need not be in the prompt at all."""

    source_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    """As ``source_text``, already tokenised."""

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        fields = ("source_span", "source_markers", "source_text", "source_token_ids")
        given = [name for name in fields if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one source, not {len(given)}: {', '.join(given)}")
        if self.source_span is not None and not 0 <= self.source_span[0] < self.source_span[1]:
            raise ValueError(
                f"source_span={list(self.source_span)} is empty or negative; "
                "expected [start, end) with 0 <= start < end"
            )
        return self


class BlockwiseOptions(MethodOptions):
    """Options of ``blockwise`` (blockwise parallel decoding, METHODS.md 1)."""

    model: Annotated[str, StringConstraints(min_length=1)]
    """Folder (or Hugging Face Hub name) of the heads, made by ``vllm-spec train blockwise``."""

    tree: bool = False
    """Draft a tree of the heads' best candidates; ``num_speculative_tokens`` is then the number
    of nodes. ``false`` drafts the chain of each head's best token."""

    candidates: int = Field(default=4, ge=1, le=32)
    """Tokens of each head that may enter the tree; unused for chains."""

    min_confidence: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Leave out draft tokens whose path is, to the heads, less likely than this; 0 keeps all."""


def parse_options(schema: type[OptionsT], given: Mapping[str, Any], owner: str) -> OptionsT:
    """Validate a mapping against a schema, with errors a user can act on.

    Args:
        schema: The option class.
        given: Option names and values as the user gave them.
        owner: Whose options these are, for the message, e.g. ``"input_copy"``.

    Raises:
        UnknownNameError: A key that the schema does not have.
        SpecExtError: A wrong type or a value out of range; one line per field.
    """
    for name in given:
        if name not in schema.model_fields:
            raise UnknownNameError(f"option of {owner}", str(name), schema.model_fields)
    try:
        return schema.model_validate(dict(given))
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            where = ".".join(str(part) for part in problem["loc"]) or owner
            found = "" if not problem["loc"] else f"; found {problem['input']!r}"
            lines.append(f"{where}: {problem['msg'].removeprefix('Value error, ')}{found}")
        raise SpecExtError(f"bad option of {owner}: " + "; ".join(lines)) from error
