# SPDX-License-Identifier: Apache-2.0
"""Parts of the trainer that need no model: prompts, shards, batches, loss, settings, files."""

import errno
import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from unreadable_files import make_unreadable, said_to_be_unreadable

from vllm_spec_ext.atomic import DiskFullError, replace_folder, write_bytes
from vllm_spec_ext.errors import SpecExtError, UnknownNameError
from vllm_spec_ext.training.batches import IGNORED, BatchPlan, Split, make_batch, split_data
from vllm_spec_ext.training.blockwise.schema import BlockwiseTraining
from vllm_spec_ext.training.chunked_loss import backward_cross_entropy
from vllm_spec_ext.training.distill import request_seeds
from vllm_spec_ext.training.draft import checkpoint
from vllm_spec_ext.training.draft.checkpoint import check_replaceable
from vllm_spec_ext.training.draft.schema import DraftTraining
from vllm_spec_ext.training.draft_vocab import DraftProjection, frequent_tokens
from vllm_spec_ext.training.flags import parse_command_line
from vllm_spec_ext.training.loop import STATE_NAME, restore
from vllm_spec_ext.training.nar.schema import NarTraining
from vllm_spec_ext.training.prompts import read_prompts
from vllm_spec_ext.training.provenance import record_command
from vllm_spec_ext.training.record_states import RecordOptions, RecordStates, collect
from vllm_spec_ext.training.shards import (
    TokenData,
    TokenSequence,
    open_manifest,
    read_data,
    shard_path,
    write_shard,
)
from vllm_spec_ext.training.stages import check_apart, cut_off, warn_of_another_split
from vllm_spec_ext.training.target import Target
from vllm_spec_ext.training.text_copies import TextCopies


def make_data(lengths: list[int], prompts: list[int]) -> TokenData:
    """Sequences of consecutive numbers; sequence i starts with 100 * i."""
    ids = [100 * i + j for i, length in enumerate(lengths) for j in range(length)]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return TokenData(Path("x"), {}, np.array(ids, np.int32), offsets, np.array(prompts, np.int32))


def test_prompts_from_all_shapes(tmp_path: Path) -> None:
    lines = [{"q": "one", "turns": ["a", "b"]}, {"q": "two", "turns": ["c"]}]
    text = "\n".join(json.dumps(line) for line in lines) + "\n\n"
    (tmp_path / "p.jsonl").write_text(text)
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "p.txt").write_text("first\n\n second \n")
    assert read_prompts([tmp_path / "p.jsonl", tmp_path / "p.jsonl.gz"], "q") == ["one", "two"] * 2
    assert read_prompts([tmp_path / "p.jsonl"], "turns[0]") == ["a", "c"]
    (tmp_path / "text.jsonl").write_text(json.dumps({"turns": "one text", "q": "d"}) + "\n")
    assert read_prompts([tmp_path / "text.jsonl"], "turns[0],q") == ["d"]  # not its first letter
    mixed = [tmp_path / "p.jsonl", tmp_path / "p.txt"]
    assert read_prompts(mixed, "missing, turns[1],q") == ["b", "two", "first", "second"]
    some = read_prompts(mixed, "q", limit=2, seed=1)
    assert len(some) == 2
    assert some == read_prompts(mixed, "q", limit=2, seed=1)
    assert read_prompts([tmp_path / "p.txt"], "q") == ["first", "second"]
    odd = "one\u2028two\u2029three\x85four"  # ends of lines to str.splitlines, not to JSON
    (tmp_path / "odd.jsonl").write_text(json.dumps({"q": odd}, ensure_ascii=False) + "\n", "utf-8")
    assert read_prompts([tmp_path / "odd.jsonl"], "q") == [odd]


