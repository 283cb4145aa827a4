# SPDX-License-Identifier: Apache-2.0
"""Shared overlays hold one share group each, and the file holds what may be in it."""

import errno
import logging
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import RequestOptions
from vllm_spec_ext.proposers.adaptive_ngram import AdaptiveNgram, drafter
from vllm_spec_ext.proposers.adaptive_ngram.options import AdaptiveNgramOptions
from vllm_spec_ext.proposers.adaptive_ngram.overlay import check_overlay
from vllm_spec_ext.proposers.adaptive_ngram.overlay_files import file_to_save
from vllm_spec_ext.proposers.adaptive_ngram.settings import NgramSettings
from vllm_spec_ext.proposers.adaptive_ngram.shared_overlays import SharedOverlays
from vllm_spec_ext.proposers.base import (
    UNSALTED,
    EngineHandle,
    RequestStep,
    StepContext,
    TargetFacts,
)

V = 50
PROMPT = [1, 2]


class Tokenizer:
    """Just a vocabulary."""

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(V)}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [len(word) % V for word in text.split()]


ENGINE = EngineHandle(V, 4096, 4, 8, "MODEL", Tokenizer)


def started(engine: EngineHandle = ENGINE, **options: object) -> AdaptiveNgram:
    given = {"overlay": "shared", "shared_buckets": 64, "backoff": "off", **options}
    proposer = AdaptiveNgram(NgramSettings.model_validate(given))
    proposer.start(engine)
    return proposer


def request(name: str, group: str | None, *more: int, remember: bool = True) -> RequestStep:
    ids = np.array([*PROMPT, *more], np.int32)
    options = RequestOptions(remember=remember)
    return RequestStep(name, ids, len(PROMPT), ids[-1:].tolist(), 1, options, share_group=group)


def drafts(proposer: AdaptiveNgram, *requests: RequestStep) -> list[list[int]]:
    found = [draft.tokens.tolist() for draft in proposer.propose(StepContext(requests))]
    proposer.finish([request.request_id for request in requests])
    return found


@pytest.mark.parametrize("overlay", ["shared", "both"])
@pytest.mark.parametrize("search", ["best_first", "mcts"])
def test_groups_never_see_each_others_tokens(overlay: str, search: str) -> None:
    proposer = started(overlay=overlay, search=search)
    groups = ["a", "b", UNSALTED, None]
    for i, group in enumerate(groups):
        assert drafts(proposer, request(f"before-{i}", group)) == [[]]
        drafts(proposer, request(f"teach-{i}", group, 10 + i))
    for i, group in enumerate(groups):
        assert drafts(proposer, request(f"after-{i}", group)) == [[] if group is None else [10 + i]]
    # The same in one batch, in any order.
    batch = [request(f"batch-{i}", group) for i, group in enumerate(reversed(groups))]
    assert drafts(proposer, *batch) == [[], [12], [11], [10]]


def test_a_request_may_teach_the_others_nothing() -> None:
    """And learn from them all the same."""
    proposer = started()
    drafts(proposer, request("private", "a", 10, remember=False))
    assert drafts(proposer, request("next", "a")) == [[]]
    drafts(proposer, request("public", "a", 11))
    assert drafts(proposer, request("private", "a", remember=False)) == [[11]]


def test_a_request_that_comes_back_in_another_group_is_learned_there() -> None:
    proposer = started()
    drafts(proposer, request("same-id", "a", 10))
    drafts(proposer, request("same-id", "b", 10))
    assert drafts(proposer, request("x", "a"), request("y", "b")) == [[10], [10]]


def test_many_groups_take_turns_in_few_overlays() -> None:
    proposer = started(max_cache_salts=2)
    size = proposer.drafter.learner.shared.num_bytes
    drafts(proposer, request("u", UNSALTED, 40))
    for i in range(200):
        group = f"salt {i}"
        assert drafts(proposer, request(f"new-{i}", group)) == [[]], "emptied before"
        drafts(proposer, request(f"teach-{i}", group, i % V))
        assert drafts(proposer, request(f"know-{i}", group)) == [[i % V]]
    assert drafts(proposer, request("last", "salt 198"), request("u", UNSALTED)) == [[48], [40]]
    assert proposer.drafter.learner.shared.num_bytes == size
    assert proposer.drafter.learner.groups.occupancy()[0] <= 3 * 2


