# SPDX-License-Identifier: Apache-2.0
"""Losses against brute force, versions and shards that are damaged, budget, trials."""

import errno
import os
import random
import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from vllm_spec_ext.atomic import DiskFullError
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.online.cpu_budget import CpuBudget
from vllm_spec_ext.online.divergences import Loss, divergence, outcomes, overlap
from vllm_spec_ext.online.folder import FolderFacts, check_folder, write_record
from vllm_spec_ext.online.sample_files import (
    SampleWriter,
    make_room,
    number_of,
    read_shard,
    shards,
    write_shard,
)
from vllm_spec_ext.online.sample_pool import SamplePool
from vllm_spec_ext.online.trace import Trace
from vllm_spec_ext.online.trial import Tally, Trial, standard_errors_ahead
from vllm_spec_ext.online.versions import (
    check_version,
    drafter_hash,
    prune_versions,
    version_folder,
    version_numbers,
    write_version,
)
from vllm_spec_ext.options import OnlineOptions


def brute_force(kind: str, p: np.ndarray[Any, Any], q: np.ndarray[Any, Any]) -> float:
    def kl(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
        return float(sum(x * np.log(x / y) for x, y in zip(a, b, strict=True) if x > 0))

    if kind == "forward":
        return kl(p, q)
    if kind == "reverse":
        return kl(q, p)
    middle = (p + q) / 2
    return 0.5 * kl(p, middle) + 0.5 * kl(q, middle)


@pytest.mark.parametrize("kind", get_args(Loss))
@pytest.mark.parametrize("unlisted", [False, True])
def test_divergences_by_their_definition(kind: Loss, unlisted: bool) -> None:
    """Over the listed tokens and the tail as one; tokens that are never drafted are left out."""
    draw = np.random.default_rng(3)
    target = draw.dirichlet(np.ones(10) * 0.5)
    drafter = draw.dirichlet(np.ones(8))  # it cannot draft tokens 8 and 9
    listed = np.array([0, 3, 8]) if unlisted else np.array([0, 3, 5])
    places = torch.tensor(np.where(listed < 8, listed, -1))[None]
    probs = torch.tensor(target[listed])[None]
    tails = 1.0 - probs.sum(1)
    log_p, log_q, share = outcomes(torch.tensor(drafter).log()[None], places, probs, tails)
    kept = listed[listed < 8]
    p = np.append(target[kept], 1.0 - target[listed].sum())
    q = np.append(drafter[kept], 1.0 - drafter[kept].sum())
    assert float(share) == pytest.approx(p.sum())
    found = float(divergence(kind, log_p, log_q))
    assert found == pytest.approx(brute_force(kind, p / p.sum(), q), rel=1e-5)
    assert float(overlap(log_p, log_q)) == pytest.approx(np.minimum(p / p.sum(), q).sum(), rel=1e-5)


@pytest.mark.parametrize("kind", get_args(Loss))
def test_a_drafter_learns_the_targets_distribution(kind: Loss) -> None:
    wanted = torch.tensor([[0.6, 0.25, 0.1, 0.03, 0.02]])
    logits = torch.zeros(1, 5, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    places, probs = torch.tensor([[0, 1, 2]]), wanted[:, :3]
    for _ in range(600):
        optimizer.zero_grad()
        log_p, log_q, _ = outcomes(logits.log_softmax(-1), places, probs, 1 - probs.sum(1))
        torch.autograd.backward(divergence(kind, log_p, log_q).sum())
        optimizer.step()
    learned = logits.detach().softmax(-1)[0]
    assert learned[:3].tolist() == pytest.approx([0.6, 0.25, 0.1], abs=0.01)
    assert float(learned[3:].sum()) == pytest.approx(0.05, abs=0.01)


def test_a_hopeless_draft_still_learns() -> None:
    """Its right token has a probability that rounds to zero; its gradient must not."""
    logits = torch.tensor([[0.0, 60.0]], requires_grad=True)
    log_p, log_q, _ = outcomes(
        logits.log_softmax(-1), torch.tensor([[0]]), torch.tensor([[1.0]]), torch.tensor([0.0])
    )
    torch.autograd.backward(divergence("forward", log_p, log_q).sum())
    assert logits.grad is not None
    assert float(logits.grad[0, 0]) == pytest.approx(-1.0, abs=1e-3)


def test_acceptance_is_the_sum_over_all_tokens() -> None:
    """The mean of min(p, q) at drafted tokens is another number, but for nearly greedy ones."""
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.3, 0.5]])
    assert float(overlap(p.log(), q.log())) == pytest.approx(0.7)
    at_drafted = float((q * torch.minimum(p, q)).sum())
    assert at_drafted == pytest.approx(0.23)
    # What speculative sampling does: a draft x of q is accepted with min(1, p(x) / q(x)).
    assert float((q * torch.clamp(p / q, max=1.0)).sum()) == pytest.approx(0.7)


FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


def test_versions_appear_whole_and_are_checked(tmp_path: Path) -> None:
    write_version(tmp_path, 3, FILES, "own")
    assert version_numbers(tmp_path) == [3]
    folder = check_version(tmp_path, 3, "own")
    assert (folder / "config.json").read_bytes() == b"{}"
    with pytest.raises(SpecExtError, match="another drafter"):
        check_version(tmp_path, 3, "other")
    with pytest.raises(SpecExtError, match="no whole version"):
        check_version(tmp_path, 4, "own")
    with pytest.raises(SpecExtError, match="only one trainer"):
        write_version(tmp_path, 3, FILES, "own")
    (folder / "model.safetensors").write_bytes(b"weightz")
    with pytest.raises(SpecExtError, match="damaged"):
        check_version(tmp_path, 3, "own")
    (folder / "model.safetensors").unlink()
    with pytest.raises(SpecExtError, match="no whole version"):
        check_version(tmp_path, 3, "own")


def test_a_copied_version_is_not_another(tmp_path: Path) -> None:
    folder = write_version(tmp_path, 1, FILES, "own")
    folder.rename(version_folder(tmp_path, 2))
    with pytest.raises(SpecExtError, match="says that it is version 1"):
        check_version(tmp_path, 2, "own")


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_no_half_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_version(tmp_path, 1, FILES, "own")
    monkeypatch.setattr("os.rename", full_disk)
    with pytest.raises(DiskFullError):
        write_version(tmp_path, 2, FILES, "own")
    assert version_numbers(tmp_path) == [1]
    assert [path.name for path in (tmp_path / "versions").iterdir()] == ["v00000001"]


def test_old_versions_go_but_for_those_in_use(tmp_path: Path) -> None:
    for number in range(6):
        write_version(tmp_path, number, FILES, "own")
    prune_versions(tmp_path, {0, 2}, 3)
    assert version_numbers(tmp_path) == [0, 2, 5]


def test_drafters_differ_by_any_byte() -> None:
    assert drafter_hash(FILES) == drafter_hash(dict(reversed(FILES.items())))
    assert drafter_hash(FILES) != drafter_hash({**FILES, "config.json": b"{ }"})


def test_a_folder_belongs_to_one_drafter(tmp_path: Path) -> None:
    options = OnlineOptions(folder=str(tmp_path))
    facts = FolderFacts(
        method="blockwise", target="t", drafter="own", vocab_size=9, options=options
    )
    check_folder(tmp_path / "new", "blockwise", "own")
    write_record(tmp_path, facts)
    check_folder(tmp_path, "blockwise", "own")
    with pytest.raises(SpecExtError, match="belongs to another drafter"):
        check_folder(tmp_path, "blockwise", "other")
    (tmp_path / "online.json").write_text("{")
    with pytest.raises(SpecExtError, match="damaged"):
        check_folder(tmp_path, "blockwise", "own")


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["report.txt"], "found report.txt, and no online.json"),
        (["a", "b", "c", "d", "e"], "found a, b, c and 2 more, and no"),
        (["engine.lock", "versions", "report.txt"], "found report.txt, and no"),
        (["samples", "versions"], "found samples, versions, and no"),  # as others call theirs, too
        ([".bashrc"], "found .bashrc, and no"),
    ],
)
def test_a_folder_of_something_else_is_refused(
    names: list[str], found: str, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    with pytest.raises(SpecExtError, match=re.escape(found)) as error:
        check_folder(tmp_path, "blockwise", "own")
    assert "expected a new or empty folder" in str(error.value)
    assert "Give another one" in str(error.value)


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["lost+found"],  # a new volume
        ["engine.lock"],
        ["engine.lock", "versions", ".online.json.77.partial", ".nfs0000abc"],
        ["engine.lock", "versions", "samples", "engine.json", "trainer.pt"],  # without a record
    ],
)
def test_a_folder_that_is_begun_goes_on(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    check_folder(tmp_path, "blockwise", "own")


def test_what_lies_beside_a_record_stays(tmp_path: Path) -> None:
    options = OnlineOptions(folder=str(tmp_path))
    facts = FolderFacts(method="nar", target="t", drafter="own", vocab_size=9, options=options)
    write_record(tmp_path, facts)
    (tmp_path / "notes.txt").touch()
    check_folder(tmp_path, "nar", "own")


def trace(number: int, length: int = 20) -> Trace:
    rows = np.arange(4, length - 1, dtype=np.int32)
    starts = rows[:-3:2]
    return Trace(
        token_ids=np.arange(number, number + length, dtype=np.int32),
        rows=rows,
        top_tokens=np.full((len(rows), 2), number, np.int32),
        top_probs=np.full((len(rows), 2), 0.4, np.float32),
        tails=np.full(len(rows), 0.2, np.float32),
        starts=starts,
        failed_at=np.ones(len(starts), np.int32),
        chances=np.ones(len(starts), np.float32),
        states=torch.full((len(starts), 3), float(number), dtype=torch.bfloat16),
    )


def test_damaged_shards_are_named(tmp_path: Path) -> None:
    path = write_shard(tmp_path, 1, [trace(5)])
    assert read_shard(path)[0].token_ids.tolist() == list(range(5, 25))
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"!")
    with pytest.raises(SpecExtError, match="damaged"):
        read_shard(path)
    path.write_bytes(data[:40])
    with pytest.raises(SpecExtError, match="damaged"):
        read_shard(path)