@pytest.mark.parametrize(
    ("content", "field", "message"),
    [
        ('{"q": "x"}\n{"p": "y"}', "q", r"p.jsonl:2: no 'q' in this line; found keys p.*--field"),
        ('{"q": ["x"]}', "q", r"p.jsonl:1: 'q' is list, expected text"),
        ('{"q": ["x"]}', "q[3]", r"p.jsonl:1: no 'q\[3\]'"),
        ('{"q": "x"}\n{"q":', "q", r"p.jsonl:2: not a JSON object"),
        ("", "q", "no prompts in"),
    ],
)
def test_wrong_prompt_files_name_the_line(
    tmp_path: Path, content: str, field: str, message: str
) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(SpecExtError, match=message):
        read_prompts([tmp_path / "p.jsonl"], field)


def test_broken_prompt_files(tmp_path: Path) -> None:
    with pytest.raises(SpecExtError, match="no such prompt file"):
        read_prompts([tmp_path / "none.txt"], "q")
    (tmp_path / "bad.txt").write_bytes(b"fine\n\xff\xfe\n")
    with pytest.raises(SpecExtError, match=r"bad.txt:2: not UTF-8"):
        read_prompts([tmp_path / "bad.txt"], "q")
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"fine\n" * 100)[:-12])
    with pytest.raises(SpecExtError, match=r"cut.txt.gz: damaged gzip"):
        read_prompts([tmp_path / "cut.txt.gz"], "q")


