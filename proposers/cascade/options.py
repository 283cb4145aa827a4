# SPDX-License-Identifier: Apache-2.0
"""Options of ``cascade``."""

import pkgutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from vllm_spec_ext.errors import SpecExtError, UnknownNameError, shown
from vllm_spec_ext.options import MethodOptions, Options, parse_options
from vllm_spec_ext.proposers.base import BaseProposer
from vllm_spec_ext.proposers.cascade import presets
from vllm_spec_ext.proposers.inner_method import InnerMethod, Name
from vllm_spec_ext.proposers.view_options import StreamOptions, ViewOptions

Tokens = Annotated[int, Field(ge=0, le=128)]

DEFAULT_REVIEW = 8

OWN_LEVELS = {"ngram": "vllm_spec_ext.proposers.cascade.suffix_lookup:SuffixLookup"}
"""Levels that are no methods by themselves."""


class MethodLevel(InnerMethod):
    """A method that guesses: ``{"method": NAME, ...}`` with the method's own options beside it.

    A method without a model of its own, or ``ngram``.
    """

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        _ = self.parsed  # refused here, or never
        return self

    def proposer(self) -> type[BaseProposer]:
        """The class of the method.

        Raises:
            SpecExtError: No such method, or none that can be a level.
        """
        # Here, as the registry's classes have options of their own.
        from vllm_spec_ext.proposers import registry

        if self.method == "cascade":
            raise SpecExtError(
                "a cascade cannot be a level of another one; put its levels into this list"
            )
        if self.method in OWN_LEVELS:
            found: type[BaseProposer] = pkgutil.resolve_name(OWN_LEVELS[self.method])
            return found
        known = [name for name in registry.names() if name != "cascade"]
        if self.method not in known:
            raise UnknownNameError("method of a level", self.method, [*known, *OWN_LEVELS])
        return registry.load(self.method)

    @cached_property
    def parsed(self) -> MethodOptions:
        """The method's options; a chain where the method can draft one."""
        proposer = self.proposer()
        schema = proposer.info.options
        given = dict(self.options)
        if "tree" in schema.model_fields and given.setdefault("tree", False) is not False:
            raise SpecExtError(
                f"level {self.method}: found tree={given['tree']!r}, expected false; what is "
                "reviewed is a chain, so leave it out"
            )
        options = parse_options(schema, given, f"level {self.method}")
        if proposer.models(options):
            raise SpecExtError(
                f"level {self.method} runs a model by itself, and a level is either a model or a "
                'method without one; write the level {"model": ...}'
            )
        if proposer.views(options):
            raise SpecExtError(
                f"level {self.method} drafts with the target over a view of its cache, and does "
                'not review; write the last level {"view": "retrieval"}'
            )
        return options


class ReviewingLevel(Options):
    """What a level that reviews has, whatever it is."""

    reviews: Tokens | list[Tokens] | None = None
    """Tokens that the next level below writes for one review, 8 by default; where that is a method,
    the other methods are asked for what it leaves. Or a list, of that level, of the level below
    that, and so on. 0 or ``[]``: it reviews nothing and drafts token by token."""

    lenience: float | None = Field(default=None, gt=0.0, le=1.0)
    """As the cascade's ``lenience``, of this level alone."""

    alone: bool = True
    """Write a token, in a pass of its own, where the levels below have nothing; ``false`` ends the
    draft there."""


class ModelLevel(StreamOptions, ReviewingLevel):
    """A draft model: ``{"model": FOLDER, ...}``."""

    model: Name
    """Folder (or Hugging Face Hub name)."""

    quantization: Name | None = None
    """How its weights are quantized, as vLLM's option; ``null`` as its files say."""


class ViewLevel(ViewOptions, ReviewingLevel):
    """The target itself over a part of its KV cache: ``{"view": "retrieval", ...}``."""


Level = MethodLevel | ModelLevel | ViewLevel


def _read_level(number: int, given: Any) -> Any:
    """The class that one object of ``levels`` is meant to be; raises SpecExtError."""
    if isinstance(given, Level):
        return given
    if not isinstance(given, Mapping) or not {"method", "model", "view"} & given.keys():
        raise SpecExtError(
            f'level {number}: expected an object {{"method": ...}}, {{"model": ...}} or '
            f'{{"view": ...}}; found {shown(given)}'
        )
    if "method" not in given:
        kind = ModelLevel if "model" in given else ViewLevel
        return parse_options(kind, given, f"level {number}")
    try:
        return MethodLevel.model_validate(given)
    except ValidationError as error:
        problems = [problem["msg"].removeprefix("Value error, ") for problem in error.errors()]
        raise SpecExtError(f"level {number}: " + "; ".join(problems)) from error


def _with_cs_drafting(given: Mapping[str, Any], levels: Sequence[Any]) -> dict[str, Any]:
    """Options with the preset's values where there are none; raises SpecExtError."""
    methods = [level for level in levels if isinstance(level, MethodLevel)]
    models = [level for level in levels if isinstance(level, ModelLevel)]
    num_views = len(levels) - len(methods) - len(models)
    tokens, reviews, lenience = presets.cs_drafting(len(methods), len(models), num_views)
    values = {"tokens": tokens, "lenience": lenience, **given}
    if methods and levels[0] is not methods[0]:
        return values  # refused later
    numbered = [
        level.model_copy(update={"reviews": own}) if level.reviews is None else level
        for level, own in zip(models, reviews, strict=True)
    ]
    values["levels"] = [*(methods or [MethodLevel(method="ngram")]), *numbered]
    return values