def columns(traces: Any) -> dict[str, torch.Tensor]:
    values = [int(t.top_tokens[0, 0]) for t in traces for _ in t.starts]
    return {"number": torch.tensor(values)}


def test_a_pool_reads_what_is_new_and_leaves_out_what_is_damaged(tmp_path: Path) -> None:
    pool = SamplePool(tmp_path, columns, likeliest=2)
    assert pool.refresh() == 0
    first = write_shard(tmp_path, 1, [trace(n) for n in range(40)])
    broken = write_shard(tmp_path, 2, [trace(50)])
    broken.write_bytes(b"nothing")
    assert pool.refresh() == 0
    held = pool.num_positions
    assert held > 0
    assert pool.refresh() == 0
    trained = set(pool._train[1]["number"].tolist())
    apart = set(pool.held_out()["number"].tolist())
    assert apart
    assert trained | apart == set(range(40))
    assert not trained & apart
    write_shard(tmp_path, 3, [trace(60)])
    first.unlink()
    assert pool.refresh() == held
    assert pool.position == 3
    assert set(pool._train[3].get("number", torch.tensor([60])).tolist()) == {60}
    assert 1 not in pool._train


def test_files_of_others_make_no_room(tmp_path: Path) -> None:
    """A folder `samples` may hold a model, too, where `online` names a project's folder."""
    model = tmp_path / "00000000-model.safetensors"
    for path in (model, tmp_path / "model.safetensors"):
        path.write_bytes(bytes(5000))
    mine = [write_shard(tmp_path, number, [trace(number)]) for number in (1, 2, 3)]
    make_room(tmp_path, sum(path.stat().st_size for path in mine), random.Random(0))
    assert all(path.exists() for path in mine)
    make_room(tmp_path, 1, random.Random(0))
    assert sum(path.exists() for path in mine) == 1
    assert model.exists()
    assert (tmp_path / "model.safetensors").exists()
    pool = SamplePool(tmp_path, columns, likeliest=2)
    pool.refresh()
    assert not pool._bad


