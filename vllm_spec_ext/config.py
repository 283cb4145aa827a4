# SPDX-License-Identifier: Apache-2.0
"""Every option of every method, with its type, bounds, default and documentation.

The classes here are the only place where options are defined: the command line, the JSON of
``--speculative-config``, the per-request options and the docs are all made from them.
No vLLM or torch import: this module loads in milliseconds.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from vllm_spec_ext.errors import SpecExtError, UnknownNameError, shown

OptionsT = TypeVar("OptionsT", bound="Options")

MAX_MARKER_LENGTH = 1000
_INT32_MAX = 2**31 - 1


class Options(BaseModel):
    """Base of all option classes: frozen, and no unknown key is accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class MethodOptions(Options):
    """Options of one method, set once for the engine beside vLLM's own in the same JSON."""

    adaptive_length: bool = True
    """Draft no more than pays off, as measured while serving, and nothing where plain decoding is
    faster; ``false`` always drafts all that the method finds."""


class RequestOptions(Options):
    """Options one request may set in ``SamplingParams.extra_args`` / ``vllm_xargs``."""

    enabled: bool = True
    """Draft for this request at all; ``false`` decodes it plainly."""

    max_draft_tokens: int | None = Field(default=None, ge=0)
    """Upper bound on draft tokens per step for this request; never raises the engine's own."""

    scorer: str | dict[str, Any] | None = None
    """Acceptance rule of this request: ``"exact"``, or stricter parameters of the server's rule,
    e.g. ``{"k": 1}``; JSON text over HTTP. It can never be looser than the server's."""

    @field_validator("max_draft_tokens")
    @classmethod
    def _fit_the_wire(cls, value: int | None) -> int | None:
        """Options travel to the engine as 64-bit integers; every large bound means no bound."""
        return None if value is None else min(value, _INT32_MAX)

    @field_validator("scorer", mode="before")
    @classmethod
    def _read_scorer(cls, value: Any) -> Any:
        """HTTP's ``vllm_xargs`` carries no objects, so parameters may come as JSON text."""
        if isinstance(value, str) and value.lstrip().startswith("{"):
            return parse_json(value)
        return value


