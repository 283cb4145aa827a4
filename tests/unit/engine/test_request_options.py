# SPDX-License-Identifier: Apache-2.0
"""A request's options: both ways of writing them, and errors that name the field."""

import copy
import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_spec_ext.engine.requests.options import (
    GROUP_KEY,
    SESSION_KEY,
    check_form,
    collect,
    has_options,
    is_session,
    parse_request,
    parse_share_group,
    resolve,
    with_facts,
)
from vllm_spec_ext.errors import RequestOptionError
from vllm_spec_ext.proposers.base import RequestFacts, RequestLimits
from vllm_spec_ext.proposers.input_copy import InputCopy
from vllm_spec_ext.proposers.input_copy.options import InputCopyRequest
from vllm_spec_ext.scorers.options import TopKRule

SPAN = {"source_span": [1, 3]}

SETTINGS: Any = SimpleNamespace(method="input_copy", rule=None)  # what the front end knows of it


def facts(prompt: Sequence[int] = (5, 6, 7)) -> RequestFacts:
    return RequestFacts(prompt=np.array(prompt, np.int32), vocab_size=100, max_model_len=50)


FORM = partial(check_form, limits=RequestLimits(vocab_size=100, max_model_len=50))


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


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("source_text", "spec_ext.source_text"),
        ("max_draft_tokens", "spec_ext.max_draft_tokens"),
        ("specext", "spec_ext, or spec_ext.NAME"),
        ("spec-ext.enabled", "spec_ext, or spec_ext.NAME"),
        ("Spec_Ext", "spec_ext, or spec_ext.NAME"),
        ("spec_ext_enabled", "spec_ext, or spec_ext.NAME"),
        ("eta_cutof", "eta_cutoff"),
    ],
)
@pytest.mark.parametrize("check", [FORM, partial(resolve, facts=facts())])
def test_keys_that_are_nearly_ours_are_not_passed_over(
    name: str, meant: str, check: Callable[[Any, dict[str, Any]], object]
) -> None:
    assert has_options({name: 1})
    with pytest.raises(RequestOptionError, match=f"found '{name}', .*expected {meant}$") as error:
        check(SETTINGS, {name: 1})
    assert error.value.parameter == name


def test_eta_sampling_has_no_prefix() -> None:
    with pytest.raises(RequestOptionError, match="found a prefix, expected eta_cutoff alone"):
        resolve(SETTINGS, {"spec_ext.eta_cutoff": 0.1}, facts())


def test_resolving_keeps_what_is_not_ours() -> None:
    given = {"spec_ext.source_span": [1, 3], "mine": {"a": 1}}
    assert resolve(SETTINGS, given, facts()) == {
        "mine": {"a": 1},
        "spec_ext": {"source_span": [1, 3]},
    }
    assert given == {"spec_ext.source_span": [1, 3], "mine": {"a": 1}}


def test_resolving_checks_the_prompt_and_names_the_field_as_the_client_wrote_it() -> None:
    with pytest.raises(RequestOptionError, match="the prompt has 2 tokens") as error:
        resolve(SETTINGS, {"spec_ext.source_span": [1, 3]}, facts([5, 6]))
    assert error.value.parameter == "spec_ext.source_span"


@pytest.mark.parametrize("given", [None, {}, {"mine": 1}, {GROUP_KEY: "forged", "mine": 1}])
def test_the_front_end_alone_says_who_shares(given: dict[str, Any] | None) -> None:
    mine = {name: value for name, value in (given or {}).items() if name == "mine"}
    assert parse_share_group(with_facts(given, None)) is None
    assert with_facts(given, None) == (mine or None)
    assert with_facts(given, "real") == {**mine, GROUP_KEY: "real"}
    assert parse_share_group(with_facts(given, "real")) == "real"
    assert not has_options(with_facts(given, "real")), "no option, so nothing to resolve"


def test_the_front_end_alone_says_whose_input_is_streamed() -> None:
    forged = {SESSION_KEY: True, "mine": 1}
    assert is_session(forged)
    assert not is_session(with_facts(forged, None))
    assert is_session(with_facts({"mine": 1}, "real", is_session=True))
    assert not has_options(with_facts(None, None, is_session=True))
    assert not is_session({SESSION_KEY: 1})


@pytest.mark.parametrize("group", [3, ["a"], None])
def test_what_is_no_group_shares_nothing(group: Any) -> None:
    assert parse_share_group({GROUP_KEY: group}) is None


