# SPDX-License-Identifier: Apache-2.0
"""Cascades on paged draft models: every possible draft is enumerated, with its probability.

The target verifies each by speculative sampling with the distributions that the cascade reports.
What comes out must be the target's own distribution but for rounding. The rule of TriForce's code,
and other ways to get it wrong, fail the same test.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_model import engine, request, step
from fake_view import FakeView
from paged_toy import VOCAB, ToyModel
from reviewed_model import GUESSES, Guess

from vllm_spec_ext.engine.models.hosted_model import BatchRow, HostedModel
from vllm_spec_ext.options import parse_options
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import Draft
from vllm_spec_ext.proposers.cascade import Cascade, judging
from vllm_spec_ext.proposers.cascade import round as one_round

IDS = 3  # of the toys' vocabulary, the rest is cut
TEXT = [1, 2, 0, 1, 2]
BLOCK = 4
SHARPNESS = 0.25  # of the toys' logits: nothing is certain


def softmax(logits: Any) -> np.ndarray:
    weights = np.exp(SHARPNESS * np.asarray(logits, np.float64)[..., :IDS])
    return weights / weights.sum(axis=-1, keepdims=True)


TARGET = ToyModel(11, 8, BLOCK)
IN_PART = ToyModel(12, 8, BLOCK)  # what the target says over a view
_target: dict[tuple[int, ...], np.ndarray] = {}


def target(drafted: tuple[int, ...]) -> np.ndarray:
    """[IDS] behind these tokens."""
    if drafted not in _target:
        _target[drafted] = softmax(TARGET.dense([*TEXT, *drafted])[-1])
    return _target[drafted]


def exact_distributions(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
    """In double precision, so that nothing but the rule is left to be wrong."""
    return torch.from_numpy(softmax(logits.numpy()))


@dataclass
class Script:
    """Takes given choices, then always the first possible one; knows how likely that was."""

    given: Sequence[int]
    taken: list[int] = field(default_factory=list)
    num_options: list[int] = field(default_factory=list)
    weight: float = 1.0

    def accepts(self, probability: float) -> bool:
        if probability >= 1.0:
            return True
        return self._choose([probability, 1.0 - probability]) == 0

    def draws(self, weights: torch.Tensor) -> int:
        possible = [token for token in range(len(weights)) if float(weights[token]) > 0.0]
        total = float(weights.double().sum())
        return possible[self._choose([float(weights[token]) / total for token in possible])]

    def _choose(self, probabilities: Sequence[float]) -> int:
        place = len(self.taken)
        choice = self.given[place] if place < len(self.given) else 0
        self.taken.append(choice)
        self.num_options.append(len(probabilities))
        self.weight *= probabilities[choice]
        return choice


def hosted(name: str, seed: int) -> HostedModel:
    toy = ToyModel(seed, 16, BLOCK)
    model = HostedModel(name, toy, num_ids=VOCAB, vocab_size=IDS, max_model_len=64, max_rows=64)
    model.bind(8, BLOCK, range(8, 16))
    return model


def drafts(room: int, **given: Any) -> Iterator[tuple[float, Draft]]:
    """Every draft that a cascade may make, and its probability."""
    names = [level["model"] for level in given["levels"] if "model" in level]
    models = [hosted(name, seed) for seed, name in enumerate(names, 21)]
    options = parse_options(Cascade.info.options, given, "cascade")
    cascade = Cascade(options)
    view = FakeView(lambda text: np.asarray(IN_PART.dense(list(text))[-1]), budget=1)
    views = [view for level in given["levels"] if "view" in level]
    handle = engine(*models, num_speculative_tokens=room)  # type: ignore[arg-type]
    cascade.start(replace(handle, views=views))
    asked = request(TEXT, temperature=1.0, room=room)
    row = BatchRow("a", np.array([1, 2, 3], np.int32), np.array(TEXT, np.int32), False)
    waiting: list[list[int]] = [[]]
    while waiting:
        script = Script(waiting.pop())
        cascade.chance = lambda request, script=script: script  # type: ignore[method-assign,misc]
        for model in models:
            model.begin_step([row])
        (draft,) = cascade.propose(step(asked))
        for model in models:
            model.end_step(True)
        for place in range(len(script.given), len(script.taken)):
            for choice in range(1, script.num_options[place]):
                waiting.append([*script.taken[:place], choice])
        yield script.weight, draft


def verified(draft: Draft) -> dict[tuple[int, ...], float]:
    """Speculative sampling: texts that a step may emit, with their probabilities."""
    found: dict[tuple[int, ...], float] = {}
    text: tuple[int, ...] = ()
    weight = 1.0
    tokens = draft.tokens.tolist()
    for place, token in enumerate(tokens):
        p = target(text)
        q = np.eye(IDS)[token] if draft.probs is None else draft.probs[place].double().numpy()
        rest = np.maximum(p - q, 0.0)
        accepted = min(1.0, p[token] / q[token])
        for other in range(IDS):
            if rest[other] > 0.0 and accepted < 1.0:
                share = weight * (1.0 - accepted) * rest[other] / rest.sum()
                found[(*text, other)] = found.get((*text, other), 0.0) + share
        text, weight = (*text, token), weight * accepted
    for token in range(IDS):
        found[(*text, token)] = found.get((*text, token), 0.0) + weight * target(text)[token]
    return found


def distance(room: int, **given: Any) -> tuple[float, int]:
    """Total variation between what comes out and the target, and the number of drafts."""
    length = room + 1
    emitted: dict[tuple[int, ...], float] = {}
    total = number = 0.0
    for weight, draft in drafts(room, **given):
        total, number = total + weight, number + 1
        for text, share in verified(draft).items():
            emitted[text] = emitted.get(text, 0.0) + weight * share
    assert total == pytest.approx(1.0, abs=1e-12)
    texts: dict[tuple[int, ...], float] = {}
    for text, share in emitted.items():  # a step that ends early goes on by the target itself
        for whole, chance in continued(text, length):
            texts[whole] = texts.get(whole, 0.0) + share * chance
    truth = dict(continued((), length))
    return 0.5 * sum(abs(texts.get(text, 0.0) - p) for text, p in truth.items()), int(number)


def continued(text: tuple[int, ...], length: int) -> Iterator[tuple[tuple[int, ...], float]]:
    if len(text) == length:
        yield text, 1.0
        return
    for token, p in enumerate(target(text)):
        for whole, share in continued((*text, token), length):
            yield whole, float(p) * share


@pytest.fixture(autouse=True)
def _guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, place in GUESSES.items():
        monkeypatch.setitem(registry.BUILTIN, name, place)
    monkeypatch.setattr(one_round, "distributions", exact_distributions)
    # It follows the text in some way, and is sometimes without a guess.
    monkeypatch.setattr(
        Guess,
        "foresee",
        staticmethod(lambda text, most: [(text[-1] + i * i) % IDS for i in range(1, most + 1)]),
    )


GUESS, GOING_ON = {"method": "guess"}, {"method": "going_on"}
CASCADES: dict[str, dict[str, Any]] = {
    "two levels": {"levels": [GUESS, {"model": "a", "reviews": 2}]},
    "one long review": {"levels": [GUESS, {"model": "a"}]},
    "asked again": {"levels": [GOING_ON, {"model": "a", "reviews": 1}]},
    "never alone": {"levels": [GUESS, {"model": "a", "reviews": 1, "alone": False}]},
    "three levels": {
        "levels": [GOING_ON, {"model": "a", "reviews": 1}, {"model": "b", "reviews": 2}]
    },
    "a model's draws reviewed": {"levels": [{"model": "a"}, {"model": "b", "reviews": 2}]},
    "horizontal": {
        "levels": [{"model": "a"}, {"model": "b", "reviews": 0}],
        "tokens": [1, 2],
    },
    "a guess as tail": {"levels": [GUESS, {"model": "a", "reviews": 1}], "tokens": [1, 2]},
    "TriForce": {
        "levels": [{"model": "a"}, {"view": "retrieval", "reviews": 2}],
        "tokens": [2],
        "draft_on_cpu": True,
    },
    "a guess below a view": {
        "levels": [GUESS, {"view": "stream", "reviews": 1}],
        "draft_on_cpu": True,
    },
    "a matrix": {
        "levels": [GUESS, {"model": "a", "reviews": 1}, {"model": "b", "reviews": [1, 1]}],
        "tokens": [2, 1],
    },
    "no model first": {
        "levels": [GUESS, {"model": "a", "reviews": 1}, {"model": "b", "reviews": [0, 1]}]
    },
}


@pytest.mark.parametrize("name", CASCADES)
def test_what_comes_out_is_the_targets_own(name: str) -> None:
    found, number = distance(3, **CASCADES[name])
    assert number >= 5
    assert found < 1e-12


def test_draws_of_a_method_are_reviewed_with_its_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All drafts of a method that draws, weighted by how it draws them."""
    q = np.array([0.2, 0.5, 0.3])
    row_probs = torch.from_numpy(q)
    given = {"levels": [GUESS, {"model": "a", "reviews": 2}]}
    emitted: dict[tuple[int, ...], float] = {}
    monkeypatch.setattr(Guess, "probs", staticmethod(lambda text, tokens: row_probs.repeat(2, 1)))
    for first in range(IDS):
        for second in range(IDS):
            drawn = [first, second]
            monkeypatch.setattr(Guess, "foresee", staticmethod(lambda text, most, d=drawn: d))
            for weight, draft in drafts(2, **given):
                for text, share in verified(draft).items():
                    for whole, chance in continued(text, 3):
                        more = q[first] * q[second] * weight * share * chance
                        emitted[whole] = emitted.get(whole, 0.0) + more
    truth = dict(continued((), 3))
    assert 0.5 * sum(abs(emitted[text] - p) for text, p in truth.items()) < 1e-12