def test_a_running_request_teaches_anew_what_its_group_lost() -> None:
    proposer = started(max_cache_salts=1)
    running = request("running", "a", 10)
    proposer.propose(StepContext([running]))
    drafts(proposer, request("other", "b", 11))  # takes the only overlay
    proposer.propose(StepContext([running]))
    assert drafts(proposer, request("x", "a")) == [[10]]


def test_more_groups_in_a_step_than_overlays() -> None:
    overlays = SharedOverlays(2, 16)
    found = overlays.slots(["a", None, "b", "c", UNSALTED])
    assert found == {None: -1, "a": 1, "b": 2, "c": -1, UNSALTED: 0}
    found = overlays.slots(["c", "b"])
    assert found == {None: -1, "c": 1, "b": 2}, "a made room, unused for longest"


def test_the_file_holds_what_was_said_without_a_salt(tmp_path: Path) -> None:
    path = tmp_path / "overlay.safetensors"
    proposer = started(overlay_file=str(path))
    drafts(proposer, request("u", UNSALTED, 10))
    drafts(proposer, request("a", "a", 11))
    drafts(proposer, request("n", None, 12))
    proposer.close()
    again = started(overlay_file=str(path))
    assert (again.drafter.learner.shared.arrays.keys[0] > 0).sum() == 1
    assert not again.drafter.learner.shared.arrays.keys[1:].any()
    assert drafts(again, request("x", UNSALTED), request("y", "a")) == [[10], []]


def test_one_process_of_a_deployment_writes_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "overlay.safetensors"
    options: dict[str, Any] = {"overlay_file": str(path), "overlay_save_every": 1}
    first = started(**options)
    drafts(first, request("u", UNSALTED, 10))
    assert first.drafter._saving is not None
    first.drafter._saving.join()
    saved = path.read_bytes()
    with caplog.at_level(logging.INFO, "vllm.spec_ext"):
        second = started(replace(ENGINE, may_write_files=False), **options)
    assert [str(path) in record.message for record in caplog.records] == [True]
    assert drafts(second, request("v", UNSALTED)) == [[10]], "read it has"
    drafts(second, request("w", UNSALTED, 11))
    second.close()
    assert path.read_bytes() == saved
    first.close()
    assert path.exists()


def test_each_replica_saves_a_file_of_its_own(tmp_path: Path) -> None:
    pattern = str(tmp_path / "{replica}.safetensors")
    second = started(replace(ENGINE, may_write_files=False), overlay_file=pattern)
    drafts(second, request("u", UNSALTED, 10))
    second.close()
    assert file_to_save(pattern).exists()
    other_rank = replace(ENGINE, may_write_files=False, may_write_own_files=False)
    third = started(other_rank, overlay_file=str(tmp_path / "other-{replica}.safetensors"))
    drafts(third, request("u", UNSALTED, 10))
    third.close()
    assert len([*tmp_path.iterdir()]) == 1


