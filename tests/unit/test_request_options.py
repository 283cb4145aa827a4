# SPDX-License-Identifier: Apache-2.0
"""A request's options: both ways of writing them, and errors that name the field."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_spec_ext.config import InputCopyRequest
from vllm_spec_ext.engine.request_options import (
    GROUP_KEY,
    collect,
    has_options,
    parse_request,
    parse_share_group,
    resolve,
    with_share_group,
)
from vllm_spec_ext.errors import RequestOptionError

SPAN = {"source_span": [1, 3]}

SETTINGS: Any = SimpleNamespace(method="input_copy", rule=None)  # what the front end knows of it


@pytest.mark.parametrize(
    "extra_args",
    [
        {"spec_ext": SPAN},
        {"spec_ext": json.dumps(SPAN)},
        {"spec_ext.source_span": [1, 3]},
        {"spec_ext": {}, "spec_ext.source_span": [1, 3], "other": 1},
    ],
)
def test_all_spellings_mean_the_same(extra_args: dict[str, Any]) -> None:
    assert collect(extra_args) == SPAN
    options = parse_request(InputCopyRequest, extra_args, "input_copy")
    assert isinstance(options, InputCopyRequest)
    assert options.source_span == (1, 3)
    assert has_options(extra_args)


@pytest.mark.parametrize("extra_args", [None, {}, {"other": 1}, {"spec_extra": 1}])
def test_requests_without_options_of_ours(extra_args: dict[str, Any] | None) -> None:
    assert not has_options(extra_args)
    assert collect(extra_args) == {}
    assert parse_request(InputCopyRequest, extra_args, "input_copy") == InputCopyRequest()


@pytest.mark.parametrize(
    ("extra_args", "parameter", "words"),
    [
        ({"spec_ext": 3}, "spec_ext", "found int, expected an object"),
        ({"spec_ext": [1]}, "spec_ext", "found list, expected an object"),
        ({"spec_ext": "{"}, "spec_ext", "not valid JSON"),
        ({"spec_ext": "[1]"}, "spec_ext", "expected an object"),
        ({"spec_ext.source_spam": [0, 1]}, "spec_ext.source_spam", "Did you mean 'source_span'"),
        ({"spec_ext.source_span": "x"}, "spec_ext.source_span", "found 'x'"),
        ({"spec_ext.source_span": [0]}, "spec_ext.source_span", "source_span"),
        ({"spec_ext.source_span": [3, 3]}, "spec_ext.source_span", "empty or negative"),
        ({"spec_ext.source_span": [-1, 3]}, "spec_ext.source_span", "empty or negative"),
        ({"spec_ext.source_markers": ["a"]}, "spec_ext.source_markers", "source_markers"),
        ({"spec_ext.source_markers": ["a", ""]}, "spec_ext.source_markers", "at least 1"),
        ({"spec_ext.source_text": 5}, "spec_ext.source_text", "found 5"),
        ({"spec_ext.source_text": ""}, "spec_ext.source_text", "at least 1"),
        ({"spec_ext.source_token_ids": ["a"]}, "spec_ext.source_token_ids", "integer"),
        ({"spec_ext.source_token_ids": [-4]}, "spec_ext.source_token_ids", "greater than"),
        ({"spec_ext.max_draft_tokens": -1}, "spec_ext.max_draft_tokens", "greater than"),
        ({"spec_ext.enabled": "perhaps"}, "spec_ext.enabled", "found 'perhaps'"),
        (
            {"spec_ext": {"source_text": "a", "source_span": [0, 1]}},
            "spec_ext",
            "give one source, not 2",
        ),
    ],
)
def test_wrong_options_name_the_field(
    extra_args: dict[str, Any], parameter: str, words: str
) -> None:
    with pytest.raises(RequestOptionError) as error:
        parse_request(InputCopyRequest, extra_args, "input_copy")
    assert error.value.parameter == parameter
    assert words in str(error.value)
    assert str(error.value).startswith(parameter)


def test_resolving_keeps_what_is_not_ours() -> None:
    given = {"spec_ext.source_span": [1, 3], "mine": {"a": 1}}
    assert resolve(SETTINGS, given, [5, 6, 7], None) == {
        "mine": {"a": 1},
        "spec_ext": {"source_span": [1, 3]},
    }
    assert given == {"spec_ext.source_span": [1, 3], "mine": {"a": 1}}


def test_resolving_checks_the_prompt_and_names_the_field_as_the_client_wrote_it() -> None:
    with pytest.raises(RequestOptionError, match="the prompt has 2 tokens") as error:
        resolve(SETTINGS, {"spec_ext.source_span": [1, 3]}, [5, 6], None)
    assert error.value.parameter == "spec_ext.source_span"


@pytest.mark.parametrize("given", [None, {}, {"mine": 1}, {GROUP_KEY: "forged", "mine": 1}])
def test_the_front_end_alone_says_who_shares(given: dict[str, Any] | None) -> None:
    mine = {name: value for name, value in (given or {}).items() if name == "mine"}
    assert parse_share_group(with_share_group(given, None)) is None
    assert with_share_group(given, None) == (mine or None)
    assert with_share_group(given, "real") == {**mine, GROUP_KEY: "real"}
    assert parse_share_group(with_share_group(given, "real")) == "real"
    assert not has_options(with_share_group(given, "real")), "no option, so nothing to resolve"


@pytest.mark.parametrize("group", [3, ["a"], None])
def test_what_is_no_group_shares_nothing(group: Any) -> None:
    assert parse_share_group({GROUP_KEY: group}) is None


def test_resolving_keeps_the_group() -> None:
    given = {"spec_ext.source_span": [1, 3], GROUP_KEY: "a"}
    assert parse_share_group(resolve(SETTINGS, given, [5, 6, 7], None)) == "a"
