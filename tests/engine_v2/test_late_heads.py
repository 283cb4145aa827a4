# SPDX-License-Identifier: Apache-2.0
"""Heads that draft on the device see there what they see on the host: in Triton's interpreter."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generation import run, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import LateDevice
from scenarios import PROMPTS, Scenario
from test_blockwise_engine import save_random_heads
from test_greedy_identity import runner_of
from triton_cpu_stub import plugin  # type: ignore[import-not-found]

from vllm_spec_ext.proposers.base import RequestStep
from vllm_spec_ext.proposers.blockwise import late_heads
from vllm_spec_ext.proposers.blockwise.heads import HeadsConfig, TokensSeen
from vllm_spec_ext.proposers.text_index.copied_tokens import copied_tokens
from vllm_spec_ext.proposers.text_index.occurrence_index import OccurrenceIndex

NUM_HEADS, LONGEST, VOCAB_SIZE = 3, 4, 12
# Few tokens, so that ends occur again; some beyond the vocabulary, as for a picture in a prompt.
TEXTS = st.lists(
    st.lists(st.integers(0, VOCAB_SIZE), min_size=1, max_size=60), min_size=1, max_size=3
)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of several blocks, put together in several rounds."""
    plugin.register()  # as in an engine
    monkeypatch.setattr(late_heads, "_BLOCK", 8)
    monkeypatch.setattr(late_heads, "_CHUNK", 2)


