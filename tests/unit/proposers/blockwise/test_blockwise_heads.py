# SPDX-License-Identifier: Apache-2.0
"""Blockwise heads: shapes, identity at the start, and checkpoints that are refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from unreadable_files import make_unreadable, said_to_be_unreadable

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.blockwise import heads as heads_module
from vllm_spec_ext.proposers.blockwise.heads import (
    BlockwiseHeads,
    HeadsConfig,
    TokensSeen,
    check_heads,
    load_heads,
)
from vllm_spec_ext.training.blockwise.checkpoint import default_head_width, save_heads
from vllm_spec_ext.training.blockwise.evaluate import HeadFigures
from vllm_spec_ext.training.hub import push_to_hub

FIGURES = HeadFigures(
    num_positions=10,
    num_sequences=2,
    target_agreement=1.0,
    accuracy=[{"top1": 0.5, "top2": 0.6, "top3": 0.7, "top5": 0.8}] * 3,
    position_acceptance=1.7,
    acceptance_length=1.8,
    tree_nodes=8,
    tree_acceptance_length=2.0,
)


def make_config(**changes: object) -> HeadsConfig:
    """Three small heads for a 16-wide target."""
    facts: dict[str, object] = {
        "target": "tiny",
        "hidden_size": 16,
        "vocab_size": 40,
        "tokenizer_fingerprint": "a" * 64,
        "num_heads": 3,
        "head_width": 8,
    }
    return HeadsConfig.model_validate({**facts, **changes})


EMBEDDING = torch.randn(40, 16, generator=torch.Generator().manual_seed(5))


def embed(token_ids: torch.Tensor) -> torch.Tensor:
    """The target's embedding."""
    return EMBEDDING[token_ids]


