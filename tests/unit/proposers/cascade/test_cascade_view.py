# SPDX-License-Identifier: Apache-2.0
"""A view of the target as the last level: it writes what the target would write over the view."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_model import NextLogits, engine, random_next_logits, request, step
from fake_view import FakeView
from reviewed_model import ReviewedModel
from test_cascade_proposer import greedy

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import parse_options
from vllm_spec_ext.proposers.base import StepOutcome
from vllm_spec_ext.proposers.cascade import Cascade

VOCAB = 7
NEXT_LOGITS, OTHER = random_next_logits(3, VOCAB), random_next_logits(4, VOCAB)
TEXT = [1, 2, 3, 4, 5, 6, 1, 2, 3]
SMALL = {"model": "small"}
VIEW = {"view": "retrieval", "reviews": 2}


def made(model: NextLogits | None, *views: FakeView, device: str = "cuda", **given: Any) -> Cascade:
    """A cascade over these views, and over a small model if its next logits are given."""
    given.setdefault("adaptive_length", False)
    given.setdefault("levels", [SMALL, VIEW])
    models = [] if model is None else [ReviewedModel(model, VOCAB, seconds=lambda rows: 1e-3)]
    cascade = Cascade(parse_options(Cascade.info.options, given, "cascade"))
    handle = engine(*models, num_speculative_tokens=12)
    cascade.start(replace(handle, views=list(views), device=torch.device(device)))
    return cascade


def texts(cascade: Cascade, *asked: Any) -> list[list[int]]:
    return [draft.tokens.tolist() for draft in cascade.propose(step(*asked))]


@pytest.mark.parametrize(("next_logits", "rows"), [(NEXT_LOGITS, [3, 3]), (OTHER, None)])
def test_the_view_reviews_what_the_model_wrote(
    next_logits: NextLogits, rows: list[int] | None
) -> None:
    view = FakeView(NEXT_LOGITS)
    cascade = made(next_logits, view, tokens=[6])
    (draft,) = cascade.propose(step(request(TEXT, room=6)))
    assert draft.tokens.tolist() == greedy(NEXT_LOGITS, TEXT, 6)
    assert draft.sources == (("fake",),) * 6
    assert rows is None or view.passes == rows
    assert view.passes[0] == 3  # the root and two of the model's
    # Where the last review ends in time the draft goes on to its end.
    assert len(texts(cascade, request(TEXT, room=12))[0]) >= 6


def test_methods_below_a_view() -> None:
    view = FakeView(NEXT_LOGITS)
    cascade = made(None, view, levels=[{"method": "ngram"}, VIEW])
    assert texts(cascade, request(TEXT, room=5)) == [greedy(NEXT_LOGITS, TEXT, 5)]


def test_requests_share_passes_and_some_are_left_out() -> None:
    """One that the view cannot read goes on with what the levels below it write, if they may."""
    asked = [
        request(TEXT, name="a", room=6),
        request(TEXT[:5], name="b", room=6),
        request(TEXT[:4], name="c", room=3),
    ]
    right = [greedy(NEXT_LOGITS, TEXT, 6), [], greedy(NEXT_LOGITS, TEXT[:4], 3)]
    view = FakeView(NEXT_LOGITS, refuses=["b"])
    assert texts(made(NEXT_LOGITS, view, tokens=[6]), *asked) == right
    assert view.passes[0] == 2 * 3
    view = FakeView(NEXT_LOGITS, refuses=["b"])
    right[1] = greedy(OTHER, TEXT[:5], 6)
    assert texts(made(OTHER, view, tokens=[6, 0]), *asked) == right


def test_what_the_view_has_no_room_for_is_not_written() -> None:
    view = FakeView(NEXT_LOGITS, most_room=4)
    (found,) = texts(made(NEXT_LOGITS, view, tokens=[6]), request(TEXT, room=12))
    assert found == greedy(NEXT_LOGITS, TEXT, 3)  # a review of two more would read a fifth
    assert view.passes == [3]


def test_requests_that_the_view_shows_whole_are_not_drafted_for() -> None:
    view = FakeView(NEXT_LOGITS, budget=6)
    long, short = request(TEXT, name="long", room=6), request(TEXT[:6], name="short", room=6)
    found = texts(made(NEXT_LOGITS, view, adaptive_length=True), long, short)
    assert len(found[0]) >= 1
    assert found[1] == []
    assert all(texts(made(NEXT_LOGITS, FakeView(NEXT_LOGITS, budget=6)), long, short))


def test_a_view_that_is_slow_is_given_up() -> None:
    """Its passes take as long as the target's steps: a round costs more than it brings."""
    view = FakeView(NEXT_LOGITS, seconds=1.0)
    cascade = made(NEXT_LOGITS, view, adaptive_length=True)
    for length in range(10, 70):
        asked = request((TEXT * 10)[:length], room=6)
        (draft,) = cascade.propose(step(asked, plain_seconds=1.0))
        cascade.observe([StepOutcome(asked.request_id, len(draft), 0)] if len(draft) else [])
    assert 0 < len(view.passes) < 20


def test_it_is_off_on_cpus(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm.spec_ext"):
        levels = [{"method": "adaptive_ngram"}, SMALL, VIEW]
        cascade = made(NEXT_LOGITS, device="cpu", levels=levels)
    assert "cascade drafts nothing on this CPU" in caplog.text
    assert "draft_on_cpu" in caplog.text
    asked = request(TEXT, room=6)
    assert texts(cascade, asked) == [[]]
    cascade.observe([StepOutcome(asked.request_id, 0, 0)])
    cascade.finish([asked.request_id])
    cascade.close()
    view = FakeView(NEXT_LOGITS)
    on = made(NEXT_LOGITS, view, device="cpu", draft_on_cpu=True)
    assert texts(on, request(TEXT, room=3)) == [greedy(NEXT_LOGITS, TEXT, 3)]


@pytest.mark.parametrize("views", [[], [FakeView(NEXT_LOGITS), FakeView(NEXT_LOGITS)]])
def test_without_an_engine(views: Sequence[FakeView]) -> None:
    with pytest.raises(SpecExtError, match=f"found {len(views)} views of a target, expected 1"):
        made(NEXT_LOGITS, *views)
