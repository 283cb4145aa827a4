# SPDX-License-Identifier: Apache-2.0
"""Training heads end to end on a tiny random Llama and a synthetic language, on the CPU."""

import errno
import json
import os
import shutil
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_language import VOCAB, save_random_llama, save_word_tokenizer, write_texts

from vllm_spec_ext.atomic import DiskFullError
from vllm_spec_ext.cli.train import train_app
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.fingerprint import tokenizer_fingerprint
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.blockwise.heads import load_heads
from vllm_spec_ext.training import distill, loop
from vllm_spec_ext.training.batches import split_data
from vllm_spec_ext.training.blockwise import checkpoint, trainer
from vllm_spec_ext.training.blockwise.heads_task import HeadsTask, heads_config
from vllm_spec_ext.training.blockwise.schema import BlockwiseTraining
from vllm_spec_ext.training.blockwise.tokens_seen import tokens_seen
from vllm_spec_ext.training.blockwise.trainer import main, train_blockwise
from vllm_spec_ext.training.draft_vocab import frequent_tokens
from vllm_spec_ext.training.hidden import live_states
from vllm_spec_ext.training.record_states import METHOD
from vllm_spec_ext.training.shards import (
    TokenSequence,
    open_manifest,
    read_data,
    shard_path,
    states_path,
    write_shard,
    write_states,
)
from vllm_spec_ext.training.target import load_target, load_tokenizer


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
    folder = save_random_llama(
        tmp_path_factory.mktemp("target"),
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    save_word_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of texts."""
    return write_texts(tmp_path_factory.mktemp("data"))


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
    ("changes", "accuracy", "tokens"),
    [
        ({"loss": "random"}, 0.8, 2.2),
        # Random targets hardly tell the tokens of unknown texts apart.
        ({"loss": "all", "condition_on_next": False, "block_diagonal": True}, 0.5, 1.7),
    ],
)
def test_heads_learn(
    target: Path,
    data: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    accuracy: float,
    tokens: float,
) -> None:
    out = tmp_path / "heads"
    config = settings(
        target, data, out, eval_every=50, log_every=10, max_steps=120, learning_rate=0.03, **changes
    )
    figures = train_blockwise(config, quiet)
    assert figures is not None
    assert all(head["top1"] > accuracy for head in figures.accuracy)
    assert all(head["top5"] >= head["top2"] >= head["top1"] for head in figures.accuracy)
    assert figures.acceptance_length > tokens
    assert figures.tree_acceptance_length >= figures.acceptance_length
    assert figures.position_acceptance > tokens
    log = [json.loads(line) for line in (tmp_path / "heads.run/log.jsonl").read_text().splitlines()]
    assert log[-1]["loss1"] < 0.5 * log[0].get("loss1", log[1].get("loss1"))
    assert any("held_acceptance" in entry for entry in log)
    heads_config, _ = load_heads(out, hidden_size=32, vocab_size=VOCAB)
    assert heads_config.training["data"]["kind"] == "synthetic"
    assert load_file(out / "model.safetensors")["b_out"].dtype == torch.bfloat16
    run = json.loads((tmp_path / "heads.run/run.json").read_text())
    assert {"command", "versions", "revision", "settings", "data"} <= set(run)
    assert run["earlier"] == []


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
    model = load_target(str(target), torch.device("cpu"), torch.float32)
    tokens = read_data(data)
    task = HeadsTask(config, model, tokens, live_states(model))
    batch = task.plan.batch(0)
    seen = tokens_seen(batch, slice(None), torch.device("cpu"))
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
    tokenizer = load_tokenizer(str(target))
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


def test_a_diverged_training_stops_and_saves_nothing_more(
    target: Path, data: Path, tmp_path: Path
) -> None:
    config = settings(target, data, tmp_path / "h", learning_rate=1e30, save_every=1, warmup=0.0)
    with pytest.raises(SpecExtError, match=r"diverged at step \d+.*lower --learning-rate \(now 1e"):
        train_blockwise(config, quiet)
    assert not (tmp_path / "h").exists()
    state = torch.load(tmp_path / "h.run/state.pt", weights_only=True)
    assert all(torch.isfinite(value).all() for value in state["modules"]["heads"].values())


def other_texts(data: Path, folder: Path) -> Path:
    """The same numbers of sequences and tokens, of other texts."""
    shutil.copytree(data, folder)
    tokens = read_data(data)
    sequences = [TokenSequence(tokens.sequence(i)[::-1].tolist(), 3) for i in range(len(tokens))]
    write_shard(shard_path(folder, 0), sequences)
    return folder


def test_states_of_other_texts_are_refused(target: Path, data: Path, tmp_path: Path) -> None:
    other = other_texts(data, tmp_path / "other")
    config = settings(target, data, tmp_path / "h", max_steps=3, cache_hidden=True)
    train_blockwise(config, quiet)
    changed = config.model_copy(update={"data": other})
    with pytest.raises(SpecExtError, match=r"hidden holds data made with other.*data_sha256"):
        train_blockwise(changed, quiet)
    with pytest.raises(SpecExtError, match=r"state.pt belongs to a run with other.*data_sha256"):
        train_blockwise(changed.model_copy(update={"cache_hidden": False}), quiet)


def test_states_of_other_weights_are_refused(target: Path, data: Path, tmp_path: Path) -> None:
    """Under the same name, as a folder is whose model was trained on."""
    changing = Path(shutil.copytree(target, tmp_path / "target"))
    config = settings(changing, data, tmp_path / "h", max_steps=3, cache_hidden=True)
    train_blockwise(config, quiet)
    train_blockwise(config, quiet)
    torch.save({}, changing / "training_args.bin")  # what is not loaded does not count
    train_blockwise(config, quiet)
    weights = load_file(changing / "model.safetensors")
    save_file(
        {name: value + 0.5 for name, value in weights.items()}, changing / "model.safetensors"
    )
    words = r"hidden holds data made with other .*\(weights: .*delete it, and the states are"
    with pytest.raises(SpecExtError, match=words):
        train_blockwise(config.model_copy(update={"resume": "restart"}), quiet)


def test_nothing_to_learn_from_is_told_before_a_target_loads(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "no-model")
    asked = {"model": nowhere, "out": tmp_path / "h", "dry_run": True}
    with pytest.raises(SpecExtError, match=r"found no prompts, and no data .*give --prompts FILES"):
        train_blockwise(BlockwiseTraining.model_validate(asked), quiet)
    asked["prompts"] = [tmp_path / "gone.jsonl"]
    with pytest.raises(SpecExtError, match=r"no such prompt file: .*gone\.jsonl"):
        train_blockwise(BlockwiseTraining.model_validate(asked), quiet)


def test_prompts_are_not_needed_where_data_are(target: Path, data: Path, tmp_path: Path) -> None:
    """As on another machine, with the same file of settings."""
    gone = [tmp_path / "gone.jsonl"]
    config = settings(target, data, tmp_path / "h", max_steps=1, prompts=gone, stage="train")
    assert train_blockwise(config, quiet) is not None
    assert train_blockwise(config.model_copy(update={"stage": "eval"}), quiet) is not None
    train_blockwise(config.model_copy(update={"dry_run": True, "stage": "all"}), quiet)


def test_a_restart_sets_the_former_figures_aside(target: Path, data: Path, tmp_path: Path) -> None:
    config = settings(target, data, tmp_path / "h", max_steps=2, log_every=1)
    train_blockwise(config, quiet)
    train_blockwise(config.model_copy(update={"resume": "restart"}), quiet)
    for name in ("log.jsonl", "former.log.jsonl"):
        lines = (tmp_path / "h.run" / name).read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_figures_of_steps_that_are_made_again_are_logged_once(
    target: Path, data: Path, tmp_path: Path
) -> None:
    """A machine that stopped had logged more than it had saved, and half a line."""
    config = settings(target, data, tmp_path / "h", max_steps=3, log_every=1)
    train_blockwise(config, quiet)
    log = tmp_path / "h.run/log.jsonl"
    whole = log.read_text()
    for more in ('{"step": 4, "loss": 1.0}\n{"step": 5, "lo', ""):
        log.write_text(whole + more)
        train_blockwise(config, quiet)
        assert log.read_text() == whole
    (tmp_path / "h.run/state.pt").unlink()  # before the first was saved
    train_blockwise(config, quiet)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2, 3]


def test_recorded_states_of_another_model_are_refused(
    target: Path, data: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "model": "them/other"}))
    write_states(states_path(copy, 0), [np.zeros((21, 32), np.float32)] * 60)
    config = settings(target, copy, tmp_path / "h", max_steps=2, cache_hidden=True)
    with pytest.raises(SpecExtError, match=r"hidden states of 'them/other'.*--target-name them"):
        train_blockwise(config, quiet)
    named = config.model_copy(update={"target_name": "them/other"})
    assert train_blockwise(named, quiet) is not None
    told = {**manifest, "weights": "of_another_day"}
    (copy / "manifest.json").write_text(json.dumps(told))
    with pytest.raises(SpecExtError, match=r"other weights \(fingerprint of_another_day\) than"):
        train_blockwise(named.model_copy(update={"target_name": None}), quiet)
    (copy / "manifest.json").write_text(json.dumps({**manifest, "model": "them/other"}))
    write_states(states_path(copy, 0), [np.zeros((21, 16), np.float32)] * 60)
    with pytest.raises(SpecExtError, match=r"shape \(1260, 16\), expected \(1260, 32\)"):
        train_blockwise(named.model_copy(update={"out": tmp_path / "h2"}), quiet)


def test_a_new_shard_drops_the_states_of_the_former_one(target: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("w2 w3\nw4 w5\n")
    config = settings(target, tmp_path / "d", tmp_path / "h", prompts=[tmp_path / "p.txt"])
    write_states(states_path(tmp_path / "d", 0), [np.zeros((1, 32), np.float32)])
    tokenizer = load_tokenizer(str(target))
    distill.make_data(config, tokenizer, CountingGenerator, quiet)
    assert not states_path(tmp_path / "d", 0).exists()


def test_recorded_states_that_cannot_be_read_are_not_called_damaged(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors

    config = settings(target, data, tmp_path / "h", max_steps=2, cache_hidden=True)
    train_blockwise(config, quiet)

    safe_open = safetensors.safe_open

    def refuse(path: str, **given: Any) -> Any:
        if "hidden" in path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return safe_open(path, **given)

    monkeypatch.setattr(safetensors, "safe_open", refuse)
    with pytest.raises(SpecExtError, match=r"hidden-00000.* cannot be read: Permission") as found:
        train_blockwise(config.model_copy(update={"stage": "eval"}), quiet)
    assert "delete" not in str(found.value)


def test_recording_states_deletes_no_file_of_others(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder `recording` of a project whose folder --data names."""
    folder = tmp_path / "project" / distill.RECORDING
    folder.mkdir(parents=True)
    (folder / "concert.wav").write_text("mine")
    (folder / "3.f32").write_bytes(b"of a run that was killed")

    def no_engine(*_: Any, **__: Any) -> None:
        raise ValueError("no engine here")

    vllm = types.ModuleType("vllm")
    vllm.__dict__.update(LLM=no_engine, SamplingParams=None)
    inputs, platforms = types.ModuleType("vllm.inputs"), types.ModuleType("vllm.platforms")
    inputs.__dict__["TokensPrompt"] = None
    platforms.__dict__["current_platform"] = types.SimpleNamespace(is_cpu=lambda: False)
    for module in (vllm, inputs, platforms):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setitem(registry.BUILTIN, METHOD, "")
    config = settings(target, tmp_path / "project", tmp_path / "h", cache_hidden=True)
    with pytest.raises(SpecExtError, match="no engine here"):
        distill.vllm_generator(config)
    assert [path.name for path in folder.iterdir()] == ["concert.wav"]


def test_provenance_keeps_the_commands_that_trained(
    target: Path, data: Path, tmp_path: Path
) -> None:
    config = settings(target, data, tmp_path / "h", max_steps=3)
    train_blockwise(config, quiet)
    before = (tmp_path / "h.run/run.json").read_bytes()
    with pytest.raises(SpecExtError, match="other settings"):
        train_blockwise(config.model_copy(update={"learning_rate": 5.0}), quiet)
    assert (tmp_path / "h.run/run.json").read_bytes() == before
    train_blockwise(config.model_copy(update={"tree_nodes": 3}), quiet)
    train_blockwise(config.model_copy(update={"tree_nodes": 4}), quiet)
    run = json.loads((tmp_path / "h.run/run.json").read_text())
    assert [r["settings"]["tree_nodes"] for r in (*run["earlier"], run)] == [16, 3, 4]
    assert {**run["earlier"][0], "earlier": []} == json.loads(before)


def test_the_data_stage_says_what_made_the_data(target: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("w2 w3\nw4 w5\n")
    config = settings(
        target, tmp_path / "d", tmp_path / "h", prompts=[tmp_path / "p.txt"], stage="data"
    )
    config = config.model_copy(update={"generator": "transformers", "max_new_tokens": 4})
    (tmp_path / "d/recording").mkdir(parents=True)  # as vLLM's generator leaves it
    for _ in range(2):  # the second makes nothing
        train_blockwise(config, quiet)
    assert not (tmp_path / "d/recording").exists()
    run = json.loads((tmp_path / "d/run.json").read_text())
    assert run["earlier"] == []
    kept = {name: run["settings"][name] for name in ("generator", "dtype", "chat")}
    assert kept == {"generator": "transformers", "dtype": "auto", "chat": "auto"}
    assert run["data"]["num_prompts"] == 2


def test_a_full_disk_drops_tensorboard_only(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            self.left = 1

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")

        close = add_scalar

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    lines: list[str] = []
    config = settings(target, data, tmp_path / "h", max_steps=6, log_every=2)
    assert train_blockwise(config, lines.append) is not None
    assert sum(line.startswith("tensorboard: no more figures") for line in lines) == 1


def test_a_full_disk_leaves_the_former_heads(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of one training under the settings of another would be served as they are."""
    config = settings(target, data, tmp_path / "h", max_steps=2)
    assert train_blockwise(config, quiet) is not None
    before = {path.name: path.read_bytes() for path in config.out.iterdir()}

    def full(path: Path, value: Any) -> None:
        raise DiskFullError("disk full")

    monkeypatch.setattr(checkpoint, "write_json", full)
    with pytest.raises(DiskFullError):
        train_blockwise(config.model_copy(update={"run_dir": tmp_path / "r", "seed": 9}), quiet)
    assert {path.name: path.read_bytes() for path in config.out.iterdir()} == before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "README.md"])
def test_files_of_others_are_not_replaced(
    target: Path, data: Path, tmp_path: Path, name: str
) -> None:
    """Another model's folder, or one of a project; said before hours of training."""
    out = tmp_path / "project"
    out.mkdir()
    (out / name).write_text('{"model_type": "llama"}')
    config = settings(target, data, out, max_steps=2)
    with pytest.raises(SpecExtError, match=rf"project holds {name}, .*no heads of an .*--out"):
        train_blockwise(config, quiet)
    assert [path.name for path in out.iterdir()] == [name]
    assert (out / name).read_text() == '{"model_type": "llama"}'
    assert not config.run_folder.exists()
    assert train_blockwise(config.model_copy(update={"dry_run": True}), quiet) is None


def test_heads_of_an_earlier_run_are_replaced(target: Path, data: Path, tmp_path: Path) -> None:
    """Also by a process that follows one which was killed while it exchanged the files."""
    config = settings(target, data, tmp_path / "h", max_steps=2)
    config.out.mkdir()
    (config.out / "notes").write_text("mine")
    train_blockwise(config, quiet)
    assert train_blockwise(config, quiet) is not None
    (config.out / ".partial").mkdir()
    (config.out / "config.json").rename(config.out / ".partial" / "config.json")
    assert train_blockwise(config, quiet) is not None
    found = {path.name for path in config.out.iterdir()}
    assert found == {"config.json", "model.safetensors", "README.md", "notes"}


def test_files_that_came_while_heads_were_trained_are_not_replaced(
    target: Path, data: Path, tmp_path: Path
) -> None:
    config = settings(target, data, tmp_path / "h", max_steps=2, log_every=1)

    def come(line: str) -> None:
        config.out.mkdir(exist_ok=True)
        (config.out / "README.md").write_text("mine")

    with pytest.raises(SpecExtError, match=r"h holds README\.md"):
        train_blockwise(config, come)
    assert (config.out / "README.md").read_text() == "mine"
    moved = config.model_copy(update={"out": tmp_path / "new", "run_dir": config.run_folder})
    assert train_blockwise(moved, quiet) is not None


def test_a_trained_target_takes_the_place_of_no_other_model(
    target: Path, data: Path, tmp_path: Path
) -> None:
    """The folder `model` of a project, or the very target."""
    run = tmp_path / "project"
    shutil.copytree(target, run / "model")
    given = {"run_dir": run, "max_steps": 2, "finetune": True}
    before = {path.name: path.read_bytes() for path in (run / "model").iterdir()}
    with pytest.raises(SpecExtError, match=r"project holds model, .*give another --run-dir"):
        train_blockwise(settings(target, data, tmp_path / "h", **given), quiet)
    train_blockwise(settings(target, data, tmp_path / "h", **given | {"finetune": False}), quiet)
    with pytest.raises(SpecExtError, match=r"project holds model, .*give another --run-dir"):
        train_blockwise(settings(target, data, tmp_path / "h", **given), quiet)
    own = settings(run / "model", data, tmp_path / "h", resume="restart", **given)
    with pytest.raises(SpecExtError, match=r"--model .*project/model.*give another --run-dir"):
        train_blockwise(own, quiet)
    assert {path.name: path.read_bytes() for path in (run / "model").iterdir()} == before


@pytest.mark.parametrize(("option", "name"), [("out", "--out"), ("data", "--data")])
def test_a_trained_target_takes_the_place_of_nothing_else_of_the_run(
    target: Path, data: Path, tmp_path: Path, option: str, name: str
) -> None:
    given = {"data": data, "out": tmp_path / "h", option: tmp_path / "r/model"}
    config = settings(target, run_dir=tmp_path / "r", finetune=True, **given)
    with pytest.raises(SpecExtError, match=rf"{name} .*r/model lies where --finetune leaves"):
        train_blockwise(config, quiet)


def test_a_trained_target_of_an_earlier_run_is_replaced(
    target: Path, data: Path, tmp_path: Path
) -> None:
    config = settings(target, data, tmp_path / "h", max_steps=2, finetune=True)
    assert train_blockwise(config, quiet) is not None
    assert train_blockwise(config, quiet) is not None


def test_tensorboard_has_what_a_stopped_training_logged(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None: ...

        def add_scalar(self, name: str, value: float, step: int) -> None:
            told.append(name)

        def close(self) -> None:
            told.append("closed")

    def stopped(*args: Any) -> None:
        raise KeyboardInterrupt

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(loop, "save_state", stopped)
    config = settings(target, data, tmp_path / "h", max_steps=6, log_every=1, save_every=2)
    with pytest.raises(KeyboardInterrupt):
        train_blockwise(config, quiet)
    assert told[-1] == "closed"
    assert len(told) > 1


def test_heads_that_are_not_there_are_missed_before_the_target_loads(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "prepare", pytest.fail)
    with pytest.raises(SpecExtError, match=r"--stage eval measures finished heads, and .*/h holds"):
        train_blockwise(settings(target, data, tmp_path / "h", stage="eval"), quiet)


def test_a_full_disk_leaves_no_half_target(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError
    from transformers import LlamaForCausalLM

    def full(self: LlamaForCausalLM, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    config = settings(target, data, tmp_path / "h", max_steps=2, finetune=True)
    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "save_pretrained", full)
        with pytest.raises(DiskFullError, match=r"disk full while writing .*h.run/model;"):
            train_blockwise(config, quiet)
    assert {path.name for path in (tmp_path / "h.run").iterdir()} >= {"state.pt", "run.json"}
    assert not list((tmp_path / "h.run").glob("*model*"))
    assert train_blockwise(config, quiet) is not None


def test_finetuned_heads_are_measured_on_their_own_target(
    target: Path, data: Path, tmp_path: Path
) -> None:
    config = settings(
        target,
        data,
        tmp_path / "h",
        finetune=True,
        max_steps=40,
        target_learning_rate=0.003,
        save_dtype="fp32",
    )
    figures = train_blockwise(config, quiet)
    again = train_blockwise(config.model_copy(update={"stage": "eval"}), quiet)
    assert figures == again
    assert str(tmp_path / "h.run/model") in (tmp_path / "h/README.md").read_text()
    shutil.rmtree(tmp_path / "h.run/model")
    with pytest.raises(SpecExtError, match=r"no .*h.run/model; --stage eval --finetune measures"):
        train_blockwise(config.model_copy(update={"stage": "eval"}), quiet)
    named = config.model_copy(update={"target_name": "me/tuned"})
    model = load_target(str(target), torch.device("cpu"), torch.float32)
    assert heads_config(named, model, read_data(data)).target == "me/tuned"


def test_evaluation_checks_the_tokenizer(target: Path, data: Path, tmp_path: Path) -> None:
    config = settings(target, data, tmp_path / "h", max_steps=2)
    train_blockwise(config, quiet)
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    tokenizer = load_tokenizer(str(target))
    facts = json.loads((copy / "manifest.json").read_text())
    facts["tokenizer_fingerprint"] = tokenizer_fingerprint(tokenizer)
    (copy / "manifest.json").write_text(json.dumps(facts))
    shape = json.loads((tmp_path / "h/config.json").read_text())
    (tmp_path / "h/config.json").write_text(
        json.dumps({**shape, "tokenizer_fingerprint": "f" * 64})
    )
    with pytest.raises(SpecExtError, match="another tokenizer"):
        train_blockwise(config.model_copy(update={"stage": "eval", "data": copy}), quiet)


def test_resumed_training_with_dropout_equals_uninterrupted(
    target: Path, data: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"dropout": 0.2, "log_every": 7}
    train_blockwise(settings(target, data, tmp_path / "whole", **changes), quiet)
    parts = settings(target, data, tmp_path / "parts", **changes)

    def interrupt(line: str) -> None:
        if line.startswith("step 14/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_blockwise(parts, interrupt)
    torch.rand(1)
    train_blockwise(parts, quiet)
    expected = load_file(tmp_path / "whole/model.safetensors")
    found = load_file(tmp_path / "parts/model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_progress_accuracy_counts_tokens_that_cannot_be_drafted(
    target: Path, data: Path, tmp_path: Path
) -> None:
    config = settings(target, data, tmp_path / "h", draft_vocab=1, loss="all", num_heads=1)
    model = load_target(str(target), torch.device("cpu"), torch.float32)
    task = HeadsTask(config, model, read_data(data), live_states(model))
    batch = task.plan.batch(0)
    listed = int((batch.targets == int(task.heads.draft_vocab[0])).sum())
    expected = listed / int((batch.targets >= 0).sum())  # heads that know one token draft that
    assert task.train_step(0)["acc1"] == pytest.approx(expected)
    assert expected < 0.2


def test_nothing_is_left_out_silently(target: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    prompts = [" ".join(["w3"] * n) for n in (2, 13, 14, 15, 40)]
    (tmp_path / "p.txt").write_text("\n".join(prompts))
    config = settings(
        target, tmp_path / "d", tmp_path / "h", prompts=[tmp_path / "p.txt"], max_length=16
    )
    tokenizer = load_tokenizer(str(target))
    distill.make_data(config, tokenizer, CountingGenerator, lines.append)
    assert "2 of 5 prompts are left out, longer than 14 tokens (--max-length 16" in lines[0]
    again = config.model_copy(update={"prompts": [], "max_length": 15, "max_steps": 1})
    train_blockwise(again, lines.append)
    assert any(line.startswith("1 of 3 sequences are not used: less than two") for line in lines)


def test_texts_beyond_the_targets_context_are_refused(target: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("w2 w3\n" + "w4 " * 100)
    config = settings(
        target, tmp_path / "d", tmp_path / "h", prompts=[tmp_path / "p.txt"], max_new_tokens=40
    ).model_copy(update={"generator": "transformers"})
    with pytest.raises(SpecExtError, match=r"prompt has 100 tokens, .* 40 more .*context of 128"):
        train_blockwise(config, quiet)
    open_manifest(tmp_path / "long", {"num_shards": 1})
    write_shard(shard_path(tmp_path / "long", 0), [TokenSequence([3] * 140, 1)] * 4)
    with pytest.raises(SpecExtError, match=r"texts of 140 tokens .*give --max-length 128"):
        train_blockwise(settings(target, tmp_path / "long", tmp_path / "h"), quiet)


def test_damaged_weights_of_the_target_are_named(target: Path, data: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(target, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(SpecExtError, match=r"weights of the target .* are damaged"):
        train_blockwise(settings(broken, data, tmp_path / "h"), quiet)


def test_a_target_that_scales_its_logits_is_refused(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Granite does; which tokens are likeliest does not tell."""
    found = load_target(str(target), torch.device("cpu"), torch.float32)
    project = found.project
    monkeypatch.setattr(found, "project", lambda states: 30.0 * project(states))
    with pytest.raises(SpecExtError, match="scales or caps them"):
        found._check()


def test_refusals_come_before_the_work(target: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    missing = settings(target, tmp_path / "d", tmp_path / "h", prompts=[tmp_path / "none"])
    with pytest.raises(SpecExtError, match="drop the flag to start"):  # not the prompt file's
        train_blockwise(missing.model_copy(update={"resume": "require"}), quiet)
    with pytest.raises(SpecExtError, match=r"file is a file, expected a folder"):
        train_blockwise(missing.model_copy(update={"out": tmp_path / "file/x"}), quiet)
    inside = {"out": tmp_path / "o", "run_dir": tmp_path / "o/run"}
    with pytest.raises(SpecExtError, match=r"--run-dir: .*o/run lies in --out"):
        train_blockwise(missing.model_copy(update=inside), quiet)
    with pytest.raises(SpecExtError, match=r"--data: .* lies in --out"):
        train_blockwise(missing.model_copy(update={"data": tmp_path / "h"}), quiet)
    for device in ("meta", "mps", "nonsense"):
        with pytest.raises(SpecExtError, match="expected auto, cpu, cuda or cuda:0"):
            train_blockwise(missing.model_copy(update={"device": device}), quiet)


def test_dry_run_measures_batches_like_the_real_ones(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.txt").write_text("".join(f"w{i} w3 w4\n" for i in range(5, 25)))
    widths: list[int] = []
    original = HeadsTask.train_step

    def train_step(self: HeadsTask, step: int) -> dict[str, float]:
        widths.append(self.plan.batch(step).token_ids.shape[1])
        return original(self, step)

    monkeypatch.setattr(HeadsTask, "train_step", train_step)
    config = settings(
        target, tmp_path / "d", tmp_path / "h", prompts=[tmp_path / "p.txt"], max_new_tokens=6
    ).model_copy(update={"dry_run": True, "finetune": True})
    found = {}
    runs: dict[str, dict[str, Any]] = {
        "vllm": {},
        "transformers": {"generator": "transformers"},
        "raw": {"raw_text": True},
    }
    for name, changes in runs.items():
        lines: list[str] = []
        widths.clear()
        train_blockwise(config.model_copy(update=changes), lines.append)
        found[name] = ("\n".join(lines), set(widths))
    assert found["vllm"][1] == {9}
    assert found["raw"][1] == {3}
    assert "20 prompts, at most 120 new tokens" in found["vllm"][0]
    assert "in all, generating the data with vLLM not included" in found["vllm"][0]
    assert "to generate the data" in found["transformers"][0]
    assert "not included" not in found["transformers"][0].rpartition("in all")[2]
    assert "20 texts, 60 tokens" in found["raw"][0]
    assert all("to measure 2 held-out sequences, 1 x" in text for text, _ in found.values())
    assert "MB for the trained target" in found["vllm"][0]
    assert [p.name for p in tmp_path.iterdir()] == ["p.txt"]


def test_several_values_after_one_flag(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from typer.testing import CliRunner

    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"w2 w3 {name}\nw4 w5 {name}\n")
    flags = ["--model", str(target), "--out", str(tmp_path / "h"), "--dry-run", "--raw-text"]
    files = [str(tmp_path / f"{name}.txt") for name in ("a", "b", "c")]
    flags += ["--prompts", files[0], files[1], "--device", "cpu", "--prompts", files[2]]
    result = CliRunner().invoke(train_app, ["blockwise", *flags])
    assert result.exit_code == 0, result.output
    assert "6 texts, 18 tokens" in result.output
    assert main(flags) == 0
    assert "6 texts, 18 tokens" in capsys.readouterr().out


def test_an_unexpected_error_is_one_line(
    target: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(trainer, "train_blockwise", fail)
    flags = ["--model", str(target), "--out", str(tmp_path / "h")]
    assert main(flags) == 1
    assert capsys.readouterr().err.startswith("error: RuntimeError: out of luck\n(an error in")
    with pytest.raises(RuntimeError):
        main([*flags, "--debug"])