def test_shards_round_trip_and_refusals(tmp_path: Path) -> None:
    with pytest.raises(SpecExtError, match=r"no manifest.json"):
        read_data(tmp_path)
    open_manifest(tmp_path, {"num_shards": 2, "model": "a"})
    write_shard(shard_path(tmp_path, 0), [TokenSequence([1, 2, 3], 1), TokenSequence([4, 5], 2)])
    with pytest.raises(SpecExtError, match="1 of 2 shards are missing"):
        read_data(tmp_path)
    write_shard(shard_path(tmp_path, 1), [TokenSequence([6, 7, 8, 9], 3)])
    data = read_data(tmp_path)
    assert [data.sequence(i).tolist() for i in range(3)] == [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    assert data.prompt_lengths.tolist() == [1, 2, 3]
    with pytest.raises(SpecExtError, match=r"other settings \(model: 'a' there, 'b' asked\)"):
        open_manifest(tmp_path, {"num_shards": 2, "model": "b"})
    manifest = (tmp_path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text('{"num_shards": "one"}')
    with pytest.raises(SpecExtError, match=r"num_shards is 'one', expected a number"):
        read_data(tmp_path)
    (tmp_path / "manifest.json").write_text(manifest)
    path = shard_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(SpecExtError, match="is damaged"):
        read_data(tmp_path)
    make_unreadable(path)
    with said_to_be_unreadable(path):
        read_data(tmp_path)


def test_what_a_killed_process_left_is_removed_once_it_is_old(tmp_path: Path) -> None:
    names = [".state.1.partial", ".state.2.partial", ".other.1.partial"]
    for name in names:
        (tmp_path / name).touch()
    hours_ago = time.time() - 2 * 3600
    for name in (names[0], names[2]):
        os.utime(tmp_path / name, (hours_ago, hours_ago))
    write_bytes(tmp_path / "state", b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == [names[2], names[1], "state"]


@pytest.mark.parametrize("option", ["--model", "--heads", "--start-from"])
def test_what_a_training_reads_is_not_its_result(tmp_path: Path, option: str) -> None:
    given = {"model": "org/name", "prompts": [tmp_path / "p"], "out": tmp_path / "a"}
    name = option.strip("-").replace("-", "_")
    (tmp_path / "a").mkdir()
    config = NarTraining(**{**given, name: str(tmp_path / "a")})
    with pytest.raises(SpecExtError, match=rf"{option}: .*/a lies in --out .*/a"):
        check_apart(config.out, config.kept_folders)
    config = NarTraining(**{**given, name: str(tmp_path / "b")})
    check_apart(config.out, config.kept_folders)


def test_a_draft_takes_the_place_of_no_prompts(tmp_path: Path) -> None:
    """Its folder is replaced as a whole; heads leave other files in theirs."""
    given = {"model": "org/name", "out": tmp_path / "a", "prompts": [tmp_path / "a/p.txt"]}
    draft = DraftTraining(**given)
    with pytest.raises(SpecExtError, match=r"--prompts: .*/a/p.txt lies in --out .*/a"):
        check_apart(draft.out, draft.kept_folders)
    heads = BlockwiseTraining(**given)
    check_apart(heads.out, heads.kept_folders)


def test_a_full_disk_leaves_the_former_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    write_bytes(path, b"before")

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError, match=r"disk full while writing .*state"):
        write_bytes(path, b"after")
    assert path.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_batch_positions_and_targets() -> None:
    data = make_data([6, 4], [2, 1])
    batch = make_batch(data, np.array([0, 1]), 3, max_length=100)
    assert batch.token_ids.tolist() == [[0, 1, 2, 3, 4, 5], [100, 101, 102, 103, 0, 0]]
    assert batch.rows.tolist() == [0, 0, 0, 1, 1]
    assert batch.columns.tolist() == [1, 2, 3, 0, 1]
    assert batch.next_tokens.tolist() == [2, 3, 4, 101, 102]
    gone = IGNORED
    assert batch.targets.tolist() == [
        [3, 4, 5],
        [4, 5, gone],
        [5, gone, gone],
        [102, 103, gone],
        [103, gone, gone],
    ]


def test_heads_are_shown_copies_of_the_text_before_them(tmp_path: Path) -> None:
    """The copy may use x_{t+1}, which the engine knows then, and nothing behind it."""
    text = [5, 1, 2, 3, 4, 1, 2, 8, 1, 2, 3]
    data = TokenData(
        tmp_path,
        {},
        np.array(text, np.int32),
        np.array([0, len(text)], np.int64),
        np.array([4], np.int32),
    )
    batch = make_batch(data, np.array([0]), 2, max_length=100, inputs=TextCopies(data, 4, 2))
    assert batch.columns.tolist() == [3, 4, 5, 6, 7, 8]
    copied, copied_length = batch.inputs
    # x_{t+1} is 4, 1, 2, 8, 1, 2.
    assert copied_length.tolist() == [0, 1, 2, 0, 1, 2]
    assert copied.tolist() == [[0, 0], [2, 3], [3, 4], [0, 0], [2, 8], [8, 1]]
    plain = make_batch(data, np.array([0]), 2, max_length=100)
    assert plain.inputs == ()
    assert torch.equal(plain.targets, batch.targets)


def test_frequent_tokens_of_the_continuations() -> None:
    ids = np.array([9, 9, 9, 4, 4, 5, 6, 4, 7, 8, 8, 5], np.int32)
    data = TokenData(Path(), {}, ids, np.array([0, 8, 12]), np.array([3, 1], np.int32))
    # Without the prompts: 4 x3, 5 x2, 8 x2, 6 x1.
    assert frequent_tokens(data, range(2), 3, 20).tolist() == [4, 5, 8]
    assert frequent_tokens(data, range(2), 4, 20).tolist() == [4, 5, 6, 8]
    assert len(frequent_tokens(data, range(2), 99, 20)) == 20


def test_draft_projection_is_the_targets_own_where_it_counts() -> None:
    head = torch.nn.Linear(4, 10)

    class Stub:
        vocab_size = 10
        device = torch.device("cpu")
        _head = head
        project = staticmethod(head)
        project_to = Target.project_to

    states = torch.randn(3, 4)
    listed = torch.tensor([1, 4, 9], dtype=torch.int32)
    some = DraftProjection(Stub(), listed)  # type: ignore[arg-type]
    assert torch.allclose(some(states), head(states)[:, listed.long()])
    tokens = torch.tensor([9, 2, IGNORED, 1])
    assert some.places(tokens).tolist() == [2, IGNORED, IGNORED, 0]
    every = DraftProjection(Stub(), None)  # type: ignore[arg-type]
    assert torch.equal(every(states), head(states))
    assert every.places(tokens) is tokens


def test_plan_is_a_function_of_the_step_and_covers_every_epoch() -> None:
    data = make_data([8 + i % 5 for i in range(50)], [2] * 50)
    split = split_data(data, 100, num_held_out=3, seed=4)
    assert len(split.held_out) == 3
    assert not set(split.held_out) & set(split.train)
    plan = BatchPlan(data, split.train, 2, 8, 100, 3, seed=4)
    assert plan.batches_per_epoch == 6
    for epoch in range(2):
        steps = range(epoch * 6, epoch * 6 + 6)
        seen = sorted(int(i) for step in steps for i in plan.batch(step).sequences)
        assert seen == split.train.tolist()
    sizes = [len(plan.batch(step).rows) for step in range(plan.batches_per_epoch)]
    assert plan.mean_positions == np.mean(sizes)
    again = BatchPlan(data, split.train, 2, 8, 100, 3, seed=4)
    assert torch.equal(plan.batch(9).columns, again.batch(9).columns)
    assert plan.batch(9).columns.shape[0] <= 8 * 3


def test_copies_of_a_text_are_on_one_side() -> None:
    """Held-out text that was trained on would be known by heart."""
    texts = make_data([6] * 40, [2] * 40)
    copied = [i % 8 for i in range(40)]
    ids = np.concatenate([texts.sequence(i) for i in copied])
    data = TokenData(texts.folder, {}, ids, texts.offsets, texts.prompt_lengths)
    split = split_data(data, 100, num_held_out=3, seed=4)
    assert len(split.train) + len(split.held_out) == 40
    held_out = {copied[i] for i in split.held_out}
    assert held_out.isdisjoint(copied[i] for i in split.train)
    assert len(split.held_out) == 5 * len(held_out) == 5
    same = TokenData(
        texts.folder, {}, np.tile(texts.sequence(0), 40), texts.offsets, texts.prompt_lengths
    )
    with pytest.raises(SpecExtError, match=r"40 of 40 sequences .* 1 of them different"):
        split_data(same, 100, 3, 4)


def test_what_was_trained_on_is_never_held_out_later() -> None:
    """Where texts came since, fewer are held out, or more are long enough."""
    draw = np.random.default_rng(0)
    ids = draw.integers(0, 100, (400, 9), dtype=np.int32)

    def told(size: int, count: int, max_length: int = 100, seed: int = 4) -> tuple[set[int], ...]:
        lengths = np.full(size, 9)
        prompts = np.where(np.arange(size) % 7, 4, 6)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        data = TokenData(Path(), {}, ids[:size].ravel(), offsets, prompts)
        split = split_data(data, max_length, count, seed)
        return set(split.train.tolist()), set(split.held_out.tolist())

    trained, held_out = told(200, 15)
    assert len(held_out) == 15
    for later in (told(400, 15), told(200, 5), told(400, 10)):
        assert later[1]
        assert not later[1] & trained
    short, _ = told(200, 15, max_length=7)
    assert len(short) < len(trained)  # long prompts leave too little
    assert not told(200, 15)[1] & short
    assert told(200, 15, seed=5)[1] != held_out


@pytest.mark.parametrize(
    ("asked", "is_said"), [((4, 200), False), ((4, 100), False), ((4, 201), True), ((5, 200), True)]
)
def test_measuring_with_texts_that_were_trained_on_is_said(
    tmp_path: Path, asked: tuple[int, int], is_said: bool
) -> None:
    settings = {"seed": 4, "eval_sequences": 200, "max_length": 64}
    record_command(tmp_path, torch.device("cpu"), settings, {"num_prompts": 2000})
    said: list[str] = []
    config: Any = SimpleNamespace(
        run_folder=tmp_path, seed=asked[0], eval_sequences=asked[1], max_length=64
    )
    data: Any = SimpleNamespace(manifest={"num_prompts": 2000})
    warn_of_another_split(config, data, said.append)
    assert any("trained on with --seed 4" in line for line in said) == is_said
    config.run_folder = tmp_path / "none"
    warn_of_another_split(config, data, pytest.fail)


@pytest.mark.parametrize(
    ("trained", "now", "max_length", "is_said"),
    [
        (1000, 1000, 64, False),
        (1000, 2000, 64, True),
        (1000, 1000, 32, True),
        (2000, 3000, 64, False),
    ],
)
def test_measuring_with_other_texts_than_few_is_said(
    tmp_path: Path, trained: int, now: int, max_length: int, is_said: bool
) -> None:
    """A tenth of them is held out then, and that changes with their number."""
    settings = {"seed": 4, "eval_sequences": 200, "max_length": 64}
    record_command(tmp_path, torch.device("cpu"), settings, {"num_prompts": trained})
    said: list[str] = []
    config: Any = SimpleNamespace(**settings, run_folder=tmp_path)
    config.max_length = max_length
    data: Any = SimpleNamespace(manifest={"num_prompts": now})
    warn_of_another_split(config, data, said.append)
    assert any(f"there were {trained} texts" in line for line in said) == is_said


def test_answers_to_one_prompt_are_on_one_side() -> None:
    """They differ where they are drawn, and may begin with the same words."""
    texts = make_data([9] * 40, [4] * 40)
    ids = texts.token_ids.copy().reshape(40, 9)
    ids[:, :4] = np.repeat(np.arange(8), 5)[:, None]
    data = TokenData(texts.folder, {}, ids.ravel(), texts.offsets, texts.prompt_lengths)
    split = split_data(data, 100, num_held_out=3, seed=4)
    assert len(split.held_out) == 5
    assert {*ids[split.held_out, 0]}.isdisjoint(ids[split.train, 0])


def test_some_texts_are_of_all_files() -> None:
    split = Split(np.arange(0, 2000, 2), np.arange(1, 9, 2))
    some = split.some_to_train(32, seed=1)
    assert len({*some.tolist()}) == 32
    assert {*some.tolist()} <= {*split.train.tolist()}
    assert some.tolist() == sorted(some.tolist()) == split.some_to_train(32, seed=1).tolist()
    assert 5 < (some < 1000).sum() < 27
    assert split.some_to_train(5000, seed=1).tolist() == split.train.tolist()


def test_what_the_greatest_length_cuts_off_is_counted() -> None:
    data = make_data([10, 30, 8], [4, 8, 8])
    assert cut_off(data, 100) == 0.0
    assert cut_off(data, 20) == pytest.approx(10 / 28)
    assert cut_off(data, 6) == pytest.approx(26 / 28)


def test_a_folder_takes_the_place_of_another_or_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "words").write_text(name)
        return folder

    folder = tmp_path / "out"
    replace_folder(make("first"), folder)
    assert (folder / "words").read_text() == "first"
    with pytest.raises(FileNotFoundError):
        replace_folder(tmp_path / "missing", folder)
    assert (folder / "words").read_text() == "first"
    replace_folder(make("second"), folder)
    assert (folder / "words").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    check_replaceable(tmp_path / "new")
    (tmp_path / "link").symlink_to(make("elsewhere"))
    mounts = [str(tmp_path / "new")]
    monkeypatch.setattr(checkpoint.os.path, "ismount", lambda path: str(path) in mounts)
    with pytest.raises(SpecExtError, match="no draft of an earlier"):
        check_replaceable(tmp_path / "link")
    mounts.append(str(tmp_path / "elsewhere"))
    with pytest.raises(SpecExtError, match="mount point"):
        check_replaceable(tmp_path / "link")
    with pytest.raises(SpecExtError, match=r"mount point.*--out .*new/draft"):
        check_replaceable(tmp_path / "new")


def test_a_state_that_cannot_be_read_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be whole; to start over would lose hours of training."""
    (tmp_path / STATE_NAME).write_bytes(b"whole")

    def refuse(path: Path, **_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(SpecExtError, match=r"state.pt cannot be read: Permission") as found:
        restore(None, tmp_path, {}, "auto")  # type: ignore[arg-type]
    assert "restart" not in str(found.value)


def test_recordings_are_complete_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    rows.tofile(tmp_path / "7-abc.f32")
    assert np.array_equal(collect(tmp_path, "7", 3, 4), rows)
    with pytest.raises(SpecExtError, match="recorded no hidden states for request 7"):
        collect(tmp_path, "7", 3, 4)
    rows[:, :2].tofile(tmp_path / "7.f32")  # cut short: fewer numbers, but a multiple of 3
    with pytest.raises(SpecExtError, match="holds 6 numbers, expected 3 states of 4"):
        collect(tmp_path, "7", 3, 4)
    recorder = RecordStates(RecordOptions(folder=str(tmp_path)))
    recorder._rows["8"] = [rows[0]]

    def full(self: Path, mode: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(DiskFullError, match=r"disk full while writing .*8.f32"):
        recorder.finish(["8"])


def test_data_too_short_to_learn_from() -> None:
    with pytest.raises(SpecExtError, match="1 of 3 sequences have two tokens after their prompt"):
        split_data(make_data([4, 4, 4], [4, 2, 3]), 100, 10, 0)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunked_loss_equals_the_plain_one(chunk: int) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 9, bias=False)
    source = torch.randn(7, 4, requires_grad=True)
    targets = torch.tensor([1, 2, IGNORED, 4, 5, IGNORED, 8])
    plain = functional.cross_entropy(head(source * 2), targets, ignore_index=IGNORED)
    expected, expected_weight = torch.autograd.grad(plain, (source, head.weight))
    total, correct, count = backward_cross_entropy(source * 2, targets, head, chunk)
    assert count == 5
    assert total.item() / count == pytest.approx(plain.item(), rel=1e-5)
    assert correct.item() == (head(source * 2).argmax(-1) == targets).sum().item()
    torch.testing.assert_close(source.grad, expected)
    torch.testing.assert_close(head.weight.grad, expected_weight)


def parse(*arguments: str) -> BlockwiseTraining:
    """Settings of a command line."""
    return parse_command_line(BlockwiseTraining, arguments, "train", "")


def test_settings_from_flags_and_file(tmp_path: Path) -> None:
    config = tmp_path / "run.json"
    config.write_text(json.dumps({"model": "m", "out": "heads", "num-heads": 6, "loss": "all"}))
    parsed = parse("--config", str(config), "--num-heads", "2", "--no-condition-on-next")
    assert (parsed.num_heads, parsed.loss, parsed.condition_on_next) == (2, "all", False)
    assert parsed.data_folder == Path("heads.run/data")
    yaml = tmp_path / "run.yaml"
    yaml.write_text("model: m\nout: heads\nprompts: [a.txt, b.txt]\n")
    assert parse("--config", str(yaml)).prompts == [Path("a.txt"), Path("b.txt")]
    yaml.write_text("model: ~/m\nout: ~/heads\ndata: ~/data\nprompts: [a.txt, ~/b.txt]\n")
    one = parse("--config", str(yaml))
    assert one.prompts == [Path("a.txt"), Path.home() / "b.txt"]
    assert one.model == str(Path.home() / "m")
    yaml.write_text("model: m\nout: heads\nprompts: a.txt\n")
    assert parse("--config", str(yaml)).prompts == [Path("a.txt")]
    assert (one.out, one.data_folder) == (Path.home() / "heads", Path.home() / "data")
    yaml.write_bytes("model: é\n".encode("latin-1"))
    with pytest.raises(SpecExtError, match=r"run.yaml is not UTF-8 text"):
        parse("--config", str(yaml))
    paper = parse("--model", "m", "--out", "h", "--preset", "paper", "--loss", "all")
    assert (paper.condition_on_next, paper.block_diagonal, paper.loss) == (False, False, "all")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "h"], "needs --model"),
        (["--model", "m", "--out", "h", "--num-heads", "0"], "num_heads.*found '0'"),
        (["--model", "m", "--out", "h", "--loss", "some"], "loss.*found 'some'"),
        (["--model", "m", "--out", "h", "--raw-text", "--temperature", "1"], "temperature has no"),
        (["--config", "nowhere.json"], "cannot read the config file"),
        (["--model", "m", "--out", "h", "--epochs", "inf"], "epochs.*found 'inf'"),
        (["--model", "m", "--out", "h", "--clip", "nan"], "clip.*found 'nan'"),
        (["--model", "m", "--out", "h", "--raw-text", "--chat", "always"], "without a chat temp"),
        (["--model", "m", "--out", "h", "--push-to-hub", "a b/c"], "push_to_hub.*'a b/c'"),
        (["--model", "m", "--out", "h", "--push-to-hub", "heads"], "expected 'user/name'"),
        (
            ["--model", "m", "--out", "h", "--push-to-hub", "a/b", "--stage", "eval"],
            "makes no heads that push_to_hub could upload",
        ),
        (["--model", "m", "--out", "."], "name a folder for the heads"),
        (["--model", "m", "--out", "/"], "name a folder for the heads"),
    ],
)
def test_bad_settings(arguments: list[str], message: str) -> None:
    with pytest.raises(SpecExtError, match=message):
        parse(*arguments)


def test_unknown_setting_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"model": "m", "out": "h", "num_head": 3}')
    with pytest.raises(UnknownNameError, match="Did you mean 'num_heads'"):
        parse("--config", str(tmp_path / "c.json"))


def run_python(code: str) -> None:
    """Run code in a new process that finds this package; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=800)


