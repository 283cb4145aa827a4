# SPDX-License-Identifier: Apache-2.0
"""`cascade`: what may be asked for, and what is said where it is wrong."""

import re
from typing import Any

import pytest

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import parse_options
from vllm_spec_ext.proposers.base import ModelSpec, TargetFacts, ViewSpec
from vllm_spec_ext.proposers.cascade import Cascade
from vllm_spec_ext.proposers.cascade.options import CascadeOptions, MethodLevel
from vllm_spec_ext.proposers.input_copy.options import InputCopyRequest

COPY = {"method": "input_copy"}
SMALL = {"model": "drafts/small"}
BASE = {"model": "drafts/base", "quantization": "fp8"}
VIEW = {"view": "retrieval"}


def parsed(**given: Any) -> CascadeOptions:
    return parse_options(CascadeOptions, given, "cascade")


def test_levels_are_read() -> None:
    options = parsed(levels=[{**COPY, "min_ngram": 2}, SMALL, BASE])
    copy = options.levels[0]
    assert isinstance(copy, MethodLevel)
    assert copy.parsed.min_ngram == 2  # type: ignore[attr-defined]
    assert Cascade.models(options) == [
        ModelSpec("small", "drafts/small"),
        ModelSpec("base", "drafts/base", quantization="fp8"),
    ]
    assert [options.reviews(number) for number in range(3)] == [[], [8], [8]]
    again = parsed(**options.model_dump())
    assert again == options


def test_numbers_of_levels() -> None:
    two = parsed(levels=[{"method": "ngram"}, COPY, SMALL, {**BASE, "reviews": [2, 3]}])
    assert two.reviews(2) == [8, 0]  # where one method has nothing the other one is asked
    own = parsed(levels=[{"method": "ngram"}, COPY, {**SMALL, "reviews": 5}, BASE])
    assert [own.reviews(number) for number in (2, 3)] == [[5, 0], [8]]
    assert two.reviews(3) == [2, 3]
    alone = parsed(levels=[SMALL, {**BASE, "reviews": 0}], tokens=[2, 4], lenience=0.5)
    assert alone.reviews(0) == alone.reviews(1) == []
    assert alone.lenience_of(1) == 0.5
    own = parsed(levels=[COPY, {**SMALL, "lenience": 0.3}, SMALL])
    assert [own.lenience_of(number) for number in (1, 2)] == [0.3, 1.0]


def test_a_method_is_a_chain() -> None:
    options = parsed(levels=[{"method": "adaptive_ngram"}, SMALL])
    (ngrams, _) = options.levels
    assert isinstance(ngrams, MethodLevel)
    assert ngrams.parsed.tree is False  # type: ignore[attr-defined]


def test_cs_drafting() -> None:
    """The matrices of the published code, see `presets.py`."""
    one = parsed(levels=[SMALL], preset="cs_drafting")
    assert isinstance(one.levels[0], MethodLevel)
    assert one.levels[0].method == "ngram"
    assert one.tokens == [13, 10]
    assert one.reviews(1) == [10]
    assert one.lenience == pytest.approx(1 / 3)
    two = parsed(levels=[COPY, SMALL, BASE], preset="cs_drafting", lenience=1.0)
    assert two.tokens == [5, 14, 10]
    assert [two.reviews(number) for number in (1, 2)] == [[10], [1, 10]]
    assert two.lenience == 1.0  # what is given wins
    assert parsed(**two.model_dump()) == two


def test_a_view_is_the_last_level() -> None:
    options = parsed(
        levels=[COPY, SMALL, {**VIEW, "budget": 512, "sink": 0, "reviews": [2, 3], "lenience": 0.5}]
    )
    view = ViewSpec("retrieval", "retrieval", 512, sink=0, on_cpus=False)
    assert Cascade.views(options) == [view]
    assert Cascade.models(options) == [ModelSpec("small", "drafts/small")]
    assert options.reviews(2) == [2, 3]
    assert options.lenience_of(2) == 0.5
    assert parsed(**options.model_dump()) == options
    on_cpus = parsed(levels=[COPY, {"view": "stream"}], draft_on_cpu=True)
    assert Cascade.views(on_cpus) == [ViewSpec("stream", "stream")]
    assert on_cpus.reviews(1) == [8]
    assert Cascade.views(parsed(levels=[COPY, SMALL])) == []