class InputCopyOptions(MethodOptions):
    """Options of ``input_copy`` (input-guided aggressive decoding)."""

    source: Literal["auto", "last_user", "prompt"] = "auto"
    """Where copies come from when the request names no source: the last user message of a chat
    prompt (``last_user``), the whole prompt (``prompt``), or the former where the prompt has
    chat markers and the latter where it has none (``auto``)."""

    max_ngram: int = Field(default=16, ge=1, le=64)
    """Longest generated suffix, in tokens, that is looked up in the source."""

    min_ngram: int = Field(default=1, ge=1, le=64)
    """Shortest generated suffix, in tokens, that counts as a match."""

    match: Literal["unique", "latest", "best"] = "unique"
    """Which occurrence counts when the longest matching suffix occurs more than once in the
    source: none (``unique``, the paper's rule, except as ``near`` says), the last (``latest``),
    or the first one after the point where copying last stopped, else the last (``best``)."""

    near: int = Field(default=64, ge=0)
    """With ``unique``, an ambiguous match still counts if an occurrence lies at most this many
    tokens behind the point where copying last stopped; 0 is the paper's strict rule."""

    fold_case: bool = True
    """Compare tokens without regard to upper case and a leading space, so that a word that moved
    to the start of a sentence is still found."""

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
    tokens than everything else: answers to one template open and comment alike. Kept apart for
    each ``cache_salt``; requests without one share on a server only with ``share_unsalted``. 0
    keeps none."""

    max_cache_salts: int = Field(default=16, ge=1, le=4096)
    """Number of ``cache_salt`` values whose earlier answers are kept at a time; the one unused for
    longest is forgotten first. Requests without a salt do not count."""

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

    remember: bool = True
    """Keep this request's answer for later requests with the same ``cache_salt`` to copy from
    (``earlier_answers``)."""

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


class AdaptiveNgramOptions(MethodOptions):
    """Options of ``adaptive_ngram`` (adaptive trigram tree, after ADED)."""

    preset: Literal["default", "aded_reference"] = "default"
    """``aded_reference`` takes the settings of ADED's published code for every option that is
    not given; use it with ``num_speculative_tokens=64``."""

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
    file exists, and saved here; those with one are never saved."""

    overlay_save_every: int = Field(default=200_000, ge=0)
    """Tokens learned between two saves of ``overlay_file``; 0 saves at exit only."""

    search: Literal["best_first", "mcts"] = "best_first"
    """``best_first`` takes nodes in the order of their path probability; ``mcts`` by visits."""

    tree: bool = True
    """Draft branches; ``false`` drafts the single greedy path."""

    max_depth: int | None = Field(default=None, ge=1, le=64)
    """Longest path in tokens; by default 12 for a tree and no limit for a chain."""

    iterations: int = Field(default=150, ge=1, le=2000)
    """Iterations of ``mcts``."""

    max_sequences: int = Field(default=0, ge=0, le=256)
    """``mcts`` as published: keep this many most visited sequences, the root's included, and cut
    the longest ones while they hold over 64 tokens; 0 fills the node budget by visits."""

    greedy_extension: bool = False
    """Append to every sequence of ``mcts`` its most probable next token."""

    min_confidence: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Nodes whose path has a lower estimated probability are not drafted; a step in which no node
    reaches it is not speculated on at all. Must be 0 where ``normalise`` is off."""

    backoff: Literal["mix", "empty", "off"] = "mix"
    """Successors of the last token alone: for the probability that the two-token context leaves
    open (``mix``), only where that context is unknown (``empty``), or never (``off``)."""

    backoff_weight: float = Field(default=0.8, gt=0.0, le=1.0)
    """Trust in backed-off probabilities."""

    learn_prompt: bool = True
    """Learn the prompt, too, not the output alone."""

    prompt_window: int = Field(default=8192, ge=0, le=1 << 20)
    """At most this many last tokens are learned at once, which bounds the work of a long prompt."""

    relearn_window: int = Field(default=0, ge=0, le=1024)
    """Learn the trigrams of this many last tokens anew at every step, as published; 0 learns each
    token exactly once."""

    increment: float = Field(default=1.0, gt=0.0, le=100.0)
    """Weight of one observation."""

    cap: float = Field(default=3.0, gt=0.0, le=1000.0)
    """Highest weight of one successor."""

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

    normalise: bool = True
    """Scale each row to a sum of at most 1, so that products of weights are probabilities."""

    unseen_weight: float = Field(default=1.0, ge=0.0, le=100.0)
    """Weight of all that never followed a context, beside what did; one observation weighs
    ``increment`` times the weight of its overlay. 0 takes what was seen once for certain."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("preset") == "aded_reference":
            return {**ADED_REFERENCE, **given}
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
        if not self.normalise and self.min_confidence > 0:
            raise ValueError("min_confidence needs probabilities; set it to 0 or normalise to true")
        if (self.max_sequences or self.greedy_extension) and (
            self.search != "mcts" or not self.tree
        ):
            raise ValueError(
                "max_sequences and greedy_extension belong to search='mcts' with a tree"
            )
        return self


ADED_REFERENCE: Mapping[str, Any] = {
    "overlay": "shared",
    "search": "mcts",
    "max_depth": 4,
    "iterations": 150,
    "max_sequences": 24,
    "adaptive_length": False,
    "greedy_extension": True,
    "min_confidence": 0.0,
    "backoff": "off",
    "learn_prompt": False,
    "relearn_window": 16,
    "increment": 0.04,
    "cap": 3.0,
    "half_life": 0.0,
    "shared_buckets": 1 << 16,
    "shared_weight": 1.0,
    "normalise": False,
    "unseen_weight": 0.0,
}
"""What ADED's published code does; its overlay is unbounded, ours is not."""


class BlockwiseOptions(MethodOptions):
    """Options of ``blockwise`` (blockwise parallel decoding)."""

    model: Annotated[str, StringConstraints(min_length=1)]
    """Folder (or Hugging Face Hub name) of the heads, made by ``vllm-spec train blockwise``."""

    tree: bool = False
    """Draft a tree of the heads' best candidates; ``num_speculative_tokens`` is then the number
    of nodes. ``false`` drafts the chain of each head's best token."""

    candidates: int = Field(default=4, ge=1, le=32)
    """Tokens of each head that may enter the tree; unused for chains."""

    min_confidence: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Leave out draft tokens whose path is, to the heads, less likely than this; 0 keeps all."""

    draw: bool = False
    """Draw the draft of a request with a temperature from the heads' probabilities at that
    temperature, and judge it by speculative sampling, instead of drafting each head's best token.
    For chains."""

    @model_validator(mode="after")
    def _draws_are_chains(self) -> "BlockwiseOptions":
        if self.draw and self.tree:
            raise ValueError("draw=true drafts chains; leave tree out, or draw")
        return self


def parse_json(text: str) -> Any:
    """Read JSON text of a client.

    Raises:
        ValueError: With a short reason, whatever is wrong with the text: its grammar, its depth,
            numbers of thousands of digits, or NaN and Infinity, which are no JSON.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


