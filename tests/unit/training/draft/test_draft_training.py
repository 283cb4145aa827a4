# SPDX-License-Identifier: Apache-2.0
"""Training drafts end to end on a tiny random Llama, on the CPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from vllm_spec_ext.cli.train import train_app
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.training.acceptance import acceptance_per_position, chain_accepts, walk
from vllm_spec_ext.training.draft import trainer
from vllm_spec_ext.training.draft.boosting import MissedPositions
from vllm_spec_ext.training.draft.draft_task import DraftModelTask
from vllm_spec_ext.training.draft.evaluate import coverage, figures_of, guess
from vllm_spec_ext.training.draft.schema import DraftTraining
from vllm_spec_ext.training.draft.trainer import main, train_draft
from vllm_spec_ext.training.hidden import live_states
from vllm_spec_ext.training.shards import TokenData, read_data
from vllm_spec_ext.training.target import Target, load_target, load_tokenizer

Settings = Callable[..., DraftTraining]


def quiet(line: str) -> None:
    """Ignore a progress line."""


def loaded(path: Path) -> Target:
    return load_target(str(path), torch.device("cpu"), torch.float32)


def task_of(config: DraftTraining) -> DraftModelTask:
    target = loaded(Path(config.model))
    return DraftModelTask(config, target, read_data(config.data_folder), live_states(target))


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "answers"},
        {"loss": "answers", "attention_heads": 2, "ffn": 24},
        {"loss": "answers", "vocab": 64, "train_embeddings": True},
    ],
    ids=["layers", "narrow", "vocab"],
)
def test_a_draft_learns_and_is_a_standard_folder(
    settings: Settings, target: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    config = settings(max_steps=200, log_every=5, eval_every=50, learning_rate=0.01, **changes)
    figures = train_draft(config, quiet)
    assert figures is not None
    assert figures.accuracy["top1"] > 0.85
    assert figures.acceptance_length > 3.5  # of at most 5
    assert figures.acceptance_per_position[0] >= figures.acceptance_per_position[3] > 0.6
    model = AutoModelForCausalLM.from_pretrained(config.out, dtype=torch.float32)
    assert type(model).__name__ == "LlamaForCausalLM"
    tokenizer = load_tokenizer(str(config.out))
    whole = load_tokenizer(str(target))
    size = changes.get("vocab", 320)
    assert model.config.vocab_size == size
    assert tokenizer.get_vocab() == {t: i for t, i in whole.get_vocab().items() if i < size}
    text = read_data(config.data_folder).sequence(0)[:8].tolist()
    found = model.generate(torch.tensor([text[:3]]), max_new_tokens=5, do_sample=False)
    assert found[0].tolist() == text
    facts = json.loads((config.out / "training.json").read_text())
    assert facts["figures"]["acceptance_length"] == pytest.approx(
        figures.acceptance_length, abs=1e-3
    )
    assert facts["data"]["kind"] == "synthetic"
    log = [json.loads(x) for x in (tmp_path / "draft.run/log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < 0.5 * log[0]["loss"]
    assert any({"held_depth4", "held_acceptance"} <= set(entry) for entry in log)
    run = json.loads((tmp_path / "draft.run/run.json").read_text())
    assert {"command", "versions", "revision", "settings", "data"} <= set(run)
    again = train_draft(settings(stage="eval", **changes), quiet)
    assert again is not None
    assert again.acceptance_length == pytest.approx(figures.acceptance_length)


def test_kl_leads_to_the_targets_distribution(settings: Settings) -> None:
    """On any text, also one that the target would not write: what counts is its distribution."""
    before = task_of(settings()).measure()
    figures = train_draft(settings(max_steps=60, loss="kl"), quiet)
    few = train_draft(settings(max_steps=60, top=64, resume="restart"), quiet)
    assert figures is not None
    assert few is not None
    assert figures.overlap > before.overlap + 0.02
    assert few.overlap > before.overlap + 0.02


def test_nothing_cut_is_the_target(settings: Settings) -> None:
    figures = task_of(settings(layers=4)).measure()
    assert figures.overlap == pytest.approx(1.0, abs=1e-4)
    assert figures.accuracy["top1"] == pytest.approx(figures.target_agreement, abs=5e-5)  # rounded
    assert figures.vocab_coverage == 1.0


def test_positions_and_their_next_tokens(settings: Settings) -> None:
    """The last token of a text is learned, too; heads, which look further, leave it out."""
    task = task_of(settings(positions_per_sequence=0))
    batch = task.plan.batch(0)
    for row, number in enumerate(batch.sequences.tolist()):
        text = task.data.sequence(number)
        mine = batch.rows == row
        assert batch.columns[mine].tolist() == list(range(2, len(text) - 1))
        assert batch.next_tokens[mine].tolist() == text[3:].tolist()
    assert task.plan.mean_positions == len(task.split.train) * 21 / task.plan.batches_per_epoch


@pytest.mark.parametrize("loss", ["kl", "answers"])
def test_resumed_equals_uninterrupted(settings: Settings, tmp_path: Path, loss: str) -> None:
    changes: dict[str, Any] = {"loss": loss, "ffn": 24, "save_every": 5}
    whole = settings(out=tmp_path / "whole", **changes)
    train_draft(whole, quiet)
    parts = settings(out=tmp_path / "parts", **changes)
    stopped = 0

    def stop(line: str) -> None:
        nonlocal stopped
        if line.startswith("step 7/"):
            stopped += 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_draft(parts.model_copy(update={"log_every": 7}), stop)
    assert stopped == 1
    lines: list[str] = []
    train_draft(parts, lines.append)
    assert any(line.startswith("resumed at step") for line in lines)
    first, second = (load_file(p / "model.safetensors") for p in (whole.out, parts.out))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(SpecExtError, match="other settings"):
        train_draft(settings(out=tmp_path / "parts", **{**changes, "ffn": 16}), quiet)


def test_embeddings_are_left_alone_unless_asked_for(settings: Settings, target: Path) -> None:
    own = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    for changed in (False, True):
        config = settings(train_embeddings=changed, resume="restart")
        train_draft(config, quiet)
        found = load_file(config.out / "model.safetensors")
        assert torch.equal(found["model.embed_tokens.weight"], own) is not changed
        state = torch.load(config.run_folder / "state.pt", weights_only=True)
        assert any("embed" in name for name in state["modules"]["draft"]) is changed


class OddExpert:
    """A draft that knows the text where the next token is odd, and nothing else."""

    vocab_size = 320
    device = torch.device("cpu")

    def hidden(self, token_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(2 + (token_ids * 5 + 7) % 46, 320).float()

    def project(self, states: torch.Tensor) -> torch.Tensor:
        follow = states.argmax(-1)
        return torch.nn.functional.one_hot(torch.where(follow % 2 == 1, follow, 319), 320).float()


def test_boosting_finds_what_was_missed(data: Path) -> None:
    tokens = read_data(data)
    expert: Any = OddExpert()
    for number in (0, 7):
        text = tokens.sequence(number)
        (missed,) = MissedPositions([expert], tokens, 512).of(number)
        expected = [1 - int(token % 2) for token in text[3:]]
        assert missed[2:-1].tolist() == expected
        assert 0 < sum(expected) < len(expected)
        (cut,) = MissedPositions([expert], tokens, 10).of(number)
        assert cut[:9].tolist() == missed[:9].tolist()
    (none,) = MissedPositions([expert, expert], tokens, 512).of(0)
    assert none.tolist() == MissedPositions([expert], tokens, 512).of(0)[0].tolist()


def test_boosting_learns_what_was_missed(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what an earlier one gets right left out, the new one is right elsewhere."""
    from vllm_spec_ext.training.draft import draft_task

    (tmp_path / "first").mkdir()
    expert: Any = OddExpert()
    expert.model = torch.nn.Identity()
    monkeypatch.setattr(draft_task, "load_earlier", lambda folders, target: [expert])
    config = settings(
        loss="answers",
        boost_on=[tmp_path / "first"],
        boost_keep=0.0,
        max_steps=60,
        learning_rate=0.02,
        train_embeddings=True,
    )
    figures = train_draft(config, quiet)
    assert figures is not None
    tokens = read_data(config.data_folder)
    task = task_of(config)
    found, _, _ = guess(
        loaded(config.out),
        tokens,
        task.split.held_out,
        max_length=512,
        batch_size=4,
        logit_chunk=32,
    )
    answers = [tokens.sequence(i)[3:] for i in task.split.held_out.tolist()]
    even = np.concatenate(answers) % 2 == 0
    assert found.right[even].mean() > 0.9
    assert found.right[~even].mean() < 0.5  # nobody asked for these
    assert figures.merged["earlier_coverage"] == pytest.approx(1 - even.mean(), abs=1e-3)
    assert figures.merged["coverage"] > 0.95
    assert figures.merged["acceptance_length"] <= 5.0


