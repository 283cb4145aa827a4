# SPDX-License-Identifier: Apache-2.0
"""Wrong settings are refused with a clear message before any weight is loaded."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from generation import sampling_params
from save_drafts import save_draft
from tiny_model import build_tiny_model

from vllm_spec_ext import compat
from vllm_spec_ext.engine.models import draft_config, memory_check
from vllm_spec_ext.engine.starting import limits
from vllm_spec_ext.errors import (
    IncompatibleVLLMError,
    SpecExtError,
    UnknownNameError,
    UnsupportedError,
)
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import ModelSpec
from vllm_spec_ext.proposers.blockwise.heads import HeadsConfig


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Nothing in this file may come as far as an engine, unless it asks for one."""
    if "make_engine" in request.fixturenames:
        return
    from vllm.v1.engine.core_client import EngineCoreClient

    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail("an engine was started for settings that should have been refused")

    monkeypatch.setattr(EngineCoreClient, "make_client", refuse)


def start(model: Path, speculative: Any, **arguments: Any) -> Any:
    from vllm import LLM

    defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128}
    return LLM(model=str(model), speculative_config=speculative, **{**defaults, **arguments})


def method(**options: Any) -> dict[str, Any]:
    return {"method": "input_copy", **options}


@pytest.mark.parametrize(
    ("speculative", "kind", "words"),
    [
        ({"method": "input_copi"}, UnknownNameError, "Did you mean 'input_copy'?"),
        ({"method": "input-copy"}, UnknownNameError, "Did you mean 'input_copy'?"),
        (method(max_ngam=3), UnknownNameError, "Did you mean 'max_ngram'?"),
        (method(num_speculative_token=3), UnknownNameError, "'num_speculative_tokens'"),
        (method(model="x"), UnknownNameError, "unknown option of input_copy: 'model'"),
        (method(max_ngram=99), SpecExtError, "max_ngram: .*less than or equal to 64; found 99"),
        (method(match="first"), SpecExtError, "match: .*found 'first'"),
        (method(also_output="perhaps"), SpecExtError, "also_output: .*found 'perhaps'"),
        (method(near=None), SpecExtError, "near: .*found None"),
        (method(min_ngram=9, max_ngram=3), SpecExtError, "lower min_ngram"),
        (method(num_speculative_tokens=0), SpecExtError, "found 0, expected 1 to 128"),
        (method(num_speculative_tokens=129), SpecExtError, "found 129, expected 1 to 128"),
        (method(num_speculative_tokens="8"), SpecExtError, "found '8', expected an integer"),
        (method(num_speculative_tokens=True), SpecExtError, "found True, expected an integer"),
        (method(target_layer_ids=[1, 2]), UnknownNameError, "option of input_copy: 'target_layer"),
        (method(rejection_sample_method="block"), SpecExtError, "its own drafters only"),
    ],
)
def test_bad_settings(
    speculative: dict[str, Any], kind: type[Exception], words: str, tiny_model: Path
) -> None:
    with pytest.raises(kind, match=words):
        start(tiny_model, speculative)


def test_a_length_is_given_once(tiny_model: Path) -> None:
    """With hyphens or underscores."""
    for key in ("num_speculative_tokens", "num-speculative-tokens"):
        with pytest.raises(SpecExtError, match="found 4 in speculative_config and 8 in --spec-tok"):
            start(tiny_model, {"method": "input_copy", key: 4}, spec_tokens=8)


def save_heads_of_another_model(folder: Path) -> dict[str, Any]:
    """Heads whose configuration can be read, of a model like none here; no weights."""
    config = HeadsConfig(target="another", hidden_size=64, vocab_size=99, num_heads=2, head_width=8)
    folder.mkdir()
    (folder / "config.json").write_text(config.model_dump_json())
    (folder / "model.safetensors").touch()
    return {"method": "blockwise", "model": str(folder)}