RENAMED_OPTIONS: Mapping[str, str] = {"pays": "adaptive_length"}
"""Former names of options, by which they are refused with the new one."""


def unknown_option(owner: str, name: str, valid: Iterable[str]) -> UnknownNameError:
    """The error for an option that does not exist, or no longer under this name."""
    renamed = RENAMED_OPTIONS.get(name)
    return UnknownNameError(f"option of {owner}", name, valid, renamed=renamed)


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
            raise unknown_option(owner, str(name), schema.model_fields)
    try:
        return schema.model_validate(dict(given))
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            text = problem["msg"].removeprefix("Value error, ")
            if problem["loc"]:  # else it is about several options together
                where = ".".join(str(part) for part in problem["loc"])
                text = f"{where}: {text}; found {shown(problem['input'])}"
            lines.append(text)
        raise SpecExtError(f"bad option of {owner}: " + "; ".join(lines)) from error


class ExactRule(Options):
    """Lossless: a draft token stands only if the target chose it."""

    type: Literal["exact"] = "exact"


class TopKRule(Options):
    """A draft token stands if it is among the target's ``k`` best (Stern et al. 2018, 5.1)."""

    type: Literal["top_k"] = "top_k"

    k: int = Field(ge=1)
    """How many best tokens are tolerated; 1 is the exact rule."""


class DistanceRule(Options):
    """A draft token stands if it is near the target's choice (Stern et al. 2018, 5.2)."""

    type: Literal["distance"] = "distance"

    epsilon: float = Field(ge=0, allow_inf_nan=False)
    """Largest tolerated distance; 0 is the exact rule."""

    table: Annotated[str, StringConstraints(min_length=1)] | None = None
    """The metric: a .npy or .safetensors file of shape [vocab, vocab] (target, draft) or [vocab]
    (one value a token), or ``module:function``. Without it, the difference of token ids."""


class MinBlockRule(Options):
    """At least ``length`` tokens a step, right or wrong (Stern et al. 2018, 5.3)."""

    type: Literal["min_block"] = "min_block"

    length: int = Field(ge=1)
    """Tokens a step, the target's own one included; 1 is the exact rule."""


class ToleranceRule(Options):
    """GAD++: among the ``beta`` best tokens and at most ``tau`` behind the best one."""

    type: Literal["tolerance"] = "tolerance"

    beta: int = Field(default=3, ge=1)
    """How many best tokens are tolerated; 1 is the exact rule."""

    tau: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Largest tolerated gap to the best token's log-probability, in nats of the untempered
    distribution; 0 is the exact rule."""


SingleRule = Annotated[
    ExactRule | TopKRule | DistanceRule | MinBlockRule | ToleranceRule,
    Field(discriminator="type"),
]


class AnyOfRule(Options):
    """A draft token stands if at least one of the rules tolerates it."""

    type: Literal["any_of"] = "any_of"

    rules: tuple[SingleRule, ...] = Field(min_length=1)
    """Two or more relaxed rules of different types."""


ScorerOptions = Annotated[
    ExactRule | TopKRule | DistanceRule | MinBlockRule | ToleranceRule | AnyOfRule,
    Field(discriminator="type"),
]
"""Acceptance rule of the engine, told apart by ``type``."""


class EtaOptions(Options):
    """Eta sampling (Hewitt et al. 2022): drop what is noise at the row's entropy."""

    epsilon: float = Field(ge=0, lt=1)
    """Probability below which a token is dropped however flat the distribution; 0 switches the
    sampler off. The authors use 0.0009; 0.0003 to 0.004 is usual."""

    alpha: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Weight of the entropy-dependent threshold ``alpha * exp(-entropy)``; the default is the
    square root of ``epsilon``."""
