# SPDX-License-Identifier: Apache-2.0
"""The adaptive overlay: decay, cap, eviction, constant memory, exactly-once learning."""

import os
from pathlib import Path

import numpy as np
import pytest
from unreadable_files import make_unreadable, said_to_be_unreadable

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.adaptive_ngram import overlay as module
from vllm_spec_ext.proposers.adaptive_ngram.learning import Learner
from vllm_spec_ext.proposers.adaptive_ngram.overlay import (
    OverlayPool,
    find_row,
    learn,
    load_overlay,
    save_overlay,
)
from vllm_spec_ext.proposers.adaptive_ngram.overlay_files import (
    file_to_read,
    file_to_save,
    merge_overlays,
)
from vllm_spec_ext.proposers.adaptive_ngram.settings import NgramSettings
from vllm_spec_ext.proposers.base import UNSALTED, RequestStep

V = 1000


def row_of(pool: OverlayPool, slot: int, w1: int, w2: int) -> dict[int, float]:
    """Successors and their weights as of the row's last update."""
    arrays = pool.arrays
    row = find_row(arrays, slot, w1, w2)
    if row < 0:
        return {}
    pairs = zip(arrays.tokens[slot, row], arrays.weights[slot, row], strict=True)
    return {int(token): float(weight) for token, weight in pairs if weight > 0}


def teach(pool: OverlayPool, slot: int, tokens: list[int], start: int = 0, **how: float) -> int:
    ids = np.array(tokens, np.int32)
    half_life, step, cap = how.get("half_life", 0.0), how.get("step", 1.0), how.get("cap", 3.0)
    return learn(pool.arrays, slot, ids, start, V, True, half_life, step, cap)


def make_pool(slots: int = 1, buckets: int = 64) -> tuple[OverlayPool, int]:
    pool = OverlayPool(slots, buckets)
    slot = pool.acquire()
    assert slot is not None
    return pool, slot


def test_weights_by_hand() -> None:
    pool, slot = make_pool()
    assert teach(pool, slot, [1, 2, 3, 1, 2, 4, 1, 2, 3]) == 8
    assert row_of(pool, slot, 1, 2) == {3: 2.0, 4: 1.0}
    assert row_of(pool, slot, V, 2) == {3: 2.0, 4: 1.0}
    assert row_of(pool, slot, 9, 9) == {}


def test_decay_and_cap() -> None:
    pool, slot = make_pool()
    # Positions 2 and 5 teach (1, 2) -> 3 three tokens apart.
    teach(pool, slot, [1, 2, 3, 1, 2, 3], half_life=3.0)
    assert row_of(pool, slot, 1, 2)[3] == pytest.approx(1.5)
    pool, slot = make_pool()
    teach(pool, slot, [1, 2, 3] * 10, cap=2.5)
    assert row_of(pool, slot, 1, 2)[3] == pytest.approx(2.5)


def test_full_row_gives_up_its_lightest_successor() -> None:
    pool, slot = make_pool()
    for token in [10, 10, 11, 12, 13, 14, 15, 16, 17, 18]:
        teach(pool, slot, [1, 2, token], start=2)
    row = row_of(pool, slot, 1, 2)
    assert len(row) == 8
    assert row[10] == 2.0
    assert 18 in row


def test_full_bucket_evicts_the_oldest_row() -> None:
    pool, slot = make_pool(buckets=1)
    for context in range(1, 6):
        ids = np.array([0, context, 7], np.int32)
        learn(pool.arrays, slot, ids, 2, V, False, 0.0, 1.0, 3.0)
    assert row_of(pool, slot, 0, 1) == {}
    assert row_of(pool, slot, 0, 5) == {7: 1.0}
    assert pool.arrays.evictions[slot] == 1