def test_files_that_do_not_belong_to_the_target(tiny_model: Path, tmp_path: Path) -> None:
    heads = save_heads_of_another_model(tmp_path / "heads")
    with pytest.raises(
        SpecExtError, match=r"does not fit the target.* hidden size 64 .*vocabulary"
    ):
        start(tiny_model, heads)
    with pytest.raises(SpecExtError, match=r"no such folder: .*/none"):
        start(tiny_model, heads | {"model": str(tmp_path / "none")})
    (tmp_path / "heads/model.safetensors").unlink()
    with pytest.raises(SpecExtError, match=r"no model.safetensors in "):
        start(tiny_model, heads)
    (tmp_path / "heads/config.json").write_text("{")
    with pytest.raises(SpecExtError, match=r"config.json is damaged"):
        start(tiny_model, heads)
    corpus = tmp_path / "trigrams.vsx"
    corpus.write_bytes(b"no store")
    with pytest.raises(SpecExtError, match="cannot use n-gram store"):
        start(tiny_model, {"method": "adaptive_ngram", "corpus": str(corpus)})


def test_a_proposer_without_a_default_length(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_spec_ext.proposers.base import BaseProposer, proposer

    class Short(BaseProposer):
        """Drafts nothing."""

    monkeypatch.setitem(registry.BUILTIN, "short", f"{__name__}:Short")
    monkeypatch.setattr(
        "test_bad_input.Short", proposer("short", summary="x")(Short), raising=False
    )
    with pytest.raises(SpecExtError, match='add "num_speculative_tokens": N with 1 <= N <= 128'):
        start(tiny_model, {"method": "short"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"worker_cls": "my.Worker"}, "worker_cls='my.Worker'.*leave --worker-cls out"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2.*use tensor parallelism"),
        pytest.param(
            {"async_scheduling": True},
            "leave --async-scheduling out",
            marks=pytest.mark.v1_runner,  # V2 can
        ),
        ({"runner": "pooling"}, "runner type 'pooling'"),
        ({"logits_processors": ["my:Processor"]}, "custom logits processors"),
        ({"watermark_config": {"algorithm": "gumbel", "key": 1}}, "--watermark-config"),
        ({"return_sampling_mask": True}, "return_sampling_mask"),
        ({"enable_trace_replay": True}, "--enable-trace-replay"),
    ],
)
def test_what_our_methods_do_not_work_with(
    arguments: dict[str, Any], words: str, tiny_model: Path
) -> None:
    with pytest.raises(UnsupportedError, match=f"input_copy does not work with .*{words}"):
        start(tiny_model, method(), **arguments)


