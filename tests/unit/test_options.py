# SPDX-License-Identifier: Apache-2.0
"""Option schemas: strict, frozen, documented, with errors a user can act on."""

from typing import Any

import pytest
from pydantic import ValidationError

from vllm_spec_ext.errors import SpecExtError, UnknownNameError
from vllm_spec_ext.options import MethodOptions, Options, parse_options
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.adaptive_ngram.options import AdaptiveNgramOptions
from vllm_spec_ext.proposers.input_copy.options import InputCopyOptions, InputCopyRequest
from vllm_spec_ext.scorers.options import EtaOptions
from vllm_spec_ext.scorers.registry import RULES


def all_schemas() -> list[type[Options]]:
    infos = [registry.info(name) for name in registry.BUILTIN]
    methods = {schema for info in infos for schema in (info.options, info.request_options)}
    rules = {rule.options for rule in RULES.values()} | {EtaOptions}
    return sorted(methods | rules, key=lambda schema: schema.__name__)


@pytest.mark.parametrize("schema", all_schemas())
def test_every_option_is_documented_and_bounded_by_a_type(schema: type[Options]) -> None:
    for name, field in schema.model_fields.items():
        if name == "type":
            continue  # the tag that tells the rules apart
        assert field.description, f"{schema.__name__}.{name}"
    assert schema.model_config["frozen"]
    assert schema.model_config["extra"] == "forbid"


def test_defaults_are_valid_and_frozen() -> None:
    options = parse_options(InputCopyOptions, {}, "input_copy")
    assert options == InputCopyOptions()
    with pytest.raises(ValidationError):
        options.max_ngram = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_ngam": 3}, "Did you mean 'max_ngram'?"),
        ({"zzz": 3}, "Valid: adaptive_length, also_output,"),
        ({"max_ngram": 0}, "max_ngram: Input should be greater than or equal to 1; found 0"),
        ({"max_ngram": 65}, "less than or equal to 64; found 65"),
        ({"max_ngram": "many"}, "found 'many'"),
        ({"max_ngram": 2.5}, "found 2.5"),
        ({"match": "first"}, "'unique', 'latest' or 'best'; found 'first'"),
        ({"min_ngram": 5, "max_ngram": 3}, "min_ngram=5 is above max_ngram=3; lower min_ngram"),
        ({"near": -1, "growth": -1}, "near: "),
    ],
)
def test_bad_options_of_a_method(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecExtError) as error:
        parse_options(InputCopyOptions, given, "input_copy")
    assert words in str(error.value)
    assert "input_copy" in str(error.value)


def test_every_wrong_field_is_named_at_once() -> None:
    with pytest.raises(SpecExtError, match=r"near: .*; growth: "):
        parse_options(InputCopyOptions, {"near": -1, "growth": -1}, "input_copy")


def test_unknown_names_carry_the_name() -> None:
    with pytest.raises(UnknownNameError) as error:
        parse_options(InputCopyOptions, {"matsch": "best"}, "input_copy")
    assert error.value.name == "matsch"
    assert "'match'" in str(error.value)


def test_a_renamed_option_is_refused_with_its_new_name() -> None:
    with pytest.raises(UnknownNameError, match="now called 'adaptive_length'"):
        parse_options(InputCopyOptions, {"pays": False}, "input_copy")


def test_every_method_adapts_its_length_but_the_published_preset() -> None:
    assert MethodOptions().adaptive_length
    assert AdaptiveNgramOptions().adaptive_length
    assert not AdaptiveNgramOptions(preset="aded_reference").adaptive_length


def test_one_source_a_request() -> None:
    with pytest.raises(SpecExtError, match="give one source, not 2: source_span, source_text"):
        parse_options(InputCopyRequest, {"source_span": (0, 1), "source_text": "x"}, "a request")