def test_bytes_are_constant_over_a_million_inserts() -> None:
    pool, slot = make_pool(buckets=256)
    before = pool.num_bytes
    addresses = [array.ctypes.data for array in pool.arrays]
    tokens = np.random.default_rng(0).integers(0, V, 500_000).astype(np.int32)
    assert learn(pool.arrays, slot, tokens, 0, V, True, 500.0, 1.0, 3.0) == 499_999
    assert pool.num_bytes == before
    assert [array.ctypes.data for array in pool.arrays] == addresses
    assert pool.rows_used(slot) <= 1024
    assert float(pool.arrays.weights.max()) <= 3.0


def test_a_released_slot_comes_back_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, slot = make_pool()
    teach(pool, slot, [1, 2, 3])
    pool.release(slot)
    assert pool.acquire() == slot
    assert row_of(pool, slot, 1, 2) == {}
    assert pool.rows_used(slot) == 0
    # The generation counter starts over: keys of its first round must stay dead.
    monkeypatch.setattr(module, "LAST_GENERATION", int(pool.arrays.generations[slot]))
    teach(pool, slot, [1, 2, 3])
    for _ in range(4):
        pool.clear(slot)
        assert row_of(pool, slot, 1, 2) == {}
    assert pool.acquire() is None


def test_ids_outside_the_vocabulary_are_skipped() -> None:
    pool, slot = make_pool()
    assert teach(pool, slot, [1, V, 2, -1, 3, 4]) == 1
    assert row_of(pool, slot, V, 3) == {4: 1.0}


def make_learner(**options: object) -> Learner:
    given = {"overlay": "both", "half_life": 0.0, "request_buckets": 64, "shared_buckets": 64}
    return Learner(NgramSettings.model_validate(given | options), 2, V)


def step(
    name: str,
    tokens: list[int],
    new: int = 1,
    prompt: int = 1,
    group: str | None = UNSALTED,
) -> RequestStep:
    ids = np.array(tokens, np.int32)
    said = tokens[len(tokens) - new :]
    return RequestStep(name, ids, prompt, said, room=8, share_group=group)


def test_each_token_is_learned_once() -> None:
    learner = make_learner()
    tokens = [1, 2, 3, 4, 1, 2, 3, 4]
    learner.learn([step("a", tokens[:3], prompt=2)], 0.0)
    learner.learn([step("a", tokens[:5], new=2)], 0.0)
    slot = learner.learn([step("a", tokens, new=3)], 0.0)[0]
    for pool, at in ((learner.requests, slot), (learner.shared, 0)):
        assert row_of(pool, at, 1, 2) == {3: 2.0}
        assert row_of(pool, at, 2, 3) == {4: 2.0}
        assert pool.arrays.clocks[at] == 7


def test_preemption_teaches_the_shared_overlay_nothing_twice() -> None:
    learner = make_learner()
    tokens = [1, 2, 3, 4, 5]
    learner.learn([step("a", tokens)], 0.0)
    learner.finish(["a", "never seen"])
    slot = learner.learn([step("a", [*tokens, 6])], 0.0)[0]
    assert row_of(learner.shared, 0, 1, 2) == {3: 1.0}
    assert row_of(learner.shared, 0, 4, 5) == {6: 1.0}
    assert row_of(learner.requests, slot, 1, 2) == {3: 1.0}  # rebuilt, once
    learner.finish(["a"])
    learner.learn([step("a", [1, 2, 3])], 0.0)  # another request under the same id
    assert row_of(learner.shared, 0, 1, 2) == {3: 2.0}


def test_the_next_turn_of_a_session_teaches_the_shared_overlay_nothing_twice() -> None:
    """vLLM takes the last token of a turn back."""
    learner = make_learner()
    learner.learn([step("a", [1, 2, 3, 4], new=4)], 0.0)
    for token in (5, 6):
        learner.learn([step("a", [1, 2, 3, 4, 5, 6][:token])], 0.0)
    learner.finish(["a"])
    learner.learn([step("a", [1, 2, 3, 4, 5, 7, 8], prompt=7, new=0)], 0.0)
    assert row_of(learner.shared, 0, 1, 2) == {3: 1.0}
    assert row_of(learner.shared, 0, 3, 4) == {5: 1.0}
    assert row_of(learner.shared, 0, 4, 5) == {6: 1.0, 7: 1.0}
    learner.finish(["a"])  # preempted right after it came back
    learner.learn([step("a", [1, 2, 3, 4, 5, 7, 8, 9], prompt=7)], 0.0)
    assert row_of(learner.shared, 0, 4, 5) == {6: 1.0, 7: 1.0}


