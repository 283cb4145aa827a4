# SPDX-License-Identifier: Apache-2.0
"""Method specifications and settings of the benchmark."""

import json
from pathlib import Path
from typing import get_args

import pytest

from vllm_spec_ext.bench import methods, settings
from vllm_spec_ext.errors import SpecExtError, UnknownNameError


def test_a_name_stands_for_a_configuration() -> None:
    assert methods.parse_method("plain").config is None
    assert methods.parse_method("ngram").config == methods.VLLM_METHODS["ngram"]
    ours = methods.parse_method("input_copy")
    assert ours.config == {"method": "input_copy"}
    assert ours.ours
    assert not methods.parse_method("ngram").ours


def test_partial_settings_change_the_shorthand_and_full_ones_only_use_the_label() -> None:
    partial = methods.parse_method('ngram={"num_speculative_tokens": 8}')
    assert partial.config is not None
    assert partial.config["num_speculative_tokens"] == 8
    assert partial.config["prompt_lookup_max"] == 4
    full = methods.parse_method('mine={"method": "ngram", "num_speculative_tokens": 2}')
    assert full == methods.Method("mine", {"method": "ngram", "num_speculative_tokens": 2})
    relabelled = methods.parse_method('wide={"method": "input_copy", "max_ngram": 4}')
    assert relabelled.ours


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("=x", "has no name"),
        ("a={", "not JSON"),
        ("a=[1]", "must be an object"),
        ('plain={"k": 1}', "plain decoding has no settings; found k"),
        ("ngran", "Did you mean 'ngram'"),
        ('mine={"num_speculative_tokens": 3}', "unknown method: 'mine'"),
        ('input_copy={"max_ngrm": 3}', "Did you mean 'max_ngram'"),
        ('small={"method": "small_model"}', "model is missing; add it"),
    ],
)
def test_bad_specifications_say_what_is_wrong(text: str, expected: str) -> None:
    with pytest.raises(SpecExtError, match=expected.replace("(", r"\(")):
        methods.parse_method(text)


def test_a_method_of_vllm_that_needs_a_checkpoint_names_itself() -> None:
    for name in methods.CHECKPOINT_METHODS:
        found = methods.parse_method(f'{name}={{"model": "m", "num_speculative_tokens": 3}}')
        assert found.config == {"method": name, "model": "m", "num_speculative_tokens": 3}
        with pytest.raises(SpecExtError, match=f"method '{name}' drafts with a checkpoint"):
            methods.parse_method(name)
    with pytest.raises(SpecExtError, match='expected a "model" among them'):
        methods.parse_method('heads={"method": "medusa"}')
    for name in methods.OTHER_METHODS:
        assert methods.parse_method(name).config == {"method": name}


def test_vllms_names_are_those_of_the_installed_vllm() -> None:
    pytest.importorskip("vllm")
    from vllm.config.speculative import MTPModelTypes, SpeculativeMethod

    ours = {*methods.VLLM_METHODS, *methods.CHECKPOINT_METHODS, *methods.OTHER_METHODS}
    not_for_a_comparison = {"custom_class", "extract_hidden_states"}
    old_names_of_mtp = {*get_args(MTPModelTypes)} - {"mtp"}
    assert ours == {*get_args(SpeculativeMethod)} - not_for_a_comparison - old_names_of_mtp


def test_plain_is_added_and_comes_first() -> None:
    names = [m.name for m in methods.collect(["ngram", "input_copy"])]
    assert names == ["plain", "ngram", "input_copy"]
    assert [m.name for m in methods.collect(["ngram", "plain"])] == ["plain", "ngram"]


def test_the_grid_has_four_distinct_settings() -> None:
    grid = methods.collect([], grid=True)[1:]
    assert [m.name for m in grid] == [
        "ngram-1-3-k5",
        "ngram-1-3-k8",
        "ngram-2-4-k5",
        "ngram-2-4-k8",
    ]
    assert len({json.dumps(m.config) for m in grid}) == 4


def test_names_must_differ() -> None:
    with pytest.raises(SpecExtError, match="two methods are called 'ngram'"):
        methods.collect(["ngram", "ngram"])


def test_plain_decoding_may_come_again_to_show_the_noise() -> None:
    found = methods.collect(["ngram", "plain", 'again={"method": "plain"}'])
    assert [method.name for method in found] == ["plain", "again", "ngram"]


def test_flags_override_the_file_and_the_schema_is_strict() -> None:
    merged = settings.merge(
        {"model": "m", "repeats": 5, "max_tokens": 9}, {"repeats": 2, "seed": None}
    )
    assert (merged.repeats, merged.max_tokens, merged.seed) == (2, 9, 0)
    with pytest.raises(UnknownNameError, match="Did you mean 'repeats'"):
        settings.merge({"model": "m", "repeat": 5}, {})
    with pytest.raises(SpecExtError, match="no model given"):
        settings.merge({}, {})
    with pytest.raises(SpecExtError, match="dtype"):
        settings.merge({"model": "m", "dtype": "float8"}, {})
    with pytest.raises(SpecExtError, match="batch size 0"):
        settings.merge({"model": "m", "batch_size": [1, 0]}, {})


def test_methods_may_be_a_mapping() -> None:
    merged = settings.merge(
        {"model": "m", "methods": {"plain": None, "ngram": {"num_speculative_tokens": 3}}}, {}
    )
    plain, ngram = merged.all_methods()
    assert plain.config is None
    assert ngram.config is not None
    assert ngram.config["num_speculative_tokens"] == 3


def test_engine_arguments_win_over_the_benchmarks_own() -> None:
    merged = settings.merge({"model": "m", "batch_size": [1, 8]}, {"engine_args": {"seed": 3}})
    args = merged.llm_args()
    assert args["max_num_seqs"] == 8
    assert args["seed"] == 3


def test_engine_arguments_are_json_or_text() -> None:
    found = settings.parse_engine_args(
        ["--block-size=64", "quantization=fp8", "enforce_eager=True", 'hf_overrides={"a": 1}']
    )
    assert found == {
        "block_size": 64,
        "quantization": "fp8",
        "enforce_eager": True,
        "hf_overrides": {"a": 1},
    }
    with pytest.raises(SpecExtError, match="has no '='"):
        settings.parse_engine_args(["block_size"])
    with pytest.raises(SpecExtError, match="use --model or --method"):
        settings.parse_engine_args(["model=x"])
    with pytest.raises(SpecExtError, match=r"expected e\.g\. 1,8"):
        settings.parse_batch_sizes("1;8")


def test_setting_files(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: m\nmethods:\n  ngram: {num_speculative_tokens: 3}\n")
    (tmp_path / "a.json").write_text('{"model": "m"}')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "broken.yaml").write_text("a: [")
    assert settings.read_file(tmp_path / "a.yaml")["methods"]["ngram"] == {
        "num_speculative_tokens": 3
    }
    assert settings.read_file(tmp_path / "a.json") == {"model": "m"}
    for name, expected in [
        ("list.json", "holds a list"),
        ("broken.json", "is not JSON"),
        ("broken.yaml", "is not YAML"),
        ("none.json", "cannot read settings"),
    ]:
        with pytest.raises(SpecExtError, match=expected):
            settings.read_file(tmp_path / name)


@pytest.mark.parametrize("name", ["a.json", "a.yaml"])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"seed": ' + "1" * 5000 + "}", "{1: 2}"])
def test_settings_that_python_cannot_read(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecExtError):
        settings.merge({"model": "m", **settings.read_file(tmp_path / name)}, {})
