# SPDX-License-Identifier: Apache-2.0
"""Rounds run where they pay: passes are counted, and the costs are given."""

from collections.abc import Callable
from typing import Any

import pytest
from fake_model import NextLogits, engine, random_next_logits, request, step
from reviewed_model import GUESSES, Guess, ReviewedModel
from test_cascade_proposer import greedy

from vllm_spec_ext.options import parse_options
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import StepOutcome
from vllm_spec_ext.proposers.cascade import Cascade

VOCAB = 7
TARGET = random_next_logits(3, VOCAB)
WRONG = random_next_logits(4, VOCAB)


@pytest.fixture(autouse=True)
def _guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, place in GUESSES.items():
        monkeypatch.setitem(registry.BUILTIN, name, place)
    monkeypatch.setattr(
        Guess, "foresee", staticmethod(lambda text, most: greedy(TARGET, text, most))
    )


class Served:
    """A cascade with one model and a greedy target that follows TARGET."""

    def __init__(
        self, seconds: Callable[[int], float] | None, *drafts: NextLogits, reviews: int = 4
    ) -> None:
        self.models = [
            ReviewedModel(next_logits, VOCAB, seconds=seconds, max_model_len=10**6)
            for next_logits in drafts or (TARGET,)
        ]
        self.model = self.models[0]
        levels = [{"method": "guess"}, *({"model": "m", "reviews": reviews} for _ in self.models)]
        options = parse_options(Cascade.info.options, {"levels": levels}, "cascade")
        self.cascade = Cascade(options)
        self.cascade.start(engine(*self.models, num_speculative_tokens=8))
        self.text = [1, 2, 3]
        self.num_new = 1

    def run(self, num_steps: int, **costs: Any) -> float:
        """Mean tokens a step."""
        emitted = 0
        for _ in range(num_steps):
            asked = request(self.text[-40:], room=8, num_new=self.num_new)
            (draft,) = self.cascade.propose(step(asked, **costs))
            tokens = draft.tokens.tolist()
            right = greedy(TARGET, self.text, len(tokens) + 1)
            accepted = next(
                (i for i, (a, b) in enumerate(zip(tokens, right, strict=False)) if a != b),
                len(tokens),
            )
            if tokens:
                self.cascade.observe([StepOutcome("a", len(tokens), accepted)])
            self.num_new = accepted + 1
            self.text += right[: self.num_new]
            emitted += self.num_new
        return emitted / num_steps


def test_with_unknown_costs_all_is_drafted() -> None:
    assert Served(lambda n: 10.0).run(3, plain_seconds=None) == 9
    assert Served(None).run(3, plain_seconds=1.0) == 9


def test_a_model_that_could_never_pay_is_never_run() -> None:
    served = Served(lambda n: 20.0)
    assert served.run(1500, plain_seconds=1.0) == 1.0
    assert served.model.num_passes == 0
    assert len(served.cascade._methods[0].proposer.rooms) == 1500  # type: ignore[attr-defined]


def test_what_one_token_a_pass_could_not_pay_a_review_does() -> None:
    """A model as slow as the target: alone it loses, but one pass gives five tokens."""
    served = Served(lambda n: 0.9)
    served.run(100, plain_seconds=1.0)
    assert served.run(50, plain_seconds=1.0) > 5.0


def test_a_wrong_model_is_stopped_and_tried_seldom() -> None:
    served = Served(lambda n: 0.3, WRONG)
    served.run(150, plain_seconds=1.0)
    before = served.model.num_passes
    served.run(700, plain_seconds=1.0)
    tries = served.model.num_passes - before
    assert 0 < tries < 80
    served.model.next_logits = TARGET
    served.run(1600, plain_seconds=1.0)
    assert served.run(50, plain_seconds=1.0) > 4.0


def test_rounds_of_bad_text_are_not_held_against_good_text() -> None:
    """Two models: while the first is wrong a round takes more passes than could ever pay."""
    served = Served(lambda n: 0.6, WRONG, TARGET, reviews=6)
    served.run(300, plain_seconds=1.0)
    served.models[0].next_logits = TARGET
    before = served.model.num_passes
    served.run(1500, plain_seconds=1.0)
    assert served.model.num_passes > before
    assert served.run(50, plain_seconds=1.0) > 4.0


def test_verification_that_costs_too_much_stops_it() -> None:
    served = Served(lambda n: 0.01)
    assert served.run(30, plain_seconds=1.0, min_probability=1.0) == 1.0
    assert served.model.num_passes == 0


def test_an_unguessed_request_is_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow model with guesses pays; without, where each token takes a pass, it does not."""
    foresee = Guess.foresee
    served = Served(lambda n: 0.9)
    monkeypatch.setattr(Guess, "foresee", staticmethod(lambda text, most: []))
    served.run(60, plain_seconds=1.0)
    before = served.model.num_passes
    assert served.run(60, plain_seconds=1.0) < 1.5
    assert served.model.num_passes - before < 40
    monkeypatch.setattr(Guess, "foresee", staticmethod(foresee))
    served.run(60, plain_seconds=1.0)
    assert served.run(40, plain_seconds=1.0) > 5.0


def test_drawn_drafts_are_limited_by_what_is_known_before_the_draw() -> None:
    """The length depends on rates alone: requests of one step have the same."""
    served = Served(lambda n: 0.2)
    for _ in range(30):
        asked = [request([1, 2, 3], name=str(i), room=8, temperature=1.0) for i in range(6)]
        drafts = served.cascade.propose(step(*asked, plain_seconds=4.0))
        outcomes = [StepOutcome(str(i), len(draft), 1) for i, draft in enumerate(drafts)]
        served.cascade.observe([outcome for outcome in outcomes if outcome.num_drafted])
    assert len({len(draft) for draft in drafts}) == 1
    assert len(drafts[0]) > 0