def test_triforce() -> None:
    """The best numbers of the paper, see `presets.py`."""
    options = parsed(levels=[SMALL], preset="triforce")
    assert Cascade.views(options) == [ViewSpec("retrieval", "retrieval", 4096, on_cpus=False)]
    assert options.tokens == [6]
    assert [options.reviews(number) for number in range(2)] == [[], [2]]
    assert options.lenience == 1.0
    stream = ViewSpec("stream", "stream", 256, sink=16)
    assert Cascade.models(options) == [ModelSpec("small", "drafts/small", view=stream)]
    whole = parsed(levels=[{**SMALL, "view": "full"}], preset="triforce")
    assert Cascade.models(whole) == [ModelSpec("small", "drafts/small")]
    assert parsed(**options.model_dump()) == options
    own = parsed(levels=[COPY, {"view": "stream", "budget": 256}], preset="triforce", tokens=[4])
    assert Cascade.views(own) == [ViewSpec("stream", "stream", 256, on_cpus=False)]
    assert own.tokens == [4]
    assert own.reviews(1) == [2]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "levels is missing"),
        ({"levels": []}, "found 0, expected at least 2"),
        ({"levels": [COPY]}, "found 1, expected at least 2"),
        ({"levels": [SMALL]}, '"method": "small_model"'),
        ({"levels": [COPY, {"method": "ngram"}]}, "methods review nothing"),
        ({"levels": [SMALL, COPY, BASE]}, "a method as level 2, above a model"),
        ({"levels": [{"method": "input_cpy"}, SMALL]}, "Did you mean 'input_copy'?"),
        ({"levels": [{"method": "cascade"}, SMALL]}, "a cascade cannot be a level"),
        ({"levels": [{"method": "small_model", "model": "m"}, SMALL]}, "runs a model by itself"),
        (
            {"levels": [{"method": "small_model", "options": {"model": "m"}}, SMALL]},
            "runs a model by itself",
        ),
        ({"levels": [{"method": "nar", "options": {"model": "m"}}, SMALL]}, "runs a model"),
        ({"levels": [{"method": "cache_view"}, SMALL]}, '{"view": "retrieval"}'),
        ({"levels": [VIEW, SMALL]}, "a view as level 1, expected it as the last one, 2"),
        ({"levels": [COPY, VIEW, VIEW]}, "a view as level 2"),
        ({"levels": [VIEW]}, '"method": "cache_view"'),
        ({"levels": [COPY, {"view": "retrieve"}]}, "level 2: view"),
        ({"levels": [COPY, {**VIEW, "budget": 64}]}, "sink and recent"),
        ({"levels": [COPY, {**VIEW, "model": "m"}]}, "level 2: view"),
        (
            {"levels": [COPY, {**SMALL, "budget": 64}]},
            'found budget, and all KV in sight; add "view"',
        ),
        ({"levels": [COPY, {**SMALL, "view": "stream", "sink": 256}]}, "fewer than the budget"),
        ({"levels": [VIEW, COPY], "preset": "triforce"}, "a method as level 2"),
        ({"levels": [], "preset": "triforce"}, "found 1, expected at least 2"),
        (
            {"levels": [SMALL, VIEW], "preset": "cs_drafting"},
            "found 0 methods and 1 models and a view",
        ),
        ({"levels": [{"method": "adaptive_ngram", "tree": True}, SMALL]}, "tree=True"),
        ({"levels": [{**COPY, "min_ngrm": 2}, SMALL]}, "Did you mean 'min_ngram'?"),
        ({"levels": [{**COPY, "min_ngram": 0}, SMALL]}, "min_ngram"),
        ({"levels": [COPY, {"modl": "m"}]}, "level 2: expected an object"),
        ({"levels": ["small", "base"]}, "level 1: expected an object"),
        ({"levels": [COPY, {**SMALL, "review": 3}]}, "Did you mean 'reviews'?"),
        ({"levels": [COPY, {**SMALL, "reviews": [3, 3]}]}, "names 2 levels, and 1 are below it"),
        ({"levels": [COPY, {**SMALL, "reviews": -1}]}, "reviews"),
        ({"levels": [COPY, {**SMALL, "lenience": 0.0}]}, "lenience"),
        ({"levels": [COPY, SMALL], "lenience": 1.5}, "lenience"),
        ({"levels": [COPY, SMALL], "tokens": [1, 2, 3]}, "one number for each of the 2 levels"),
        ({"levels": [COPY, SMALL], "tokens": [0, 0]}, "of which one is above 0"),
        ({"levels": [COPY, SMALL], "preset": "triforc"}, "preset"),
        ({"levels": [COPY] + 3 * [SMALL], "preset": "cs_drafting"}, "found 1 methods and 3"),
    ],
)
def test_what_is_wrong(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecExtError, match=re.escape(words)):
        parsed(**given)


def test_methods_check_their_files() -> None:
    options = parsed(levels=[{"method": "adaptive_ngram", "corpus": "/no/such/corpus"}, SMALL])
    facts = TargetFacts("target", 100, 16, 8, lambda: None)
    with pytest.raises(SpecExtError, match="/no/such/corpus"):
        Cascade.check(options, facts)
    Cascade.check(parsed(levels=[COPY, SMALL]), facts)


def test_a_request_may_name_a_source() -> None:
    assert Cascade.info.request_options is InputCopyRequest