def test_acceptance_of_chains() -> None:
    right = np.array([1, 1, 0, 1, 1, 1, 1, 0, 1], bool)
    starts = np.array([0, 4, 9])
    accepted = chain_accepts(right, starts, 3)
    assert accepted.tolist() == [2, 1, 0, 1, 3, 2, 1, 0, 1]
    # 0 -> 3 tokens, 3 -> 2 (one beyond the text); 4 -> 4 tokens, 8 -> 2
    assert walk(starts, lambda row: int(accepted[row])) == 11 / 4
    # Whole chains start at 0 and 1 of the first text, at 4, 5 and 6 of the second.
    assert acceptance_per_position(accepted, starts, 3) == [1.0, 0.6, 0.2]
    assert acceptance_per_position(accepted[:1], np.array([0, 1]), 3) == [0.0, 0.0, 0.0]


def test_merged_chains_are_one_tree() -> None:
    """The longest path of a tree of chains is the longer chain, position by position."""
    from vllm_spec_ext.training.draft.evaluate import Guesses

    starts = np.array([0, 6])
    first = Guesses(np.array([0, -1, 0, 0, 1, 0]), starts)
    second = Guesses(np.array([-1, 0, 0, 1, 0, 0]), starts)
    figures = figures_of(
        second, agreement=1.0, overlap=0.0, chain=2, vocab_coverage=1.0, earlier=[first]
    )
    assert figures.merged["earlier_coverage"] == pytest.approx(4 / 6, abs=1e-3)
    assert figures.merged["coverage"] == 1.0
    # Alone the first accepts 1 0 2 1 0 1; with the second's 0 2 1 0 2 1 at best 1 2 2 1 2 1.
    assert figures.merged["earlier_acceptance_length"] == pytest.approx((2 + 3 + 2) / 3, abs=1e-3)
    assert figures.merged["acceptance_length"] == pytest.approx((2 + 3 + 2) / 3, abs=1e-3)
    assert figures.accuracy == {"top1": 0.6667, "top2": 0.8333, "top3": 0.8333, "top5": 0.8333}


