# SPDX-License-Identifier: Apache-2.0
"""Training heads end to end on a tiny random Llama and a synthetic language, on the CPU."""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vllm_spec_ext.cli.train import train_app
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.blockwise_heads import load_heads
from vllm_spec_ext.training import blockwise, distill
from vllm_spec_ext.training.atomic import DiskFullError
from vllm_spec_ext.training.batches import split_data
from vllm_spec_ext.training.blockwise import main, train_blockwise
from vllm_spec_ext.training.draft_vocab import frequent_tokens
from vllm_spec_ext.training.heads_task import HeadsTask
from vllm_spec_ext.training.schema import BlockwiseTraining
from vllm_spec_ext.training.shards import (
    TokenSequence,
    open_manifest,
    read_data,
    shard_path,
    states_path,
    write_shard,
    write_states,
)

VOCAB = 48


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads cost more than they save on models this small, above all on a busy machine."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Llama with a word-level tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of a language in which every token follows from the one before."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    sequences = []
    for _ in range(60):
        text = [int(random.integers(2, VOCAB))]
        while len(text) < 24:
            text.append(2 + (text[-1] * 5 + 7) % (VOCAB - 2))
        sequences.append(TokenSequence(text, 3))
    open_manifest(
        folder,
        {"num_shards": 1, "prompts_per_shard": 60, "prompts_sha256": "x", "kind": "synthetic"},
    )
    write_shard(shard_path(folder, 0), sequences)
    return folder


def settings(target: Path, data: Path, out: Path, **changes: Any) -> BlockwiseTraining:
    """A short run."""
    facts: dict[str, Any] = {
        "model": str(target),
        "data": data,
        "out": out,
        "num_heads": 2,
        "head_width": 32,
        "max_steps": 30,
        "batch_size": 8,
        "positions_per_sequence": 10,
        "learning_rate": 0.01,
        "logit_chunk": 32,
        "eval_every": 1000,
        "device": "cpu",
    }
    return BlockwiseTraining.model_validate({**facts, **changes})