def seen(num_positions: int, num_heads: int = 3) -> TokensSeen:
    """Random tokens; the first position has no earlier place."""
    draw = torch.Generator().manual_seed(6)
    return TokensSeen(
        torch.randint(40, (num_positions,), generator=draw),
        torch.randint(40, (num_positions, num_heads), generator=draw),
        torch.arange(num_positions),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved heads folder with non-zero weights."""
    config = make_config()
    heads = BlockwiseHeads(config)
    torch.nn.init.normal_(heads.w_out)
    save_heads(tmp_path / "heads", config, heads, "bf16", FIGURES)
    return tmp_path / "heads"


@pytest.mark.parametrize("block_diagonal", [False, True])
@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize("copying", [{}, {"copy_match": 4}, {"copy_match": 4, "copy_map": True}])
def test_untrained_heads_predict_what_the_target_predicts(
    block_diagonal: bool, conditioned: bool, copying: dict[str, int]
) -> None:
    config = make_config(block_diagonal=block_diagonal, condition_on_next=conditioned, **copying)
    heads = BlockwiseHeads(config)
    hidden = torch.randn(5, 16)
    out = heads(hidden, seen(5), embed)
    assert out.shape == (5, 3, 16)
    assert torch.equal(out, hidden.unsqueeze(1).expand(5, 3, 16))
    assert sum(p.numel() for p in heads.parameters()) == config.num_parameters
    assert config.block_size == 4


def test_block_diagonal_heads_do_not_see_each_other() -> None:
    heads = BlockwiseHeads(make_config(block_diagonal=True))
    torch.nn.init.normal_(heads.w_out)
    hidden = torch.randn(4, 16)
    before = heads(hidden)
    with torch.no_grad():
        heads.w_in.weight[:8] += 1.0  # the hidden layer of head 0
    after = heads(hidden)
    assert not torch.allclose(before[:, 0], after[:, 0])
    assert torch.allclose(before[:, 1:], after[:, 1:])


@pytest.mark.parametrize("shown", ["condition_on_next", "copy_match"])
def test_heads_ignore_the_scale_of_embeddings(shown: str) -> None:
    heads = BlockwiseHeads(make_config(**{shown: 1}))
    torch.nn.init.normal_(heads.w_out)
    hidden = torch.randn(2, 16)

    def scaled(token_ids: torch.Tensor) -> torch.Tensor:
        return 24 * embed(token_ids)

    assert torch.allclose(heads(hidden, seen(2), embed), heads(hidden, seen(2), scaled), atol=1e-4)
    with pytest.raises(ValueError, match="missing"):
        heads(hidden)


@pytest.mark.parametrize("block_diagonal", [False, True])
def test_trusted_copies_are_drafted_where_there_are_any(block_diagonal: bool) -> None:
    heads = BlockwiseHeads(make_config(copy_match=4, block_diagonal=block_diagonal))
    with torch.no_grad():
        heads.copy_trust[:] = 100.0
    tokens = seen(5)
    hidden = torch.randn(5, 16)
    logits = heads(hidden, tokens, embed) @ (EMBEDDING / EMBEDDING.norm(dim=1, keepdim=True)).T
    assert tokens.copied is not None
    assert torch.equal(logits.argmax(-1)[1:], tokens.copied[1:])
    assert torch.equal(heads(hidden, tokens, embed)[0], hidden[:1].expand(3, 16))


@pytest.mark.parametrize("block_diagonal", [False, True])
def test_every_weight_does_what_it_says(block_diagonal: bool) -> None:
    """One position and one head at a time, written out."""
    config = make_config(
        copy_match=4, copy_map=True, condition_on_next=True, block_diagonal=block_diagonal
    )
    heads = BlockwiseHeads(config)
    for weight in heads.parameters():
        torch.nn.init.normal_(weight)
    hidden, tokens = torch.randn(5, 16), seen(5)
    assert tokens.copied is not None
    assert tokens.copied_length is not None
    found = heads(hidden, tokens, embed)

    def direction(token: int) -> torch.Tensor:
        return EMBEDDING[token] / EMBEDDING[token].square().mean().sqrt()

    for n in range(5):
        length = int(tokens.copied_length[n])
        copies = [direction(int(t)) * (length > 0) for t in tokens.copied[n]]
        inputs = torch.cat([hidden[n], direction(int(tokens.following[n])), copies[0]])
        inner = (heads.w_in(inputs) + heads.copy_bias[length]).relu()
        for i in range(3):
            own, size = slice(8 * i, 8 * i + 8), slice(16 * i, 16 * i + 16)
            out = inner[own] @ heads.w_out[i] if block_diagonal else inner @ heads.w_out[:, size]
            trust = inner[own] @ heads.copy_weight[i] + heads.copy_trust[length, i]
            expected = hidden[n] + out + heads.b_out[size]
            expected += trust * heads.copy_scale[i] * (copies[i] @ heads.copy_map)
            assert torch.allclose(found[n, i], expected, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("num_heads", [2, 4, 6, 8])
@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize("copying", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_default_width_keeps_smollm2_heads_at_about_8_mb(
    num_heads: int, conditioned: bool, copying: bool, dense: bool
) -> None:
    width = default_head_width(
        576, num_heads, dense=dense, conditioned=conditioned, copying=copying
    )
    config = make_config(
        hidden_size=576,
        num_heads=num_heads,
        head_width=width,
        block_diagonal=not dense,
        condition_on_next=conditioned,
        copy_match=8 if copying else 0,
    )
    # What heads with copies have beside the matrices is not in the budget.
    least, most = (6_500_000, 8_100_000) if copying else (7_000_000, 7_990_000)
    assert least < config.num_parameters * 2 < most


def test_round_trip(folder: Path) -> None:
    config, heads = load_heads(
        folder, hidden_size=16, vocab_size=40, fingerprint="a" * 64, num_draft_tokens=3
    )
    assert config.num_heads == 3
    assert heads.w_out.dtype == torch.float32
    assert not any(p.requires_grad for p in heads.parameters())
    assert config.training["acceptance_length"] == 1.8
    assert "1.80" in (folder / "README.md").read_text()


def test_reading_draws_nothing(folder: Path) -> None:
    """One rank of several may read other heads while all draw the same samples."""
    before = torch.get_rng_state()
    load_heads(folder)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_file_that_is_written_over_changes_no_heads_that_run(folder: Path) -> None:
    """As by ``cp``; and if it is cut, a process that has mapped it ends when it reads on."""
    config, heads = load_heads(folder)
    save_heads(folder, config, heads, "fp32", FIGURES)  # as they are kept in memory
    _, heads = load_heads(folder)
    before = {name: value.clone() for name, value in heads.state_dict().items()}
    file = folder / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(bytes(file.stat().st_size // 2))
    for name, value in heads.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"hidden_size": 32}, r"hidden size 16 \(the target has 32\).*serve the model"),
        ({"vocab_size": 41}, r"vocabulary of 40 \(the target has 41\)"),
        ({"fingerprint": "b" * 64}, "another tokenizer"),
        ({"num_draft_tokens": 4}, "holds 3 heads, but 4 draft tokens.*num_speculative_tokens to 3"),
    ],
)
def test_wrong_target_is_refused(folder: Path, asked: dict[str, object], message: str) -> None:
    with pytest.raises(SpecExtError, match=message):
        load_heads(folder, **asked)  # type: ignore[arg-type]


def test_damaged_and_missing_files_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecExtError, match="no such folder"):
        load_heads(tmp_path / "nowhere")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SpecExtError, match=r"model.safetensors is damaged"):
        load_heads(folder)
    weights.unlink()
    with pytest.raises(SpecExtError, match=r"no model.safetensors"):
        load_heads(folder)
    weights.write_bytes(whole)
    text = json.loads((folder / "config.json").read_text())
    changes: list[tuple[dict[str, object], str]] = [
        ({"head_width": 9}, "does not match config.json"),
        ({"head_width": 0}, "head_width"),
        (
            {"head_width": 10**6, "hidden_size": 10**6},
            "does not match config.json",
        ),  # more than there is memory
        ({"head_width": 10**12}, "head_width"),
        ({"format_version": 2}, "format_version"),
        ({"model_type": "llama"}, "not of the target"),
    ]
    for change, message in changes:
        (folder / "config.json").write_text(json.dumps({**text, **change}))
        with pytest.raises(SpecExtError, match=message):
            load_heads(folder)
    (folder / "config.json").write_text('{"model_type"')
    with pytest.raises(SpecExtError, match=r"config.json is damaged"):
        load_heads(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_files_that_cannot_be_read_are_not_called_damaged(name: str, folder: Path) -> None:
    """Nobody should train anew, or fetch again, what is whole."""
    make_unreadable(folder / name)
    with said_to_be_unreadable(folder / name):
        check_heads(folder)
    with said_to_be_unreadable(folder / name):
        load_heads(folder)


def test_values_that_are_not_finite_are_refused(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["b_out"][0] = float("nan")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(SpecExtError, match="b_out holds values that are not finite"):
        load_heads(folder)
    heads = BlockwiseHeads(make_config())
    torch.nn.init.constant_(heads.b_out, 1e9)
    with pytest.raises(SpecExtError, match=r"not finite in fp16.*--save-dtype bf16"):
        save_heads(tmp_path / "new", make_config(), heads, "fp16", FIGURES)
    assert not (tmp_path / "new").exists()


def test_draft_vocabulary_round_trip_and_refusal(tmp_path: Path) -> None:
    config = make_config(draft_vocab_size=3)
    heads = BlockwiseHeads(config)
    heads.draft_vocab = torch.tensor([1, 7, 39], dtype=torch.int32)
    save_heads(tmp_path, config, heads, "bf16", FIGURES)
    _, found = load_heads(tmp_path)
    assert found.draft_vocab is not None
    assert found.draft_vocab.dtype == torch.int32
    assert found.draft_vocab.tolist() == [1, 7, 39]
    assert "drafting the 3 most frequent tokens" in (tmp_path / "README.md").read_text()
    heads.draft_vocab[2] = 40
    save_heads(tmp_path, config, heads, "bf16", FIGURES)
    with pytest.raises(SpecExtError, match="outside the vocabulary of 40"):
        check_heads(tmp_path)
    heads.draft_vocab[2] = 7
    save_heads(tmp_path, config, heads, "bf16", FIGURES)
    with pytest.raises(SpecExtError, match="names a token more than once"):
        check_heads(tmp_path)


def test_damage_is_found_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    monkeypatch.setattr(heads_module, "_read_weights", lambda folder: 1 / 0)
    check_heads(folder)
    file.write_bytes(whole[:-10])
    with pytest.raises(SpecExtError, match=r"model.safetensors is damaged \("):
        check_heads(folder)
    weights = load(whole)
    save_file({**weights, "b_out": weights["b_out"][:-1].clone()}, file)
    with pytest.raises(SpecExtError, match=r"does not match config.json: found .*expected"):
        check_heads(folder)


def test_push_to_hub_uploads_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str]] = []

    class Api:
        def create_repo(self, repository: str, exist_ok: bool) -> None:
            calls.append(("create", repository))

        def upload_folder(self, repo_id: str, folder_path: str) -> str:
            calls.append((repo_id, folder_path))
            return "https://example.invalid/commit"

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert push_to_hub(folder, "me/heads").startswith("https://")
    assert calls == [("create", "me/heads"), ("me/heads", str(folder))]

    def refuse(self: Api, repository: str, exist_ok: bool) -> None:
        raise PermissionError("401")

    monkeypatch.setattr(Api, "create_repo", refuse)
    with pytest.raises(SpecExtError, match="the folder itself is complete"):
        push_to_hub(folder, "me/heads")