def test_coverage_counts_answers_only(data: Path) -> None:
    tokens: TokenData = read_data(data)
    some = np.array([3, 4])
    answers = np.concatenate([tokens.sequence(i)[3:] for i in (3, 4)])
    assert coverage(tokens, some, 512, 20) == pytest.approx((answers < 20).mean())


def test_dry_run_writes_nothing(settings: Settings, tmp_path: Path) -> None:
    lines: list[str] = []
    assert train_draft(settings(dry_run=True, vocab=64), lines.append) is None
    text = "\n".join(lines)
    assert "draft of 2 layers (the target's 0, 1), 4 heads, 48 units, 64 tokens" in text
    assert "its vocabulary covers 100.0%" in text
    assert "steps: 12 of 8 sequences" in text
    assert "time: about" in text
    assert "for the saved state" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": 5}, "the target has 4 layers"),
        ({"layers": None, "keep_layers": [0, 4]}, "the target's layers are 0 to 3"),
        ({"vocab": 321}, "the target has 320 tokens"),
        ({"ffn": 49}, "the target has 48"),
        ({"attention_heads": 3}, "multiple of 2"),
        ({"boost_on": ["nowhere"]}, "no such folder"),
        ({"stage": "eval"}, r"holds no training\.json"),
    ],
)
def test_bad_settings_are_refused(settings: Settings, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecExtError, match=reason):
        train_draft(settings(**changes), quiet)


def test_what_would_fail_after_the_training_fails_before(
    settings: Settings, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "prepare", pytest.fail)
    with pytest.raises(SpecExtError, match="no such folder"):
        train_draft(settings(boost_on=["nowhere"]), quiet)
    whole = load_tokenizer(str(target))
    monkeypatch.setattr(whole, "save_pretrained", lambda folder: None)  # as of one without the file
    monkeypatch.setattr(trainer, "load_tokenizer", lambda name: whole)
    with pytest.raises(SpecExtError, match=r"has no tokenizer\.json, so --vocab cannot cut it"):
        train_draft(settings(vocab=300), quiet)


def test_contradictions_and_foreign_folders(
    settings: Settings, target: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="both choose layers"):
        settings(keep_layers=[0])
    with pytest.raises(ValueError, match="does not use"):
        settings(loss="answers", top=5)
    with pytest.raises(SpecExtError, match=r"--boost-on: .* lies in --out"):
        train_draft(settings(out=tmp_path, boost_on=[tmp_path]), quiet)
    with pytest.raises(SpecExtError, match="no draft of an earlier run"):
        train_draft(settings(out=target), quiet)
    assert (target / "model.safetensors").exists()


def test_a_draft_of_a_larger_vocabulary_is_no_earlier_one(settings: Settings, target: Path) -> None:
    config = settings(vocab=64)
    train_draft(config, quiet)
    with pytest.raises(SpecExtError, match="vocabulary of 320"):
        train_draft(
            settings(model=str(config.out), boost_on=[target], out=config.out.with_name("d2")),
            quiet,
        )


def test_push_to_hub(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[Path, str]] = []

    def push(folder: Path, repository: str) -> str:
        assert (folder / "config.json").exists()
        sent.append((folder, repository))
        return "https://hub/user/draft"

    monkeypatch.setattr(trainer, "push_to_hub", push)
    lines: list[str] = []
    config = settings(push_to_hub="user/draft")
    train_draft(config, lines.append)
    assert sent == [(config.out, "user/draft")]
    assert lines[-1] == "uploaded: https://hub/user/draft"


def test_both_command_lines(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings()
    flags = ["--model", config.model, "--data", str(config.data), "--out", str(config.out)]
    flags += ["--keep-layers", "1", "3", "--device", "cpu", "--dry-run"]
    done = CliRunner().invoke(train_app, ["draft", *flags])
    assert done.exit_code == 0, done.output
    assert "the target's 1, 3" in done.output
    assert main(flags) == 0
    assert "the target's 1, 3" in capsys.readouterr().out
