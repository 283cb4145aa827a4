# SPDX-License-Identifier: Apache-2.0
"""The trainer on a toy whose right drafts can be learned; stops, full disks and rollbacks."""

import errno
import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.online import trainer as trainer_module
from vllm_spec_ext.online.folder import (
    ENGINE_LOCK,
    FACTS,
    SAMPLES,
    TRAINER_STATE,
    EngineState,
    FolderFacts,
    check_folder,
    write_record,
)
from vllm_spec_ext.online.folder_lock import FolderLock
from vllm_spec_ext.online.heads_student import HeadsStudent
from vllm_spec_ext.online.sample_files import write_shard
from vllm_spec_ext.online.target_ends import TargetEnds
from vllm_spec_ext.online.trace import Trace
from vllm_spec_ext.online.trainer import Trainer, run_trainer
from vllm_spec_ext.online.versions import check_version, version_numbers, write_version
from vllm_spec_ext.options import OnlineOptions
from vllm_spec_ext.proposers.blockwise.heads import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    BlockwiseHeads,
    HeadsConfig,
    load_heads,
)

VOCAB, HIDDEN, HEADS = 23, 16, 2


def ends() -> TargetEnds:
    random_state = torch.Generator().manual_seed(1)
    return TargetEnds(
        torch.randn(VOCAB, HIDDEN, generator=random_state),
        torch.randn(VOCAB, HIDDEN, generator=random_state),
    )


def trace(seed: int) -> Trace:
    """Each token is followed by one that it alone decides, with a probability of 0.9."""
    draw, length = random.Random(seed), 40
    text = [draw.randrange(VOCAB)]
    while len(text) < length:
        text.append((5 * text[-1] + 3) % VOCAB)
    tokens = np.array(text, np.int32)
    rows = np.arange(3, length - 1, dtype=np.int32)
    starts = rows[:-3]
    following = tokens[rows + 1]
    return Trace(
        token_ids=tokens,
        rows=rows,
        top_tokens=np.stack([following, (following + 1) % VOCAB], axis=1),
        top_probs=np.tile(np.array([0.9, 0.05], np.float32), (len(rows), 1)),
        tails=np.full(len(rows), 0.05, np.float32),
        starts=starts,
        failed_at=np.ones(len(starts), np.int32),
        chances=np.ones(len(starts), np.float32),
        states=ends().embedding[tokens[starts].astype(np.int64)].to(torch.bfloat16),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "online")


def make_folder(root: Path, **options: Any) -> Path:
    config = HeadsConfig(
        target="toy",
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        num_heads=HEADS,
        head_width=32,
        condition_on_next=True,
    )
    torch.manual_seed(0)
    student = HeadsStudent.__new__(HeadsStudent)
    student.module = BlockwiseHeads(config)
    root.mkdir()
    write_version(root, 0, student.files(), "own")
    given: dict[str, Any] = {
        "likeliest": 2,
        "learning_rate": 1e-2,
        "batch_size": 32,
        "passes": 8,
        "publish_steps": 20,
    }
    write_record(
        root,
        FolderFacts(
            method="blockwise",
            target="toy",
            drafter="own",
            vocab_size=VOCAB,
            options=OnlineOptions.model_validate({"folder": str(root), **given, **options}),
        ),
    )
    return root


def add_samples(root: Path, number: int = 1, count: int = 40) -> None:
    write_shard(root / SAMPLES, number, [trace(number * 1000 + i) for i in range(count)])


def make_trainer(root: Path) -> Trainer:
    facts = FolderFacts.model_validate_json((root / "online.json").read_bytes())
    return Trainer(root, HeadsStudent(facts, torch.device("cpu"), ends()), facts)