def test_resolving_keeps_the_group() -> None:
    given = {"spec_ext.source_span": [1, 3], GROUP_KEY: "a"}
    assert parse_share_group(resolve(SETTINGS, given, facts([5, 6, 7]))) == "a"


DEEP_LIST = "[" * 100_000
DEEP_OBJECT = '{"type":' * 100_000
NESTED = '{"type":' * 300 + "1" + "}" * 300  # deep, but JSON can be read


@pytest.mark.parametrize(
    ("extra_args", "parameter"),
    [
        ({"spec_ext.source_token_ids": [1, 100]}, "spec_ext.source_token_ids"),
        ({"spec_ext.source_token_ids": [2**40]}, "spec_ext.source_token_ids"),
        ({"spec_ext.source_token_ids": [-1]}, "spec_ext.source_token_ids"),
        ({"spec_ext.source_token_ids": [True]}, "spec_ext.source_token_ids"),
        ({"spec_ext": '{"source_token_ids": [true]}'}, "spec_ext.source_token_ids"),
        ({"spec_ext.source_token_ids": [1] * 1000}, "spec_ext.source_token_ids"),
        ({"spec_ext.source_token_ids": ["x"] * 1_000_000}, "spec_ext.source_token_ids"),
        ({"spec_ext.source_span": [0, 10**400]}, "spec_ext.source_span"),
        ({"spec_ext.source_span": [0, 10**5000]}, "spec_ext.source_span"),
        ({"spec_ext.source_span": list(range(1_000_000))}, "spec_ext.source_span"),
        ({"spec_ext.source_markers": ["a" * 2_000_000, "b"]}, "spec_ext.source_markers"),
        ({"spec_ext.max_draft_tokens": float("nan")}, "spec_ext.max_draft_tokens"),
        ({"spec_ext.max_draft_tokens": "9" * 1_000_000}, "spec_ext.max_draft_tokens"),
        ({"spec_ext.enabled": "x" * 1_000_000}, "spec_ext.enabled"),
        ({"spec_ext." + "x" * 1_000_000: 1}, "spec_ext.xxx"),
        ({"spec_ext.\ud800": 1}, "spec_ext.\\ud800"),
        ({"spec_ext": {"\ud800": 1}}, "spec_ext.\\ud800"),
        ({"spec_ext": {1: 2}}, "spec_ext"),
        ({"spec_ext.scorer": "x" * 1_000_000}, "spec_ext.scorer"),
        ({"spec_ext.scorer": DEEP_LIST}, "spec_ext.scorer"),
        ({"spec_ext.scorer": DEEP_OBJECT}, "spec_ext.scorer"),
        ({"spec_ext.scorer": DEEP_OBJECT[:7000]}, "spec_ext.scorer"),
        ({"spec_ext.scorer": NESTED}, "spec_ext.scorer"),
        ({"spec_ext.scorer": '{"k": NaN}'}, "spec_ext.scorer"),
        ({"spec_ext.scorer": '{"k": 1e999}'}, "spec_ext.scorer"),
        ({"spec_ext.scorer": '{"k": %s}' % ("9" * 4000)}, "spec_ext.scorer"),
        ({"spec_ext.scorer": '{"k": %s}' % ("9" * 5000)}, "spec_ext.scorer"),
        ({"spec_ext.scorer": '{"\\ud800": 1}'}, "spec_ext.scorer"),
        ({"spec_ext.scorer": {"k": 10**5000}}, "spec_ext.scorer"),
        ({"spec_ext.scorer": {"type": {"a": [1] * 1_000_000}}}, "spec_ext.scorer"),
        ({"spec_ext": DEEP_LIST}, "spec_ext"),
        ({"spec_ext": DEEP_OBJECT[:7000]}, "spec_ext"),
        ({"spec_ext": f'{{"scorer": {NESTED}}}'}, "spec_ext.scorer"),
        ({"spec_ext": '{"source_span": %s}' % ("[" * 500 + "]" * 500)}, "spec_ext.source_span"),
        ({"spec_ext": '{"max_draft_tokens": Infinity}'}, "spec_ext"),
        ({"spec_ext": '{"max_draft_tokens": %s}' % ("9" * 5000)}, "spec_ext"),
        ({"spec_ext": '{"source_text": "\\ud800"}'}, "spec_ext.source_text"),
        ({"spec_ext": " " * 10_000_000 + "{}"}, "spec_ext"),
        ({"eta_cutoff": float("nan")}, "eta_cutoff"),
        ({"eta_cutoff": "x" * 1_000_000}, "eta_cutoff"),
        ({"eta_cutoff": 0.1, "eta_alpha": 10**400}, "eta_alpha"),
        ({"eta_cutoff": 0.1, "eta_alpha": float("inf")}, "eta_alpha"),
    ],
)
def test_whatever_a_client_sends_is_an_answer_that_names_the_field(
    extra_args: dict[str, Any], parameter: str
) -> None:
    settings: Any = SimpleNamespace(method="input_copy", rule=TopKRule(k=3))
    with pytest.raises(RequestOptionError) as error:
        resolve(settings, extra_args, facts())
    assert error.value.parameter.startswith(parameter)
    assert str(error.value).startswith(parameter)
    assert len(str(error.value)) < 2500
    json.dumps(str(error.value), ensure_ascii=False).encode()