def _with_triforce(given: Mapping[str, Any], levels: Sequence[Any]) -> dict[str, Any]:
    """Options with the preset's values where there are none."""
    values = {"tokens": presets.TRIFORCE_TOKENS, **given}
    *below, last = levels or [None]
    if not isinstance(last, ViewLevel):
        below, last = list(levels), ViewLevel(budget=presets.TRIFORCE_BUDGET)
    if last.reviews is None:
        last = last.model_copy(update={"reviews": presets.TRIFORCE_REVIEWS})
    streaming = [
        level.model_copy(update={"view": "stream"})
        if isinstance(level, ModelLevel) and "view" not in level.model_fields_set
        else level
        for level in below
    ]
    values["levels"] = [*streaming, last]
    return values


class CascadeOptions(MethodOptions):
    """Options of ``cascade`` (levels that draft for each other)."""

    levels: list[Level]
    """The levels, from the one that costs least to the one whose text the target verifies:
    first methods, as ``{"method": "input_copy"}`` with their own options beside it, then models,
    as ``{"model": FOLDER}``. The last one may be the target itself over a part of its KV cache,
    ``{"view": "retrieval"}``. Each model or view reviews what the levels before it write."""

    preset: Literal["cs_drafting", "triforce"] | None = None
    """``cs_drafting``: the numbers and the lenience of Cascade Speculative Drafting, for one or two
    models, and ``ngram`` below them if no method is given. Use it with
    ``num_speculative_tokens=24``, or 30 for two models. ``triforce``: TriForce's numbers, a
    retrieval view of 4,096 tokens above the other levels if no view is given, and draft models that
    see a ``stream`` if nothing is said of them. It is for contexts far longer than 4,096."""

    tokens: list[Tokens] | None = None
    """Tokens of a draft by level, the last level's first: ``[13, 10]`` lets the last level write
    (and review) 13, and the level below it 10 more, which nobody reviews before the target. A
    review ends where it ends, so a model may write more than its number, and the levels below it
    fewer. By default the last level writes all."""

    lenience: float = Field(default=1.0, gt=0.0, le=1.0)
    """Between levels a chosen token stands if it has at least this share of the likeliest token's
    probability; 1 = only the likeliest itself stands. The target always verifies exactly, so this
    changes how fast drafts are made and how good they are, never the output. Drawn drafts are
    reviewed exactly in any case."""

    draw: bool = True
    """Draw the draft of a request with a temperature, and review it by speculative sampling with
    the levels' probabilities at the request's temperature, top-k and top-p; ``false`` drafts the
    likeliest tokens. A request with a seed is always drafted these."""

    draft_on_cpu: bool = False
    """Draft on CPUs, too, where one level is a view. There, verifying several tokens takes longer
    than reading the KV that a view leaves out, so by default nothing is drafted. Without a view it
    changes nothing."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        values = dict(given)
        levels = values.get("levels")
        if isinstance(levels, list | tuple):
            read = [_read_level(number, level) for number, level in enumerate(levels, 1)]
            values["levels"] = read
            if values.get("preset") == "cs_drafting":
                values = _with_cs_drafting(values, read)
            elif values.get("preset") == "triforce":
                values = _with_triforce(values, read)
        return values

    @model_validator(mode="after")
    def _check_levels(self) -> Self:
        if len(self.levels) < 2:
            raise ValueError(
                f"levels: found {len(self.levels)}, expected at least 2; one method, model or view "
                'drafts by itself as {"method": ...}, {"method": "small_model", "model": ...} or '
                '{"method": "cache_view"}'
            )
        reviews = [isinstance(level, ReviewingLevel) for level in self.levels]
        if not any(reviews):
            raise ValueError(
                "levels: found no model, and methods review nothing; add a level "
                '{"model": FOLDER} or {"view": "retrieval"}, or use one of the methods alone'
            )
        first = reviews.index(True)
        if not all(reviews[first:]):
            place = first + reviews[first:].index(False)
            raise ValueError(
                f"levels: found a method as level {place + 1}, above a model or a view; a method "
                "only sees verified tokens and cannot review, so put methods first"
            )
        views = [i for i, level in enumerate(self.levels, 1) if isinstance(level, ViewLevel)]
        if views and views != [len(self.levels)]:
            raise ValueError(
                f"levels: found a view as level {views[0]}, expected it as the last one, "
                f"{len(self.levels)}; above it only the target reviews, which sees everything"
            )
        if self.tokens is not None and (
            len(self.tokens) > len(self.levels) or not sum(self.tokens)
        ):
            raise ValueError(
                f"tokens: found {self.tokens}, expected one number for each of the "
                f"{len(self.levels)} levels at most, of which one is above 0"
            )
        for number, level in enumerate(self.levels):
            if isinstance(level, ReviewingLevel) and len(self.reviews(number)) > number:
                raise ValueError(
                    f"level {number + 1}: reviews={level.reviews} names {len(self.reviews(number))}"
                    f" levels, and {number} are below it; give one number for each of these at most"
                )
        return self

    def reviews(self, number: int) -> list[int]:
        """Tokens that each level below writes for a reviewer, from the next one down."""
        level = self.levels[number]
        if not isinstance(level, ReviewingLevel) or level.reviews == 0:
            return []
        if isinstance(level.reviews, list):
            return list(level.reviews)
        if level.reviews is None and number == 0:
            return []
        wanted = DEFAULT_REVIEW if level.reviews is None else level.reviews
        # Several methods: with 0 more, each is asked only where those above it wrote too little.
        num_methods = sum(isinstance(other, MethodLevel) for other in self.levels)
        return [wanted] + [0] * (num_methods - 1 if number == num_methods else 0)

    def lenience_of(self, number: int) -> float:
        """Of a reviewer."""
        level = self.levels[number]
        own = level.lenience if isinstance(level, ReviewingLevel) else None
        return self.lenience if own is None else own