def weights_of(trainer: Trainer) -> list[torch.Tensor]:
    return [value.detach().clone() for value in trainer.student.module.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("loss", ["forward", "reverse", "jensen_shannon"])
def test_it_learns_and_publishes_what_is_better(tmp_path: Path, loss: str) -> None:
    folder = make_folder(tmp_path / "online", loss=loss)
    add_samples(folder)
    trainer = make_trainer(folder)
    apart = trainer.pool.held_out()
    before = float(trainer.student.judge(apart).overlap)
    for _ in range(200):
        assert trainer.advance() == ""
    # The other two learn more slowly what a drafter holds for all but impossible.
    assert before < 0.2
    assert trainer.figures["overlap"] > (0.7 if loss == "forward" else 0.4)
    assert version_numbers(folder)[-1] == trainer.published > 1
    trainer.student.load(check_version(folder, trainer.published, "own"))
    assert float(trainer.student.judge(apart).overlap) > before + 0.2


def test_without_samples_nothing_changes(folder: Path) -> None:
    """A turn that does not train takes no step of the optimiser, not even an empty one."""
    trainer = make_trainer(folder)
    before = weights_of(trainer)
    assert trainer.advance() == "there are no samples"
    assert same(before, weights_of(trainer))
    assert not trainer._optimizer.state
    assert trainer.steps == 0
    add_samples(folder)
    write_record(folder, EngineState(frozen=True))
    assert trainer.advance() == "it is frozen"
    assert same(before, weights_of(trainer))


def test_it_waits_for_new_samples(folder: Path) -> None:
    add_samples(folder, count=3)
    trainer = make_trainer(folder)
    turns = 0
    while not trainer.advance():
        turns += 1
        assert turns < 200
    assert trainer.advance() == "there are no new samples"
    add_samples(folder, number=2)
    assert trainer.advance() == ""


def train_until_it_waits(trainer: Trainer) -> int:
    """Returns how many steps that took."""
    before = trainer.steps
    while not trainer.advance():
        assert trainer.steps < before + 2000
    return trainer.steps - before


def exchange_samples(root: Path, old: int, new: int) -> None:
    (shard,) = (root / SAMPLES).glob(f"{old:08d}-*")
    shard.unlink()
    add_samples(root, new, count=8)


def test_samples_that_went_do_not_stand_for_new_ones(folder: Path) -> None:
    """The oldest are deleted where disk space is short, with a trainer or without one."""
    for number in (1, 2, 3):
        add_samples(folder, number, count=8)
    trainer = make_trainer(folder)
    once = train_until_it_waits(trainer)
    for number in (4, 5, 6):
        exchange_samples(folder, number - 3, number)
    assert once / 2 < train_until_it_waits(trainer) < 2 * once
    trainer.save()
    assert train_until_it_waits(make_trainer(folder)) == 0
    for number in (7, 8, 9):
        exchange_samples(folder, number - 3, number)
    assert once / 2 < train_until_it_waits(make_trainer(folder)) < 2 * once


def test_the_version_on_trial_is_not_deleted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "_KEPT_VERSIONS", 3)
    monkeypatch.setattr(Trainer, "_is_better", lambda _: True)
    add_samples(folder)
    trainer = make_trainer(folder)
    trainer.publish()
    write_record(folder, EngineState(trying=1))
    for _ in range(5):
        trainer.publish()
    assert version_numbers(folder) == [0, 1, 6]


def test_a_state_of_another_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever device it names it is read, and each tensor goes where its weights are."""
    add_samples(folder)
    first = make_trainer(folder)
    first.advance()
    first.save()
    load, asked = torch.load, []

    def read(*given: Any, **more: Any) -> Any:
        asked.append(more.get("map_location"))
        return load(*given, **more)

    monkeypatch.setattr(torch, "load", read)
    second = make_trainer(folder)
    assert asked == ["cpu"]
    second.student.module.to("meta")
    moved = second._beside_weights(second._average)
    assert {value.device.type for value in moved.values()} == {"meta"}


def test_it_goes_on_where_it_stopped(folder: Path) -> None:
    """Weights, optimiser and batches are those of a run without a stop."""
    add_samples(folder)
    through = make_trainer(folder)
    for _ in range(30):
        through.advance()
    other = make_folder(folder.parent / "other")
    add_samples(other)
    first = make_trainer(other)
    for _ in range(13):
        first.advance()
    first.save()
    second = make_trainer(other)
    assert second.steps == 13
    for _ in range(17):
        second.advance()
    assert same(weights_of(through), weights_of(second))
    assert same(list(through._average.values()), list(second._average.values()))


def test_versions_are_means_of_the_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the last steps; the first ones, when all is still moving, count for little."""
    monkeypatch.setattr(trainer_module, "_AVERAGED_STEPS", 10)
    add_samples(folder)
    trainer = make_trainer(folder)
    seen = []
    for _ in range(120):
        trainer.advance()
        seen.append(weights_of(trainer))
    last = weights_of(trainer)
    trainer.publish()
    assert same(last, weights_of(trainer))  # training goes on from its own weights
    assert trainer.student.module.training
    _, heads = load_heads(check_version(folder, trainer.published, "own"))
    expected = [torch.zeros_like(value) for value in last]
    for past, weights in enumerate(reversed(seen)):
        for total, value in zip(expected, weights, strict=True):
            total.add_(value, alpha=0.1 * 0.9**past)
    for found, mean, now in zip(heads.parameters(), expected, last, strict=True):
        torch.testing.assert_close(found, mean, rtol=0.0, atol=2e-3)
        assert not torch.equal(found, now)


def test_the_first_steps_are_small(folder: Path) -> None:
    """AdamW moves every weight by the whole rate at first, which trained weights do not bear."""
    add_samples(folder)
    trainer = make_trainer(folder)
    before = weights_of(trainer)
    trainer.advance()
    moved = max(
        float((a - b).abs().max()) for a, b in zip(before, weights_of(trainer), strict=True)
    )
    assert 0.0 < moved < 0.1 * trainer.options.learning_rate


def test_worse_weights_are_not_published(folder: Path) -> None:
    add_samples(folder)
    trainer = make_trainer(folder)
    for _ in range(40):
        trainer.advance()
    published = trainer.published
    for value in trainer._average.values():
        value.add_(torch.randn_like(value))
    assert trainer.publish() is None
    assert trainer.published == published