def test_roll_back_resets_the_slot() -> None:
    learner = make_learner(overlay="request")
    learner.learn([step("a", [1, 2, 3, 4])], 0.0)
    slot = learner.learn([step("a", [1, 2, 9])], 0.0)[0]
    assert row_of(learner.requests, slot, 1, 2) == {9: 1.0}
    assert row_of(learner.requests, slot, 2, 3) == {}


def test_windows() -> None:
    learner = make_learner(overlay="request", prompt_window=2)
    slot = learner.learn([step("a", [1, 2, 3, 4], prompt=3)], 0.0)[0]
    assert row_of(learner.requests, slot, 1, 2) == {3: 1.0}
    assert row_of(learner.requests, slot, V, 1) == {}
    learner = make_learner(overlay="request", learn_prompt=False)
    slot = learner.learn([step("a", [1, 2, 3, 4], prompt=3)], 0.0)[0]
    assert row_of(learner.requests, slot, 1, 2) == {}
    assert row_of(learner.requests, slot, 2, 3) == {4: 1.0}
    learner = make_learner(preset="aded_reference", overlay="request")
    for length in (3, 4, 5):  # published: the window is learned anew at every step
        slot = learner.learn([step("a", [1, 2, 3, 4, 5][:length])], 0.0)[0]
    assert row_of(learner.requests, slot, 1, 2)[3] == pytest.approx(0.04 * 3)


def test_more_requests_than_slots() -> None:
    learner = make_learner(overlay="request")
    slots = learner.learn([step(name, [1, 2, 3]) for name in "abc"], 0.0)
    assert sorted(slots) == [-1, 0, 1]
    # "a" was not seen in this step: its slot goes to a new request.
    learner.learn([step("d", [1, 2, 3])], 0.0)
    assert "a" not in learner.states
    learner.finish(list("abcd"))
    assert not learner.states