def test_encoder_decoder_and_hybrid_models(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import ModelConfig

    for name, words in (("is_encoder_decoder", "an encoder-decoder"), ("is_hybrid", "a hybrid")):
        with monkeypatch.context() as patch:
            patch.setattr(ModelConfig, name, property(lambda self: True))
            with pytest.raises(UnsupportedError, match=words):
                _speculative_config(tiny_model)


@pytest.mark.v1_runner
def test_every_reason_is_given_at_once(tiny_model: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"my\.Worker.*; nor with .*async_scheduling"):
        start(tiny_model, method(), worker_cls="my.Worker", async_scheduling=True)


def _speculative_config(model: Path, speculative: Any = None, **parallel: Any) -> Any:
    """Only the wrapped step, for models that vLLM itself would refuse earlier or build slowly."""
    from vllm.engine.arg_utils import EngineArgs

    speculative = speculative or method()
    args = EngineArgs(model=str(model), speculative_config=speculative, max_model_len=128)
    config = EngineArgs(model=str(model), max_model_len=128).create_engine_config()
    config.parallel_config.worker_cls = "auto"  # as the user left it
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    return args.create_speculative_config(config.model_config, config.parallel_config)


def test_vllm_without_a_hook(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = compat.Hook("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.is_gone", "test")
    monkeypatch.setattr(compat, "HOOKS", (*compat.HOOKS, gone))
    compat.require.cache_clear()
    try:
        with pytest.raises(IncompatibleVLLMError) as error:
            start(tiny_model, method())
    finally:
        compat.require.cache_clear()
    for words in ("lacks what vllm-spec-ext relies on", "is_gone", "0.32", "Fix: pip install"):
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"source_span": [0, 4000]}, "spec_ext.source_span", "but the prompt has"),
        ({"source_span": [4, 4]}, "spec_ext.source_span", "empty or negative"),
        ({"source_span": "all"}, "spec_ext.source_span", "found 'all'"),
        ({"source_markers": ["<none>", "<none>"]}, "spec_ext.source_markers", "does not occur"),
        ({"source_token_ids": [1, "x"]}, "spec_ext.source_token_ids", "found 'x'"),
        ({"source_token_ids": [1, 512]}, "spec_ext.source_token_ids", "the model has 512 tokens"),
        (
            {"source_token_ids": [2**40]},
            "spec_ext.source_token_ids",
            "found token id 1099511627776",
        ),
        ({"source_token_ids": [1] * 641}, "spec_ext.source_token_ids", "at most 640 with"),
        ({"source_text": "a b " * 2000}, "spec_ext.source_text", "at most 5120 with"),
        ({"max_draft_tokens": -3}, "spec_ext.max_draft_tokens", "found -3"),
        ({"source_txt": "a"}, "spec_ext.source_txt", "Did you mean 'source_text'"),
    ],
)
def test_wrong_requests_are_refused_and_the_engine_goes_on(
    options: dict[str, Any], field: str, words: str, make_engine: Any
) -> None:
    from vllm.exceptions import VLLMValidationError

    engine = make_engine(speculative_config={"method": "input_copy", "num_speculative_tokens": 16})
    prompt = "one two three four one two"
    for extra_args in ({"spec_ext": options}, {f"spec_ext.{k}": v for k, v in options.items()}):
        params = sampling_params({"max_tokens": 3})
        params.extra_args = extra_args
        with pytest.raises(VLLMValidationError, match=words) as error:
            engine.generate(prompt, params, use_tqdm=False)
        assert error.value.parameter == field
        assert params.extra_args == extra_args
    (out,) = engine.generate(prompt, sampling_params({"max_tokens": 3}), use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 3


def configured(model: Path, speculative: Any, usage: Any = None, **arguments: Any) -> Any:
    """All that happens before weights load; ``usage`` as vLLM's ``UsageContext``."""
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(
        model=str(model), speculative_config=speculative, max_model_len=128, **arguments
    )
    return args.create_engine_config(usage)


@pytest.mark.parametrize("override", [{}, {"min_p": 0}])
def test_a_model_whose_requests_would_all_be_refused(
    override: dict[str, Any],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # vLLM's loggers pass nothing on to the root logger, where caplog listens.
    monkeypatch.setattr(limits, "logger", logging.getLogger("limits"))
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"min_p": 0.05}')
    with caplog.at_level("WARNING"):
        configured(folder, method(), override_generation_config=override)
    said = "set min_p to 0.05, which vLLM refuses" in caplog.text
    assert said == (not override)


LORA = {"enable_lora": True, "max_lora_rank": 8}


def test_drafts_beside_adapters_have_room_in_a_step(tiny_model: Path) -> None:
    """vLLM wants it, and says neither how much nor by which of the settings."""
    from vllm.usage.usage_lib import UsageContext

    asked = {"method": "input_copy", "num_speculative_tokens": 24}
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 256}

    def drafted(
        speculative: dict[str, Any], usage: UsageContext | None = None, **arguments: Any
    ) -> int:
        config = configured(tiny_model, speculative, usage, **LORA, **arguments)
        return int(config.speculative_config.num_speculative_tokens)

    auto, offline = {"method": "auto"}, UsageContext.LLM_CLASS
    assert drafted(auto) == 15  # of 2,048 tokens and 128 requests
    assert drafted(auto, max_num_seqs=256) == 7
    assert drafted(auto, offline, max_num_seqs=256) == 15  # of 4,096 tokens
    assert drafted(auto, offline, max_num_batched_tokens=2048) == 7  # and 256 requests
    fast = {"performance_mode": "throughput"}
    assert drafted(auto, offline, max_num_batched_tokens=2048, **fast) == 3
    assert drafted({**auto, "num_speculative_tokens": 20}, offline, max_num_seqs=256, **fast) == 20
    assert drafted(auto, **sizes) == 15
    assert drafted(auto, max_num_seqs=4) == 32  # its default
    assert drafted(asked, **{**sizes, "max_num_seqs": 8}) == 24
    words = r"found max_num_seqs=16, num_speculative_tokens=24 and max_num_batched_tokens=256, "
    words += r"expected at least 400 .*--max-num-seqs to 10, or lower num_speculative_tokens to 15"
    with pytest.raises(UnsupportedError, match=words):
        drafted(asked, **sizes)
    with pytest.raises(UnsupportedError, match="expected at least 32 of these"):
        drafted(auto, max_num_seqs=16, max_num_batched_tokens=31)
    words = r"raise --max-num-batched-tokens, or lower num_speculative_tokens to 3$"
    with pytest.raises(UnsupportedError, match=words):
        drafted(asked, max_num_seqs=4, max_num_batched_tokens=16)