def quiet(line: str) -> None:
    """Ignore a progress line."""


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "random"},
        {"loss": "all", "condition_on_next": False, "block_diagonal": True},
    ],
)
def test_heads_learn(target: Path, data: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    out = tmp_path / "heads"
    config = settings(
        target, data, out, eval_every=50, log_every=10, max_steps=120, learning_rate=0.03, **changes
    )
    figures = train_blockwise(config, quiet)
    assert figures is not None
    assert all(head["top1"] > 0.8 for head in figures.accuracy)
    assert all(head["top5"] >= head["top2"] >= head["top1"] for head in figures.accuracy)
    assert figures.acceptance_length > 2.2
    assert figures.tree_acceptance_length >= figures.acceptance_length
    assert figures.position_acceptance > 2.2
    log = [json.loads(line) for line in (tmp_path / "heads.run/log.jsonl").read_text().splitlines()]
    assert log[-1]["loss1"] < 0.5 * log[0].get("loss1", log[1].get("loss1"))
    assert any("held_acceptance" in entry for entry in log)
    heads_config, _ = load_heads(out, hidden_size=32, vocab_size=VOCAB)
    assert heads_config.training["data"]["kind"] == "synthetic"
    assert load_file(out / "model.safetensors")["b_out"].dtype == torch.bfloat16
    run = json.loads((tmp_path / "heads.run/run.json").read_text())
    assert {"command", "versions", "revision", "settings", "data"} <= set(run)


def test_copies_teach_what_nothing_else_tells(target: Path, tmp_path: Path) -> None:
    """Random text that is repeated once: only the copy says how it goes on."""
    random = np.random.default_rng(1)
    texts = [random.integers(2, VOCAB, 12).tolist() * 2 for _ in range(60)]
    open_manifest(tmp_path / "data", {"num_shards": 1, "prompts_sha256": "x"})
    write_shard(shard_path(tmp_path / "data", 0), [TokenSequence(text, 13) for text in texts])
    found = []
    for copy_match in (0, 4):
        out = tmp_path / f"heads{copy_match}"
        config = settings(
            target, tmp_path / "data", out, max_steps=60, learning_rate=0.03, copy_match=copy_match
        )
        figures = train_blockwise(config, quiet)
        assert figures is not None
        found.append(figures.accuracy[1]["top1"])
    assert found[0] < 0.3
    assert found[1] > 0.7


def test_heads_learn_a_draft_vocabulary(target: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads"
    config = settings(target, data, out, draft_vocab=16, loss="all")
    figures = train_blockwise(config, quiet)
    assert figures is not None
    _, heads = load_heads(out)
    tokens = read_data(data)
    split = split_data(tokens, config.max_length, config.eval_sequences, config.seed)
    assert heads.draft_vocab is not None
    expected = frequent_tokens(tokens, split.train.tolist(), 16, VOCAB)
    assert torch.equal(heads.draft_vocab, expected)
    again = train_blockwise(settings(target, data, out, draft_vocab=16, stage="eval"), quiet)
    assert again is not None
    assert again.acceptance_length == pytest.approx(figures.acceptance_length, abs=0.1)  # bf16


def test_untrained_heads_measure_like_the_target_itself(
    target: Path, data: Path, tmp_path: Path
) -> None:
    config = settings(target, data, tmp_path / "h")
    model = blockwise.load_target(str(target), torch.device("cpu"), torch.float32)
    tokens = read_data(data)
    task = HeadsTask(config, model, tokens, blockwise.live_states(model))
    batch = task.plan.batch(0)
    seen = batch.seen(slice(None), torch.device("cpu"))
    drafts = task.heads(task.states(batch), seen, model.embed)
    assert torch.equal(drafts[:, 0], drafts[:, 1])
    figures = task.measure(tree_nodes=4)
    assert figures.num_sequences == len(task.split.held_out)
    assert figures.num_positions == 20 * figures.num_sequences  # positions 2 ... 21 of 24 tokens


@pytest.mark.parametrize("how", ["interrupted", "cached"])
def test_resumed_training_equals_uninterrupted(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    cached = how == "cached"
    whole = settings(target, data, tmp_path / "whole")
    train_blockwise(whole, quiet)
    parts = settings(target, data, tmp_path / "parts", log_every=7, cache_hidden=cached)
    seen: list[str] = []

    def interrupt(line: str) -> None:
        seen.append(line)
        if line.startswith("step 14/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_blockwise(parts, interrupt)
    assert "step 14 is saved" in seen[-1]
    assert not (tmp_path / "parts").exists()
    train_blockwise(parts.model_copy(update={"resume": "require"}), seen.append)
    assert any(line.startswith("resumed at step 14 of 30") for line in seen)
    expected = load_file(tmp_path / "whole/model.safetensors")
    found = load_file(tmp_path / "parts/model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (tmp_path / "parts.run/hidden").is_dir() == cached


def test_ctrl_c_in_mid_step_keeps_the_last_whole_state(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = HeadsTask.train_step

    def train_step(self: HeadsTask, step: int) -> dict[str, float]:
        if step == 9:
            raise KeyboardInterrupt
        return original(self, step)

    monkeypatch.setattr(HeadsTask, "train_step", train_step)
    config = settings(target, data, tmp_path / "h", save_every=5)
    with pytest.raises(KeyboardInterrupt):
        train_blockwise(config, quiet)
    state = torch.load(tmp_path / "h.run/state.pt", weights_only=True)
    assert state["step"] == 5


def test_full_disk_keeps_the_last_state_and_resumes(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(target, data, tmp_path / "h", save_every=10)
    original, calls = os.fsync, []

    def full_at_second_state(file: int) -> None:
        calls.append(file)
        if len(calls) == 3:  # run.json, state of step 10, state of step 20
            raise OSError(errno.ENOSPC, "No space left on device")
        original(file)

    monkeypatch.setattr(os, "fsync", full_at_second_state)
    with pytest.raises(DiskFullError, match=r"state.pt; everything written before is intact"):
        train_blockwise(config, quiet)
    assert torch.load(tmp_path / "h.run/state.pt", weights_only=True)["step"] == 10
    lines: list[str] = []
    assert train_blockwise(config, lines.append) is not None
    assert any(line.startswith("resumed at step 10") for line in lines)


def test_a_state_of_other_settings_is_refused(target: Path, data: Path, tmp_path: Path) -> None:
    config = settings(target, data, tmp_path / "h", max_steps=3)
    with pytest.raises(SpecExtError, match="drop the flag to start"):
        train_blockwise(config.model_copy(update={"resume": "require"}), quiet)
    train_blockwise(config, quiet)
    other = config.model_copy(update={"learning_rate": 0.5})
    with pytest.raises(
        SpecExtError, match=r"other settings \(learning_rate: 0.01 there, 0.5 asked"
    ):
        train_blockwise(other, quiet)
    train_blockwise(other.model_copy(update={"resume": "restart"}), quiet)
    (tmp_path / "h.run/state.pt").write_bytes(b"damaged")
    with pytest.raises(SpecExtError, match="cannot be read"):
        train_blockwise(other, quiet)


def test_finetuning_saves_another_model(target: Path, data: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    config = settings(
        target, data, tmp_path / "h", finetune=True, max_steps=40, target_learning_rate=0.003
    )
    train_blockwise(config, lines.append)
    changed = load_file(tmp_path / "h.run/model/model.safetensors")
    before = load_file(target / "model.safetensors")
    assert not torch.equal(changed["lm_head.weight"], before["lm_head.weight"])
    assert any("the target has changed" in line for line in lines)
    assert "fine-tuned" in (tmp_path / "h/README.md").read_text()
    log = [json.loads(line) for line in (tmp_path / "h.run/log.jsonl").read_text().splitlines()]
    assert log[-1]["lossown"] < log[0]["lossown"]


def test_dry_run_predicts_and_writes_nothing(target: Path, data: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    config = settings(target, data, tmp_path / "h", dry_run=True, cache_hidden=True)
    assert train_blockwise(config, lines.append) is None
    text = "\n".join(lines)
    assert "60 sequences, 1,440 tokens" in text
    assert "s a step, about" in text
    assert "MB for the saved state" in text
    assert "GB for cached hidden states" in text
    assert "for the hidden states, which are kept" in text
    (tmp_path / "p.txt").write_text("w2 w3\nw4\nw5\n")
    invented = config.model_copy(update={"data": None, "prompts": [tmp_path / "p.txt"]})
    train_blockwise(invented, lines.append)
    assert any("not made yet; 3 prompts" in line for line in lines)
    assert any("recorded while the data is generated" in line for line in lines)
    assert [p.name for p in tmp_path.iterdir()] == ["p.txt"]


def test_dry_run_knows_recorded_states(target: Path, data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    write_states(states_path(copy, 0), [np.zeros((21, 32), np.float32)] * 60)
    lines: list[str] = []
    train_blockwise(
        settings(target, copy, tmp_path / "h", dry_run=True, cache_hidden=True), lines.append
    )
    text = "\n".join(lines)
    assert "hidden states: recorded with the data" in text
    assert "which are kept" not in text
    assert "GB" not in text


class CountingGenerator:
    """Continues every prompt with three tokens; may fail at a given call."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.calls, self.fail_at = 0, fail_at

    def __call__(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        self.calls += 1
        if self.calls == self.fail_at:
            raise KeyboardInterrupt
        return [[ids[-1], 5, 0] for ids in prompts]


def test_data_goes_on_with_the_first_missing_shard(target: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({"prompt": f"w{i} w{i + 1}"}) + "\n" for i in range(2, 12))
    )
    config = settings(
        target, tmp_path / "d", tmp_path / "h", prompts=[tmp_path / "p.jsonl"], prompts_per_shard=3
    )
    tokenizer = blockwise.load_tokenizer(str(target))
    first, second, third = CountingGenerator(fail_at=3), CountingGenerator(), CountingGenerator()
    with pytest.raises(KeyboardInterrupt):
        distill.make_data(config, tokenizer, lambda: first, quiet)
    distill.make_data(config, tokenizer, lambda: second, quiet)
    assert second.calls == 2
    distill.make_data(config, tokenizer, lambda: third, quiet)
    assert third.calls == 0
    made = read_data(tmp_path / "d")
    assert len(made) == 10
    assert made.sequence(9).tolist() == [11, 12, 12, 5, 0]
    assert set(made.prompt_lengths) == {2}
    other = config.model_copy(update={"max_new_tokens": 9})
    with pytest.raises(SpecExtError, match="max_new_tokens: 256 there, 9 asked"):
        distill.make_data(other, tokenizer, lambda: third, quiet)


def test_all_stages_with_transformers_and_raw_text(target: Path, tmp_path: Path) -> None:
    lines = [" ".join(f"w{2 + (i * 7 + j * 3) % 40}" for j in range(6)) for i in range(12)]
    (tmp_path / "p.txt").write_text("\n".join(lines))
    distilled = settings(
        target,
        tmp_path / "d",
        tmp_path / "h",
        prompts=[tmp_path / "p.txt"],
        generator="transformers",
        max_new_tokens=12,
        max_steps=3,
    )
    figures = train_blockwise(distilled, quiet)
    assert figures is not None
    assert figures.target_agreement == 1.0  # greedy text of the target itself
    raw = distilled.model_copy(
        update={"raw_text": True, "data": tmp_path / "raw", "out": tmp_path / "r", "stage": "data"}
    )
    assert train_blockwise(raw, quiet) is None
    assert read_data(tmp_path / "raw").manifest["kind"] == "raw text"
    measured = train_blockwise(distilled.model_copy(update={"stage": "eval", "prompts": []}), quiet)
    assert measured is not None
    assert measured.num_positions == figures.num_positions


def test_foreign_token_ids_are_refused(target: Path, tmp_path: Path) -> None:
    open_manifest(tmp_path / "d", {"num_shards": 1})
    write_shard(shard_path(tmp_path / "d", 0), [TokenSequence([1, 2, 3, VOCAB], 1)] * 4)
    with pytest.raises(SpecExtError, match=r"token id 48, but .* has a vocabulary of 48"):
        train_blockwise(settings(target, tmp_path / "d", tmp_path / "h"), quiet)


def test_foreign_tokenizer_is_refused(target: Path, tmp_path: Path) -> None:
    open_manifest(tmp_path / "d", {"num_shards": 1, "tokenizer_fingerprint": "f" * 64})
    write_shard(shard_path(tmp_path / "d", 0), [TokenSequence([1, 2, 3, 4], 1)] * 4)
    with pytest.raises(SpecExtError, match="made with another tokenizer"):
        train_blockwise(settings(target, tmp_path / "d", tmp_path / "h"), quiet)


def test_command_lines(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from typer.testing import CliRunner

    flags = ["--model", str(target), "--data", str(data), "--out", str(tmp_path / "h")]
    flags += ["--dry-run", "--device", "cpu", "--head-width", "16"]
    assert main(flags) == 0
    assert "s a step" in capsys.readouterr().out
    assert main(["--model", "m"]) == 2
    assert "needs --out" in capsys.readouterr().err
    result = CliRunner().invoke(train_app, ["blockwise", *flags, "--no-condition-on-next"])
    assert result.exit_code == 0, result.output
    assert "s a step" in result.output
    assert "--num-heads" in CliRunner().invoke(train_app, ["blockwise", "--help"]).output