def test_save_and_load(tmp_path: Path) -> None:
    pool, slot = make_pool()
    teach(pool, slot, [1, 2, 3, 1, 2, 3])
    path = tmp_path / "sub" / "overlay.safetensors"
    save_overlay(path, pool, "sha256:a", V)
    assert [item.name for item in path.parent.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600  # it holds what people wrote
    other, _ = make_pool()
    load_overlay(path, other, "sha256:a", V)
    assert row_of(other, 0, 1, 2) == {3: 2.0}
    assert other.arrays.clocks[0] == pool.arrays.clocks[0]
    with pytest.raises(SpecExtError, match="another tokenizer"):
        load_overlay(path, other, "sha256:b", V)
    with pytest.raises(SpecExtError, match="expected"):
        load_overlay(path, other, "sha256:a", V + 1)
    with pytest.raises(SpecExtError, match="shared_buckets"):
        load_overlay(path, make_pool(buckets=32)[0], "sha256:a", V)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(SpecExtError, match="is damaged"):
        load_overlay(path, other, "sha256:a", V)
    pool.arrays.weights[0, 0, 0] = np.inf
    save_overlay(path, pool, "sha256:a", V)
    with pytest.raises(SpecExtError, match="weights that are no numbers"):
        load_overlay(path, other, "sha256:a", V)


def saved(path: Path, tokens: list[int], buckets: int = 64, fingerprint: str = "sha256:a") -> Path:
    pool, slot = make_pool(buckets=buckets)
    teach(pool, slot, tokens)
    save_overlay(path, pool, fingerprint, V)
    return path


def test_overlays_of_replicas_become_one(tmp_path: Path) -> None:
    one = saved(tmp_path / "one", [1, 2, 3, 1, 2, 4])
    two = saved(tmp_path / "two", [7, 8, 9, 1, 2, 3, 5, 5, 5, 5, 5, 5])
    merged = tmp_path / "new" / "merged"
    assert merge_overlays([one, two], merged) == 15
    pool, slot = make_pool()
    load_overlay(merged, pool, "sha256:a", V)
    assert row_of(pool, slot, 1, 2) == {3: 1.0, 4: 1.0}
    assert row_of(pool, slot, 7, 8) == {9: 1.0}
    clock = pool.arrays.clocks[slot]
    assert clock == 11
    ages = [
        clock - pool.arrays.stamps[slot, find_row(pool.arrays, slot, *c)] for c in ((1, 2), (5, 5))
    ]
    assert ages == [0, 0]  # as in the file where each is youngest
    assert teach(pool, slot, [1, 2, 3]) == 2  # it goes on learning
    assert row_of(pool, slot, 1, 2)[3] == 2.0


def test_what_replicas_started_from_is_not_learned_again(tmp_path: Path) -> None:
    """Round by round they start from what was merged, and are merged."""
    merged = saved(tmp_path / "merged", [1, 2, 3, 1, 2, 4])
    for _ in range(3):
        replicas = []
        for name in ("one", "two"):
            pool, slot = make_pool()
            load_overlay(merged, pool, "sha256:a", V)
            save_overlay(tmp_path / name, pool, "sha256:a", V)
            replicas.append(tmp_path / name)
        merge_overlays(replicas, merged)
    pool, slot = make_pool()
    load_overlay(merged, pool, "sha256:a", V)
    assert row_of(pool, slot, 1, 2) == {3: 1.0, 4: 1.0}


def test_a_home_folder_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert file_to_read("~/{replica}.overlay") == tmp_path / "merged.overlay"
    assert file_to_save("~/mine.overlay") == tmp_path / "mine.overlay"


def test_the_youngest_stay_where_a_bucket_is_full(tmp_path: Path) -> None:
    tokens = list(range(0, 900, 3))
    files = [saved(tmp_path / "a", tokens, buckets=16), saved(tmp_path / "b", tokens[::-1], 16)]
    merge_overlays(files, tmp_path / "merged")
    pool, slot = make_pool(buckets=16)
    load_overlay(tmp_path / "merged", pool, "sha256:a", V)
    assert pool.rows_used(slot) == 64
    ages = pool.arrays.clocks[slot] - pool.arrays.stamps[slot]
    assert ages.max() < len(tokens) / 2


def test_overlays_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    one = saved(tmp_path / "one", [1, 2, 3])
    (tmp_path / "broken").write_bytes(b"no")
    for other, words in (
        (saved(tmp_path / "larger", [1, 2, 3], 128), "512 rows, expected"),
        (saved(tmp_path / "foreign", [1, 2, 3], fingerprint="sha256:b"), "merge overlays of one"),
        (tmp_path / "broken", "overlay .*broken is damaged .*; leave it out"),
    ):
        with pytest.raises(SpecExtError, match=words):
            merge_overlays([one, other], tmp_path / "merged")
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(1)}, tmp_path / "else")
    with pytest.raises(SpecExtError, match="give files that adaptive_ngram saved"):
        merge_overlays([tmp_path / "else"], tmp_path / "merged")
    make_unreadable(tmp_path / "else")
    with said_to_be_unreadable(tmp_path / "else"):
        merge_overlays([tmp_path / "else"], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_files_of_replicas() -> None:
    name = "overlays/{replica}.safetensors"
    assert file_to_read(name) == Path("overlays/merged.safetensors")
    assert str(os.getpid()) in str(file_to_save(name))
    assert file_to_read("a") == file_to_save("a") == Path("a")