def with_models(*folders: Path | str) -> dict[str, Any]:
    return {"method": "model_paths", "models": [str(folder) for folder in folders]}


def nothing(target: Path, folder: Path) -> None:
    """No such folder."""


def empty(target: Path, folder: Path) -> None:
    folder.mkdir()


def damaged(target: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{")


def without_weights(target: Path, folder: Path) -> None:
    save_draft(target, folder)
    (folder / "model.safetensors").unlink()


def without_a_shard(target: Path, folder: Path) -> None:
    save_draft(target, folder)
    index = {"weight_map": {"x": "model.safetensors", "y": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def other_tokenizer(target: Path, folder: Path) -> None:
    build_tiny_model(folder, thinks=True)


def without_tokenizer(target: Path, folder: Path) -> None:
    save_draft(target, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def with_a_window(target: Path, folder: Path) -> None:
    kind: dict[str, Any] = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    save_draft(target, folder, sliding_window=16, **kind)


DRAFTS: list[tuple[Callable[[Path, Path], None], str]] = [
    (nothing, "no such folder: .*/draft.*Hugging Face's layout"),
    (empty, "no config.json in .*/draft"),
    (damaged, "cannot be used: .*expected a model that vLLM can run"),
    (without_weights, r"found no weights in .*expected \*\.safetensors"),
    (without_a_shard, r"found no model-2.safetensors in .*files that its index lists"),
    (other_tokenizer, "another tokenizer: [0-9]+ of [0-9]+ ids mean something else"),
    (without_tokenizer, "found no tokenizer in .*copy the target's tokenizer files there"),
    (with_a_window, "the draft has .*expected full attention"),
]


@pytest.mark.parametrize(("make", "words"), DRAFTS, ids=lambda part: getattr(part, "__name__", ""))
def test_draft_models_that_cannot_work(
    make: Callable[[Path, Path], None], words: str, tiny_model: Path, tmp_path: Path
) -> None:
    make(tiny_model, tmp_path / "draft")
    with pytest.raises(SpecExtError, match=f"draft model draft1(: | .*){words}"):
        start(tiny_model, with_models(tiny_model, tmp_path / "draft"))


def test_windows_that_are_switched_off(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the draft, too, whose configuration names them layer by layer."""
    monkeypatch.setattr(f"{draft_config.__name__}.logger", logging.getLogger("plain"))
    with_a_window(tiny_model, tmp_path / "plain")
    save_draft(
        tiny_model,
        tmp_path / "mixed",
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    for name in ("plain", "mixed"):
        config = with_models(tmp_path / name)
        words = r"the draft has .*--disable-sliding-window: then it reads texts of up to 16 tokens"
        with pytest.raises(UnsupportedError, match=words):
            configured(tiny_model, config)
        caplog.clear()
        assert configured(tiny_model, config, disable_sliding_window=True)
        assert "reads at most 16 tokens" in caplog.text
        assert "what is longer is not drafted for" in caplog.text


def test_a_draft_model_that_generates_nothing(tiny_model: Path, tmp_path: Path) -> None:
    heads = save_heads_of_another_model(tmp_path / "heads")
    with pytest.raises(SpecExtError, match=r"draft model draft0 .*(cannot be used|does not work)"):
        start(tiny_model, with_models(heads["model"]))


def test_heads_that_do_not_divide_by_the_ranks(tiny_model: Path, tmp_path: Path) -> None:
    draft = save_draft(
        tiny_model,
        tmp_path / "draft",
        num_attention_heads=3,
        num_key_value_heads=3,
        hidden_size=96,
        intermediate_size=255,
    )
    words = "found 3 attention heads.*tensor_parallel_size=2.*intermediate size of 255"
    with pytest.raises(UnsupportedError, match=words):
        start(tiny_model, with_models(draft), tensor_parallel_size=2)


def test_too_little_memory_for_two_models(tiny_model: Path) -> None:
    """32 tokens of 3 layers, 2 heads of 32, keys and values in float32: 49,152 bytes a model."""
    words = "too little KV cache for 2 draft.*kv_cache_memory_bytes=1000000.*takes 147456 bytes"
    with pytest.raises(SpecExtError, match=words):
        start(
            tiny_model,
            with_models(tiny_model, tiny_model),
            kv_cache_memory_bytes=1_000_000,
            block_size=32,
            max_num_seqs=4,
        )


def test_quantized_kv_takes_less_memory(tiny_model: Path) -> None:
    sizes = {"kv_cache_memory_bytes": 400_000, "block_size": 32, "max_num_seqs": 2}
    config = with_models(tiny_model)
    with pytest.raises(SpecExtError, match="takes 49152 bytes"):
        configured(tiny_model, config, **sizes)
    assert configured(tiny_model, config, **sizes, kv_cache_dtype="fp8")


def test_the_target_says_how_the_kv_of_its_drafts_is_quantized(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = f"{memory_check.__name__}.resolve_kv_cache_dtype_string"
    monkeypatch.setattr(
        resolve, lambda given, model: "fp8" if Path(model.model) == tiny_model else given
    )
    sizes = {"kv_cache_memory_bytes": 300_000, "block_size": 32, "max_num_seqs": 2}
    assert configured(tiny_model, with_models(save_draft(tiny_model, tmp_path / "d")), **sizes)


def test_weights_that_are_elsewhere_take_less(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "get_device_total_memory", lambda: 3_000_000)
    config = with_models(tiny_model, tiny_model)
    assert configured(tiny_model, config, block_size=32, cpu_offload_gb=1)


def test_too_little_memory_at_all(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "get_device_total_memory", lambda: 3_000_000)
    with pytest.raises(SpecExtError, match=r"too little memory for 2 draft .*of weights"):
        start(tiny_model, with_models(tiny_model, tiny_model), block_size=32)


def test_kinds_of_targets_and_ranks_that_draft_models_cannot_join(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import ModelConfig

    for name, words in (
        ("use_mla", "the draft has latent attention"),
        ("is_multimodal_model", "the draft is multi-modal"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(ModelConfig, name, property(lambda self: self.runner_type == "draft"))
            with pytest.raises(UnsupportedError, match=words):
                _speculative_config(tiny_model, with_models(tiny_model))
    with monkeypatch.context() as patch:
        patch.setattr(ModelConfig, "is_moe", property(lambda self: True))
        with pytest.raises(UnsupportedError, match="data_parallel_size=2 with a mixture"):
            _speculative_config(tiny_model, with_models(tiny_model), data_parallel_size=2)


def test_two_draft_models_of_one_name(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from model_drafters import ModelPaths

    twice = [ModelSpec("same", str(tiny_model))] * 2
    monkeypatch.setattr(ModelPaths, "models", classmethod(lambda cls, options: twice))
    with pytest.raises(SpecExtError, match=r"names .'same', 'same'., expected different ones"):
        start(tiny_model, with_models(tiny_model))