def test_what_was_learned_is_saved_by_the_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers may be killed without a word."""
    path, now = tmp_path / "overlay.safetensors", time.monotonic()
    proposer = started(overlay_file=str(path))
    drafts(proposer, request("u", UNSALTED, 10))
    assert proposer.drafter._saving is None
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    drafts(proposer, request("v", UNSALTED, 10))
    assert proposer.drafter._saving is not None
    proposer.drafter._saving.join()
    assert path.exists()
    proposer.drafter._saving = None
    monkeypatch.setattr(time, "monotonic", lambda: now + 200)
    drafts(proposer)
    assert proposer.drafter._saving is None, "nothing was learned"


def test_what_was_learned_is_saved_by_the_minute_on_an_idle_server_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter, "_SAVED_AFTER_S", 1.0)
    path = tmp_path / "overlay.safetensors"
    proposer = started(overlay_file=str(path))
    drafts(proposer, request("u", UNSALTED, 10))
    assert not path.exists()
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    drafts(proposer, request("v", UNSALTED, 11))
    assert proposer.drafter._save_later is not None
    proposer.close()
    path.unlink()
    time.sleep(1.5)
    assert not path.exists(), "nothing is written behind the end"


def test_a_file_that_cannot_be_read_is_refused_before_weights_load(tmp_path: Path) -> None:
    path = tmp_path / "overlay.safetensors"
    first = started(overlay_file=str(path))
    drafts(first, request("u", UNSALTED, 10))
    first.close()
    facts = TargetFacts("MODEL", V, None, 8, Tokenizer)

    def check(facts: TargetFacts = facts, **options: Any) -> None:
        given = {"overlay": "both", "overlay_file": str(path), **options}
        AdaptiveNgram.check(AdaptiveNgramOptions.model_validate(given), facts)

    check(shared_buckets=64)
    with pytest.raises(SpecExtError, match="shared_buckets must be as it was"):
        check(shared_buckets=128)
    with pytest.raises(SpecExtError, match=r"found \('adaptive_ngram.overlay', '1', '.*expected"):
        check(replace(facts, vocab_size=V + 1), shared_buckets=64)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(SpecExtError, match=r"overlay_file .* is damaged .*; delete the file or"):
        check()
    with pytest.raises(SpecExtError, match="is a folder, expected a file"):
        check(overlay_file=str(tmp_path))


def test_an_overlay_that_may_not_be_read_is_not_to_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is whole, and holds what months of requests taught."""
    import safetensors

    path = tmp_path / "overlay.safetensors"
    path.touch()

    def refuse(name: str, **_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)

    monkeypatch.setattr(safetensors, "safe_open", refuse)
    with pytest.raises(
        SpecExtError, match=r"overlay_file .* cannot be read: Permission denied"
    ) as found:
        check_overlay(path, "", V, 256)
    assert "elete" not in str(found.value)


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    old, young = (tmp_path / f".o.safetensors.{name}.partial" for name in ("old", "young"))
    other = tmp_path / ".p.safetensors.old.partial"
    for file in (old, young, other):
        file.touch()
    for file in (old, other):
        os.utime(file, (0, 0))
    started(overlay_file=str(tmp_path / "o.safetensors"))
    assert [old.exists(), young.exists(), other.exists()] == [False, True, True]


def test_a_server_whose_requests_share_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    facts = TargetFacts("MODEL", V, None, 8, Tokenizer)
    alone = replace(facts, share_unsalted=False)
    shared = AdaptiveNgramOptions(overlay="both")
    saved = AdaptiveNgramOptions(overlay="both", overlay_file=str(tmp_path / "o"))
    AdaptiveNgram.check(saved, facts)
    AdaptiveNgram.check(AdaptiveNgramOptions(), alone)
    assert not caplog.records
    AdaptiveNgram.check(shared, alone)
    (record,) = caplog.records
    assert "requests with a cache_salt alone" in record.getMessage()
    with pytest.raises(SpecExtError, match=r'overlay_file .* "share_unsalted": true'):
        AdaptiveNgram.check(saved, alone)


def test_a_slow_disk_holds_no_step_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One file is written at a time, of the tables as they were; the last when the engine ends."""
    path, goes_on = tmp_path / "overlay.safetensors", threading.Event()
    write = drafter.write_overlay
    written: list[str] = []

    def slow(*given: Any) -> None:
        goes_on.wait(20)
        if not written:
            written.append("failed")
            raise OSError("no space left")
        write(*given)
        written.append(path.name)

    monkeypatch.setattr(drafter, "write_overlay", slow)
    proposer = started(overlay_file=str(path), overlay_save_every=1)
    for last in (10, 11, 12):
        drafts(proposer, request(f"request {last}", UNSALTED, last))
    assert not written
    goes_on.set()
    proposer.close()
    assert written == ["failed", path.name]
    assert "no space left" in caplog.text
    again = started(overlay_file=str(path))
    assert drafts(again, request("x", UNSALTED)) == drafts(proposer, request("y", UNSALTED))