class Watched:
    """A proposer whose heads draft what they are shown, and say what that was."""

    def __init__(self) -> None:
        self.late: Any = None
        self.seen: list[TokensSeen] = []

    def head_logits(self, hidden: torch.Tensor, seen: TokensSeen, room: int) -> Any:
        self.seen.append(seen)
        copied = seen.copied
        assert copied is not None
        return torch.nn.functional.one_hot(copied[:, :room], VOCAB_SIZE), seen.shown

    def tokens(self, places: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
        return places


def config_of(copy_match: int) -> HeadsConfig:
    return HeadsConfig(
        target="tiny",
        hidden_size=4,
        vocab_size=VOCAB_SIZE,
        num_heads=NUM_HEADS,
        head_width=4,
        condition_on_next=True,
        copy_match=copy_match,
    )


def requests_of(texts: Sequence[Sequence[int]], unread: int = 0) -> list[RequestStep]:
    return [
        RequestStep(
            request_id=f"r{i}",
            token_ids=np.array(text[: max(1, len(text) - unread)], np.int32),
            num_prompt_tokens=1,
            new_tokens=[],
            room=NUM_HEADS,
        )
        for i, text in enumerate(texts)
    ]


@settings(max_examples=60)
@given(TEXTS, st.integers(0, NUM_HEADS + 1))
def test_the_device_shows_what_the_host_would(texts: list[list[int]], unread: int) -> None:
    proposer = Watched()
    late = late_heads.LateHeads(proposer, config_of(LONGEST), NUM_HEADS)  # type: ignore[arg-type]
    device = LateDevice(late)
    requests = requests_of(texts, unread)
    drafts = device.draft(requests, texts)
    [seen] = proposer.seen
    assert seen.copied is not None
    assert seen.copied_length is not None
    for row, text in enumerate(texts):
        index = OccurrenceIndex()
        index.append(np.array(text, np.int32))
        found = copied_tokens(index, LONGEST, NUM_HEADS)
        sayable = max(found.tokens) < VOCAB_SIZE
        length = found.length if sayable else 0
        tokens = found.tokens.tolist() if sayable else [0] * NUM_HEADS
        assert seen.following[row] == min(text[-1], VOCAB_SIZE - 1)
        assert seen.copied_length[row] == length
        assert seen.copied[row].tolist() == tokens
        assert drafts[row] == tokens
    told = late.drafted(list(reversed(requests)))
    assert [draft.tokens.tolist() for draft in told] == drafts[::-1]
    assert not any(map(len, late.drafted(requests))), "each draft is told once"


def test_without_copies_the_last_token_is_all_they_see() -> None:
    class Blind(Watched):
        def head_logits(self, hidden: torch.Tensor, seen: TokensSeen, room: int) -> Any:
            self.seen.append(seen)
            return torch.zeros(len(seen.following), room, VOCAB_SIZE), None

    proposer, texts = Blind(), [[3, 5], [VOCAB_SIZE + 7], [1]]
    late = late_heads.LateHeads(proposer, config_of(0), NUM_HEADS)  # type: ignore[arg-type]
    assert LateDevice(late).draft(requests_of(texts), texts) == [[0] * NUM_HEADS] * 3
    [seen] = proposer.seen
    assert seen.following.tolist() == [5, VOCAB_SIZE - 1, 1]
    assert seen.copied is None


def test_what_a_request_does_not_want_is_filled_up() -> None:
    """With the last token, which is verified as no draft; and is not told as one."""
    late = late_heads.LateHeads(Watched(), config_of(LONGEST), NUM_HEADS)  # type: ignore[arg-type]
    texts = [[1, 2, 3, 4, 1, 2]] * 3
    requests = requests_of(texts)
    for request, room in zip(requests, (0, 1, NUM_HEADS), strict=True):
        request.room = room
    assert LateDevice(late).draft(requests, texts) == [[2, 2, 2], [3, 2, 2], [3, 4, 1]]
    told = [draft.tokens.tolist() for draft in late.drafted(requests)]
    assert told == [[], [3], [3, 4, 1]]


def test_drafts_that_failed_are_not_told() -> None:
    class Failing(Watched):
        def head_logits(self, hidden: torch.Tensor, seen: TokensSeen, room: int) -> Any:
            if self.seen:
                raise RuntimeError("heads")
            return super().head_logits(hidden, seen, room)

    late = late_heads.LateHeads(Failing(), config_of(LONGEST), NUM_HEADS)  # type: ignore[arg-type]
    device, requests = LateDevice(late), requests_of([[1, 2, 1]])
    device.draft(requests, [[1, 2, 1]])
    with pytest.raises(RuntimeError, match="heads"):
        device.draft(requests, [[1, 2, 1]])
    assert not any(map(len, late.drafted(requests)))


@pytest.mark.parametrize("copy_match", [0, 4])
def test_drafts_are_those_that_are_made_behind_each_step(
    copy_match: int, make_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same states and tokens, whoever reads them; also where drafts were refused."""
    heads = save_random_heads(tmp_path / "heads", [40, 42, 44], copy_match)
    config = {"method": "blockwise", "model": str(heads), "num_speculative_tokens": 3}
    params = {"allowed_token_ids": [40, 42, 44], "ignore_eos": True}
    scenario = Scenario([{"max_tokens": n, **params} for n in (30, 7, 41)], PROMPTS[:5])
    found: list[dict[tuple[int, ...], list[int]]] = []
    answers = []
    for is_async in (False, True):
        engine = make_engine(
            speculative_config={**config, "adaptive_length": False}, async_scheduling=is_async
        )
        runner, drafts = runner_of(engine), dict[tuple[int, ...], list[int]]()
        assert (runner.late_steps is not None) == is_async
        propose = runner.drafter._proposer.propose

        def note(step: Any, propose: Any = propose, drafts: Any = drafts) -> Any:
            made = propose(step)
            for request, draft in zip(step.requests, made, strict=True):
                drafts[tuple(request.token_ids.tolist())] = draft.tokens[: request.room].tolist()
            return made

        monkeypatch.setattr(runner.drafter._proposer, "propose", note)
        answers.append(tokens(run(engine, scenario)))
        found.append(drafts)
    assert answers[0] == answers[1]
    waiting, late = found
    both = [text for text in waiting if waiting[text] and late.get(text)]
    assert len(both) > 60
    equal = sum(waiting[text] == late[text] for text in both)
    assert equal >= 0.98 * len(both), "but for two that are about as likely"
    assert len({tuple(waiting[text]) for text in both}) > 5