def test_large_numbers_arrive_as_numbers_that_travel() -> None:
    msgspec = pytest.importorskip("msgspec")
    given = {"spec_ext.max_draft_tokens": 10**30, "eta_cutoff": 0.1, "eta_alpha": 10**30}
    resolved = resolve(SETTINGS, given, facts())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(resolved)) == {
        "spec_ext": {"max_draft_tokens": 2**31 - 1},
        "eta_cutoff": 0.1,
        "eta_alpha": 1e30,
    }


@pytest.mark.parametrize(
    ("place", "check"),
    [
        (f"{check_form.__module__}.parse_options", FORM),
        (f"{InputCopy.__module__}.InputCopy.resolve_request", partial(resolve, facts=facts())),
    ],
    ids=["options' class", "method"],
)
def test_a_failure_that_nobody_thought_of_is_an_answer_too(
    place: str,
    check: Callable[[Any, dict[str, Any]], object],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(place, fail)
    with (
        caplog.at_level(logging.ERROR, "vllm.spec_ext"),
        pytest.raises(RequestOptionError) as error,
    ):
        check(SETTINGS, {"spec_ext.source_span": [0, 1]})
    assert error.value.parameter == "spec_ext.source_span"
    assert "ZeroDivisionError" in str(error.value)
    assert "secret" not in str(error.value)
    assert "secret" in caplog.text, "the reason is in the server's log"


def test_resolved_options_are_not_copied() -> None:
    """vLLM copies sampling parameters deeply on its event loop."""
    resolved = resolve(SETTINGS, {"spec_ext.source_token_ids": [1] * 200}, facts())
    assert copy.deepcopy(resolved)["spec_ext"] is resolved["spec_ext"]


def test_an_answer_of_one_token_is_not_remembered() -> None:
    """Beam search asks for one at each token of each beam, and drops the options it was given."""
    vllm = pytest.importorskip("vllm")
    from vllm_spec_ext.engine.requests.state import read_request

    for max_tokens in (1, 2):
        found = read_request(vllm.SamplingParams(max_tokens=max_tokens), SETTINGS, facts())
        assert found.options.remember is (max_tokens > 1)


def test_options_that_cannot_be_read_loosen_nothing() -> None:
    """They went around the front end: the server's relaxed rule is not what was asked for."""
    vllm = pytest.importorskip("vllm")
    from vllm_spec_ext.engine.requests.state import read_request

    relaxed: Any = SimpleNamespace(method="input_copy", rule=TopKRule(k=3))
    for given in ({"scorer": "exact", "typo": 1}, {"typo": 1}, {}):
        params = vllm.SamplingParams(extra_args={"spec_ext": given, "eta_cutoff": 0.01})
        found = read_request(params, relaxed, facts())
        assert (found.rule is not None and found.rule.is_strict) is bool(given)
        assert found.eta is not None
        assert found.eta.epsilon == 0.01


def test_a_session_that_may_end_where_it_repeats_itself_is_not_drafted_for() -> None:
    """Only vLLM's scheduler knows where that is, and it counts what was accepted behind it."""
    vllm = pytest.importorskip("vllm")
    from vllm.sampling_params import RepetitionDetectionParams

    from vllm_spec_ext.engine.requests.state import read_request

    detection = RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=3)
    for is_streamed in (False, True):
        params = vllm.SamplingParams(
            stop_token_ids=[7],
            repetition_detection=detection,
            extra_args=with_facts(None, None, is_session=is_streamed),
        )
        state = read_request(params, SETTINGS, facts())
        assert state.options.enabled is not is_streamed
        assert state.ends == {7}
        assert state.is_session == is_streamed
