# SPDX-License-Identifier: Apache-2.0
"""Embedding and projection as the trainer reads them, against the model itself."""

from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.online.target_ends import check_target, read_ends, where_it_is

transformers = pytest.importorskip("transformers")


def save(folder: Path, **more: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        **more,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_size", ["1KB", "5GB"])
def test_both_ends_are_the_models_own(tied: bool, shard_size: str, tmp_path: Path) -> None:
    model = save(tmp_path / "whole", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "model", max_shard_size=shard_size)
    ends = read_ends(str(tmp_path / "model"), torch.device("cpu"))
    ids = torch.arange(31)
    assert torch.equal(ends.embed(ids), model.get_input_embeddings()(ids))
    rows, bias = ends.rows(torch.tensor([3, 7], dtype=torch.int32))
    assert torch.equal(rows, model.get_output_embeddings().weight[[3, 7]])
    assert bias is None
    assert (ends.projection is ends.embedding) == tied


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    save(tmp_path / "model", tie_word_embeddings=False)
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(SpecExtError, match=r"embed_tokens\.weight"):
        read_ends(str(tmp_path / "model"), torch.device("cpu"))
    with pytest.raises(SpecExtError, match="cannot read the configuration"):
        read_ends(str(tmp_path / "nothing"), torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "changes", "is_refused"),
    [
        ("Granite", {"logits_scaling": 8.0}, True),
        ("Granite", {"logits_scaling": 1.0}, False),
        ("Cohere", {"logit_scale": 0.0625}, True),
        ("Gemma2", {"final_logit_softcapping": 30.0, "head_dim": 4}, True),
        ("Gemma2", {"final_logit_softcapping": None, "head_dim": 4}, False),
    ],
)
def test_targets_that_change_their_logits_are_refused(
    kind: str, changes: dict[str, Any], is_refused: bool, tmp_path: Path
) -> None:
    shape = {"vocab_size": 31, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{kind}Config")(**shape, **heads, **special, **changes)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(tmp_path)
    if not is_refused:
        read_ends(str(tmp_path), torch.device("cpu"))
        return
    with pytest.raises(SpecExtError, match=rf"{next(iter(changes))}=.*Leave online out"):
        read_ends(str(tmp_path), torch.device("cpu"))


@pytest.mark.parametrize("kind", ["Llava", "Qwen2VL", "Idefics3"])
def test_models_around_a_language_model_are_refused(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")()
    with pytest.raises(SpecExtError, match=r"target 'seer' is of the type .*Leave online out"):
        check_target("seer", config)


def test_a_revision_is_read_where_the_engine_found_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def find(model: str, **given: Any) -> str:
        asked.append({"model": model, **given})
        if given["revision"] == "gone":
            raise FileNotFoundError(model)
        return "snapshot"

    monkeypatch.setattr("huggingface_hub.snapshot_download", find)
    assert where_it_is("org/model", None, None) == "org/model"
    assert where_it_is(str(tmp_path), "v2", None) == str(tmp_path)
    assert not asked
    assert where_it_is("org/model", "v2", "cache") == "snapshot"
    assert asked == [
        {"model": "org/model", "revision": "v2", "cache_dir": "cache", "local_files_only": True}
    ]
    assert where_it_is("org/model", "gone", None) == "org/model"