def test_training_imports_neither_vllm_nor_numba_nor_a_command_line_framework() -> None:
    code = (
        "import sys\n"
        "for name in ('vllm', 'typer', 'rich', 'numba'): sys.modules[name] = None\n"
        "import vllm_spec_ext.training.blockwise.trainer, vllm_spec_ext.training.dry_run\n"
        "assert not any(name.startswith('vllm_spec_ext.cli') for name in sys.modules)\n"
    )
    run_python(code)


def test_copies_are_found_without_numba() -> None:
    code = (
        "import sys\n"
        "sys.modules['numba'] = None\n"
        "import numpy as np\n"
        "from vllm_spec_ext.proposers.text_index.copied_tokens import copied_tokens\n"
        "from vllm_spec_ext.proposers.text_index.occurrence_index import OccurrenceIndex\n"
        "index = OccurrenceIndex()\n"
        "index.append(np.array([1, 2, 3, 4, 1, 2], np.int32))\n"
        "assert copied_tokens(index, 8, 2).tokens.tolist() == [3, 4]\n"
    )
    run_python(code)


def test_a_numba_that_cannot_work_here_is_an_error(tmp_path: Path) -> None:
    """Interpreted loops would serve, a hundred times slower, and say nothing."""
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.4 or less')")
    code = "import vllm_spec_ext.proposers.text_index.occurrence_kernels"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}
    command = [sys.executable, "-c", code]
    run = subprocess.run(
        command, env=environment, timeout=800, capture_output=True, text=True, check=False
    )
    assert run.returncode != 0
    assert "Numba needs NumPy 2.4 or less" in run.stderr


def test_numba_stays_unloaded_until_it_is_needed() -> None:
    # vLLM's CPU worker cannot start in a process that has loaded it.
    code = (
        "import sys, vllm_spec_ext.training.blockwise.trainer, vllm_spec_ext.proposers.blockwise\n"
        "assert 'numba' not in sys.modules\n"
    )
    run_python(code)


def test_prompts_that_are_alike_get_seeds_that_are_not() -> None:
    same = [[1, 2], [1, 2], [1, 2], [3]]
    seeds = request_seeds(5, same)
    assert len(set(seeds)) == 4
    assert seeds == request_seeds(5, same)  # when a run is resumed
    assert not set(seeds) & set(request_seeds(5, [*same, [4]]))  # of another shard
    assert not set(seeds) & set(request_seeds(6, same))


def test_what_is_started_over_leaves_nothing_to_go_on_from(tmp_path: Path) -> None:
    """Not even if it ends before it has saved anything."""
    state = tmp_path / STATE_NAME
    state.write_bytes(b"diverged")
    assert restore(None, tmp_path, {}, "restart") == 0  # type: ignore[arg-type]
    assert not state.exists()