# -- the ways to get it wrong ---------------------------------------------------------------------


def from_the_whole(h: torch.Tensor, token: int, q0: Any) -> torch.Tensor:
    """TriForce's released code: after a rejection from the whole of h, and h is reported."""
    return h


def unlikely_dropped(
    h: torch.Tensor, tokens: Sequence[int], drawn_from: Any, chance: Any
) -> judging.Verdict:
    """A token that the reviewer finds unlikely is rejected, whatever the numbers said."""
    verdict = judging.judge_drawn(h, tokens, drawn_from, chance)
    for place in range(verdict.num_accepted):
        if float(h[place, tokens[place]]) < 0.3:
            rest = judging.residual(h[place], tokens[place], None)
            return judging.Verdict(place, chance.draws(rest), h[: place + 1])
    return verdict


def cut_where_unlikely(draft: Draft) -> Draft:
    """A draft that ends before the first drawn token of a small probability."""
    if draft.probs is None:
        return draft
    length = len(draft)
    for place, token in enumerate(draft.tokens.tolist()):
        if float(draft.probs[place, token]) < 0.3:
            length = place
            break
    return Draft(draft.tokens[:length], probs=draft.probs[:length])


@pytest.mark.parametrize(
    "name", ["two levels", "three levels", "a model's draws reviewed", "TriForce"]
)
@pytest.mark.parametrize("mistake", ["the whole of h", "unlikely rejected", "unlikely cut off"])
def test_the_known_mistakes_are_found_out(
    name: str, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mistake == "the whole of h":
        monkeypatch.setattr(judging, "residual", from_the_whole)
    elif mistake == "unlikely rejected":
        monkeypatch.setattr(one_round, "judge_drawn", unlikely_dropped)
    else:
        original: Callable[..., Draft] = Cascade._draft
        monkeypatch.setattr(
            Cascade, "_draft", lambda self, *args: cut_where_unlikely(original(self, *args))
        )
    assert distance(2, **CASCADES[name])[0] > 1e-3
