# SPDX-License-Identifier: Apache-2.0
"""What `token_tree` takes and refuses before any model is loaded."""

from typing import Any

import pytest
from fake_model import engine

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import parse_options
from vllm_spec_ext.proposers.base import TargetFacts
from vllm_spec_ext.proposers.models import ModelSpec
from vllm_spec_ext.proposers.token_tree import TokenTree


def options(**given: Any) -> Any:
    return parse_options(TokenTree.info.options, given, "token_tree")


def facts(num_speculative_tokens: int) -> TargetFacts:
    return TargetFacts("target", 8, 4, num_speculative_tokens, lambda: None)


def test_models_are_folders_or_objects() -> None:
    asked = options(models=["drafts/a/", {"model": "org/b", "quantization": "fp8"}, "elsewhere/a"])
    assert TokenTree.models(asked) == [
        ModelSpec("a", "drafts/a/"),
        ModelSpec("b", "org/b", quantization="fp8"),
        ModelSpec("a-2", "elsewhere/a"),
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "models is missing"),
        ({"models": []}, "models: List should have at least 1 item"),
        ({"models": [""]}, "models.0"),
        ({"models": [{"quantization": "fp8"}]}, "model is missing"),
        ({"models": [{"model": "a", "quantisation": "fp8"}]}, "quantisation"),
        ({"models": ["a"], "expansion": []}, "at least one step"),
        ({"models": ["a"], "expansion": [1, 0]}, "greater than or equal to 1; found 0"),
        ({"models": ["a"], "expansion": [9]}, "less than or equal to 8; found 9"),
        ({"models": ["a"], "expand": [1]}, "Did you mean 'expansion'?"),
        ({"model": "a"}, "Did you mean 'models'?"),
    ],
)
def test_bad_options(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecExtError) as error:
        options(**given)
    assert words in str(error.value)


def test_an_expansion_has_to_fit_into_the_node_budget() -> None:
    one = options(models=["a"], expansion=[1, 1, 3, 1, 1])
    TokenTree.check(one, facts(11))
    with pytest.raises(SpecExtError, match=r"11 nodes for each of 1 model;.*\"num.*\": 11"):
        TokenTree.check(one, facts(10))
    two = options(models=["a", "b"], expansion=[1, 1, 3, 1, 1])
    TokenTree.check(two, facts(22))
    with pytest.raises(SpecExtError, match=r"each of 2 models.*=21 nodes"):
        TokenTree.check(two, facts(21))
    TokenTree.check(options(models=["a", "b"]), facts(1))


def test_without_an_engine_it_says_so() -> None:
    proposer = TokenTree(options(models=["a", "b"]))
    with pytest.raises(SpecExtError, match="found 0 loaded draft models, expected 2; only an eng"):
        proposer.start(engine())