def test_a_rollback_is_learned_from(folder: Path) -> None:
    add_samples(folder)
    trainer = make_trainer(folder)
    start = weights_of(trainer)
    for _ in range(20):
        trainer.advance()
    write_record(folder, EngineState(serving=trainer.published))
    trainer.advance()
    assert not same(start, weights_of(trainer))
    write_record(folder, EngineState(serving=0, frozen=True))
    trainer.advance()
    assert same(start, weights_of(trainer))
    assert not trainer._optimizer.state


def test_a_full_disk_costs_a_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_samples(folder)
    trainer = make_trainer(folder)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("vllm_spec_ext.atomic.os.replace", full)
        for _ in range(25):
            assert trainer.advance() == ""
    assert version_numbers(folder) == [0]
    assert trainer.published == 0
    for _ in range(20):
        trainer.advance()
    assert version_numbers(folder) == [0, 1]


def test_damaged_and_foreign_states_are_named(folder: Path) -> None:
    add_samples(folder)
    trainer = make_trainer(folder)
    trainer.save()
    (folder / TRAINER_STATE).write_bytes(b"no state")
    with pytest.raises(SpecExtError, match="damaged"):
        make_trainer(folder)
    torch.save({"drafter": "other"}, folder / TRAINER_STATE)
    with pytest.raises(SpecExtError, match="another drafter"):
        make_trainer(folder)


def test_a_state_that_cannot_be_read_is_not_called_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_samples(folder)
    make_trainer(folder).save()

    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(SpecExtError, match=r"trainer.pt cannot be read: Permission") as found:
        make_trainer(folder)
    assert "delete" not in str(found.value)


@pytest.fixture
def _toy_students(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes train for the toy's own ends."""
    monkeypatch.setattr(
        trainer_module, "make_student", lambda facts, device: HeadsStudent(facts, device, ends())
    )


@pytest.mark.usefixtures("_toy_students")
def test_the_process_has_one_trainer_and_an_end(folder: Path) -> None:
    add_samples(folder)
    priority = os.nice(0)
    run_trainer(folder, budget=4.0, max_steps=25)
    assert os.nice(0) == priority  # it may be the engine's process, too
    assert version_numbers(folder) == [0, 1]
    # Its engine was killed while it was still importing torch.
    run_trainer(folder, budget=4.0, parent=os.getpid())
    assert version_numbers(folder) == [0, 1]
    run_trainer(folder, budget=4.0, parent=os.getppid(), max_steps=25)
    assert version_numbers(folder) == [0, 1, 2]
    other = FolderLock(folder / "trainer.lock")
    assert other.take()
    with pytest.raises(SpecExtError, match="another trainer"):
        run_trainer(folder, budget=4.0, max_steps=1)
    # One that an engine starts while that of the server before it still ends.
    threading.Timer(0.5, other.release).start()
    run_trainer(folder, budget=4.0, parent=os.getppid(), max_steps=25)
    assert version_numbers(folder) == [0, 1, 2, 3]
    with pytest.raises(SpecExtError, match=r"no online\.json"):
        run_trainer(folder / "nothing")
    # Its folder is taken for one, whatever is missing.
    (folder / FACTS).unlink()
    (folder / ENGINE_LOCK).touch()
    check_folder(folder, "blockwise", "own")


@pytest.mark.usefixtures("_toy_students")
def test_what_killed_processes_left_behind_is_deleted(folder: Path) -> None:
    add_samples(folder)
    left = folder / "versions" / ".v00000007.123.partial"
    left.mkdir(parents=True)
    (left / WEIGHTS_NAME).write_bytes(b"half")
    (folder / ".trainer.pt.123.partial").write_bytes(b"half")
    others = folder / ".engine.json.124.partial"  # another process may be writing it
    others.write_bytes(b"half")
    run_trainer(folder, budget=4.0, max_steps=1)
    assert list(folder.rglob(".*.partial")) == [others]


def test_versions_that_a_rollback_returns_to_are_kept(folder: Path) -> None:
    trainer = make_trainer(folder)
    for number in range(1, 40):
        write_version(folder, number, {CONFIG_NAME: b""}, "own")
    write_record(folder, EngineState(serving=9, served=(0, 4, 9)))
    add_samples(folder)
    while trainer.published < 40:
        trainer.advance()
    assert {0, 4, 9} < set(version_numbers(folder))
    assert len(version_numbers(folder)) == 16


def test_weights_that_diverge_are_not_published(folder: Path) -> None:
    add_samples(folder)
    trainer = make_trainer(folder)
    with torch.no_grad():
        next(iter(trainer.student.module.parameters())).fill_(float("inf"))
    with pytest.raises(SpecExtError, match="diverged"):
        trainer.advance()
    assert version_numbers(folder) == [0]


def test_files_are_what_the_method_serves(folder: Path) -> None:
    trainer = make_trainer(folder)
    files = trainer.student.files()
    assert set(files) == {CONFIG_NAME, WEIGHTS_NAME}
    served = folder / "served"
    served.mkdir()
    for name, data in files.items():
        (served / name).write_bytes(data)
    _, heads = load_heads(served)
    assert same(list(heads.parameters()), weights_of(trainer))