def test_samples_of_other_widths(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The engine was started again with another number of likeliest tokens."""
    write_shard(tmp_path, 1, [trace(n) for n in range(4)])
    write_shard(tmp_path, 2, [trace(n).cut(1) for n in range(4)])

    def widths(traces: Any) -> dict[str, torch.Tensor]:
        return {"probs": torch.cat([torch.from_numpy(t.top_probs) for t in traces])}

    wide, narrow = (SamplePool(tmp_path, widths, likeliest=m) for m in (2, 1))
    wide.refresh()
    assert sorted(wide._train) == [1]
    assert "online.likeliest=1, expected 2 or more" in caplog.text
    narrow.refresh()
    assert sorted(narrow._train) == [1, 2]
    assert narrow.batch(50, 0.5, np.random.default_rng(0))["probs"].shape == (50, 1)
    cut = trace(5).cut(1)
    np.testing.assert_allclose(cut.top_probs.sum(axis=1) + cut.tails, 1.0, rtol=1e-6)


def test_batches_mix_the_newest_with_all(tmp_path: Path) -> None:
    for number in range(1, 31):
        write_shard(tmp_path, number, [trace(number)])
    pool = SamplePool(tmp_path, columns, likeliest=2)
    pool.refresh()
    random_state = np.random.default_rng(0)
    numbers = pool.batch(4000, 0.5, random_state)["number"].numpy()
    assert len(numbers) == 4000
    assert 0.2 < (numbers <= 22).mean() < 0.5  # of the half that is drawn from all
    newest = pool.batch(400, 0.0, random_state)["number"].numpy()
    assert newest.min() > 20


def test_room_is_made_among_the_older_half(tmp_path: Path) -> None:
    for number in range(1, 41):
        write_shard(tmp_path, number, [trace(number)])
    size = shards(tmp_path)[0].stat().st_size
    make_room(tmp_path, 20 * size, random.Random(0))
    left = [number_of(path) for path in shards(tmp_path)]
    assert len(left) == 20
    assert left[-1] == 40
    assert min(left) < 25  # some of the old text stays


def test_a_writer_writes_all_and_goes_on_behind_it(tmp_path: Path) -> None:
    options = OnlineOptions(folder=str(tmp_path))
    for _ in range(2):
        writer = SampleWriter(tmp_path, options)
        for number in range(5):
            writer.put(trace(number))
        writer.close()
        assert writer.pending_bytes == 0
        assert writer.num_starts == 5 * len(trace(0).starts)
    assert [number_of(path) for path in shards(tmp_path)] == [1, 2]


def test_a_budget_is_kept() -> None:
    """Work of 0.1 s of processor time at a twentieth of a core takes two seconds."""
    now, used = 0.0, 0.0
    budget = CpuBudget(0.05, used=lambda: used, clock=lambda: now)
    for _ in range(50):
        used, now = used + 0.1, now + 0.1
        now += budget.owed()
        assert used <= 0.05 * now + 1e-9
    assert now == pytest.approx(100.0)
    now += 1000.0  # idle time is not saved up
    budget.forgive()
    for _ in range(10):
        used, now = used + 0.1, now + 0.1
        now += budget.owed()
    assert now == pytest.approx(1120.0)
    used, now = used + 60.0, now + 60.0  # a step of a large drafter
    for _ in range(20):
        now += min(30.0, budget.owed())
    assert budget.owed() > 0


def tally(values: list[int]) -> Tally:
    found = Tally()
    for value in values:
        found.add(value)
    return found


def test_standard_errors() -> None:
    one, other = [0, 1, 2, 3] * 25, [0, 0, 1, 2] * 25
    variance = np.var(one) / 99 + np.var(other) / 99
    expected = (np.mean(one) - np.mean(other)) / np.sqrt(variance)
    assert standard_errors_ahead(tally(one), tally(other)) == pytest.approx(expected)
    assert standard_errors_ahead(tally([]), tally(one)) == 0.0


@pytest.mark.parametrize(("gain", "kept"), [(0.4, True), (-0.4, False)])
def test_a_trial_keeps_what_is_better(gain: float, kept: bool) -> None:
    trial, draw = Trial(400, 0.0, seed=1), random.Random(2)
    trial.begin()
    roles = []
    while (decision := trial.decision()) is None:
        role = trial.role(guards=False)
        roles.append(role)
        chance = 0.5 + (gain / 4 if role == "trial" else 0.0)
        trial.count(role, sum(draw.random() < chance for _ in range(4)))
    assert decision.kept is kept
    assert 0.4 < roles.count("trial") / len(roles) < 0.6
    assert decision.after - decision.before == pytest.approx(gain, abs=0.25)


def test_versions_see_the_same_traffic() -> None:
    """Traffic that gets easier while a trial runs must speak for neither."""
    kept = 0
    for seed in range(40):
        trial, draw = Trial(400, 0.0, seed=seed), random.Random(100 + seed)
        trial.begin()
        step = 0
        while (decision := trial.decision()) is None:
            step += 1
            chance = min(0.9, step / 1000)
            trial.count(trial.role(guards=False), sum(draw.random() < chance for _ in range(4)))
        kept += decision.kept
    assert kept <= 14  # one standard error is passed by chance in a sixth of the trials


def test_a_handful_of_steps_condemns_no_version() -> None:
    """Two that are alike have no spread, and seem exact."""
    trial = Trial(400, 0.1, seed=0)
    for _ in range(6):
        trial.count("guard", 2)
    for _ in range(200):
        trial.count("serving", 0)
    assert not trial.has_fallen()
    for _ in range(30):
        trial.count("guard", 2)
    assert trial.has_fallen()


def test_a_small_share_of_guards_is_enough_in_time() -> None:
    trial, draw = Trial(400, 0.005, seed=0), random.Random(1)
    for _ in range(40_000):
        role = trial.role(guards=True)
        trial.count(role, draw.randint(1, 3) if role == "guard" else 0)
    assert trial.has_fallen()


def test_weights_of_the_start_come_back_where_learning_did_harm() -> None:
    trial, draw = Trial(400, 0.1, seed=0), random.Random(0)
    roles = [trial.role(guards=True) for _ in range(4000)]
    assert 0.07 < roles.count("guard") / len(roles) < 0.13
    for role in roles[:1000]:
        trial.count(role, draw.randint(0, 4))
    assert not trial.has_fallen()
    for role in roles:
        trial.count(role, draw.randint(0, 4) if role == "guard" else draw.randint(0, 2))
    assert trial.has_fallen()
    trial.changed()
    assert not trial.has_fallen()
    assert "trial" not in roles
