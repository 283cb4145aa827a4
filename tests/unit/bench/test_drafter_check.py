# SPDX-License-Identifier: Apache-2.0
"""Verdicts on drafters, and the causes that figures speak for."""

import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from vllm_spec_ext.bench.drafter_check import (
    AS_TRAINED,
    BEFORE_NORM,
    BEHIND_NORM,
    FIRST_TOKENS,
    LAYER_BEFORE,
    WITHOUT_PROMPT,
    FirstToken,
    Judgement,
    Measured,
    Share,
    Trials,
    judge,
    other_layers,
)
from vllm_spec_ext.bench.drafter_parts import LEAST_KNOWN, Recorded

WRONG = 9999
LENGTH = 60
EXPECTED = Recorded(
    target="org/target",
    everywhere=0.7,
    at_starts=0.55,
    source="a test",
    per_token=(0.7, 0.5),
    layers=(8, 18, 28),
)
Rate = float | Callable[[int], float]
"""Share of right tokens: everywhere, or by place."""


def answers() -> tuple[tuple[list[int], list[int]], ...]:
    return tuple(
        (list(range(5 + 10 * number)), [100 * number + place for place in range(LENGTH)])
        for number in range(8)
    )


def rows(rates: Sequence[Rate], seed: int = 0) -> list[list[list[int]]]:
    """Drafts of every place with these shares of right tokens; the first place has none."""
    chance = random.Random(seed)

    def drafted(answer: list[int], place: int) -> list[int]:
        found = []
        for ahead, rate in enumerate(rates):
            share = rate(place) if callable(rate) else rate
            inside = place + ahead < len(answer)
            right = chance.random() < share
            found.append(answer[place + ahead] if inside and right else WRONG + 100 * seed + place)
        return found

    return [
        [[], *(drafted(answer, place) for place in range(1, LENGTH))] for _, answer in answers()
    ]


def measured(drafted: Sequence[Sequence[Sequence[int]]]) -> Measured:
    """What an engine with these drafts reports, a draft at every second place."""
    firsts = []
    for number, (_, answer) in enumerate(answers()):
        for place in range(1, LENGTH, 2):
            token = drafted[number][place][0]
            firsts.append(FirstToken(number, place, token == answer[place], token))
    return Measured(answers(), tuple(firsts))


def verdict(
    engine: Sequence[Rate],
    trials: Mapping[str, Sequence[Rate]] | None = None,
    *,
    same_as: str | None = AS_TRAINED,
    expected: Recorded = EXPECTED,
    agreement: float = 1.0,
    layers: Mapping[str, Sequence[int]] | None = None,
) -> Judgement:
    """Judge an engine of these shares and trials of these; ``same_as`` drafts as the engine."""
    drafted = rows(engine)
    if trials is None:
        return judge(expected, measured(drafted))
    outside = {
        name: drafted if name == same_as else rows(rates, seed)
        for seed, (name, rates) in enumerate(trials.items(), 1)
    }
    return judge(expected, measured(drafted), Trials(outside, agreement, layers or {}))


def names(found: Judgement) -> list[str]:
    return [cause.name for cause in found.causes]


def test_a_healthy_drafter() -> None:
    assert verdict([0.52, 0.4]) == Judgement("healthy")
    trials = {AS_TRAINED: [0.52, 0.4], BEFORE_NORM: [0.1, 0.1], LAYER_BEFORE: [0.45, 0.3]}
    assert verdict([0.52, 0.4], trials) == Judgement("healthy")


def test_text_unlike_the_training_costs_some_and_breaks_nothing() -> None:
    found = verdict([0.38, 0.28], {AS_TRAINED: [0.38, 0.28]})
    assert found.verdict == "low"
    assert names(found) == ["target fine-tuned since, or text unlike that of the training"]


def test_heads_of_another_target() -> None:
    bad = {AS_TRAINED: [0.02, 0.02], BEFORE_NORM: [0.01, 0.01], LAYER_BEFORE: [0.02, 0.02]}
    found = verdict([0.02, 0.02], bad)
    assert found.verdict == "broken"
    assert names(found) == ["not trained for this target"]
    assert "org/target" in found.causes[0].figure
    assert "0.55 expected" in found.causes[0].figure


def test_heads_whose_target_was_trained_along() -> None:
    tuned = Recorded(**{**EXPECTED.__dict__, "finetuned": True})
    found = verdict([0.2, 0.1], {AS_TRAINED: [0.2, 0.1]}, expected=tuned)
    assert names(found) == ["target fine-tuned"]


def test_one_damaged_head() -> None:
    found = verdict([0.1, 0.45], {AS_TRAINED: [0.1, 0.45]})
    assert found.verdict == "broken"
    assert names(found) == ["damaged weights"]
    assert "draft token 1 is right at" in found.causes[0].figure
    assert "recorded are 0.70" in found.causes[0].figure


@pytest.mark.parametrize(
    ("better", "cause"),
    [(BEFORE_NORM, "wrong norm"), (BEHIND_NORM, "wrong norm"), (LAYER_BEFORE, "wrong layers")],
)
def test_other_states_would_be_right(better: str, cause: str) -> None:
    found = verdict([0.1, 0.1], {AS_TRAINED: [0.1, 0.1], better: [0.65, 0.45]})
    assert found.verdict == "broken"
    assert names(found) == [cause]
    assert better in found.causes[0].figure


def test_other_layers_would_be_right() -> None:
    trials = {AS_TRAINED: [0.1, 0.1], "layers 9, 19, 29": [0.65, 0.45], "layers 7": [0.3, 0.2]}
    right = {"layers 9, 19, 29": [9, 19, 29], "layers 7": [7]}
    found = verdict([0.1, 0.1], trials, layers=right)
    assert names(found) == ["wrong layers"]
    assert "to [9, 19, 29] (it says [8, 18, 28])" in found.causes[0].fix


def test_layers_a_little_better_are_no_cause() -> None:
    trials = {AS_TRAINED: [0.1, 0.1], "layers 7": [0.15, 0.1]}
    assert names(verdict([0.1, 0.1], trials)) == ["not trained for this target"]


def test_wrong_layers_count_where_enough_is_accepted() -> None:
    trials = {AS_TRAINED: [0.5, 0.4], "layers 9": [0.7, 0.5]}
    found = verdict([0.5, 0.4], trials, layers={"layers 9": [9]})
    assert (found.verdict, names(found)) == ("broken", ["wrong layers"])


def test_the_engine_reads_states_without_the_norm() -> None:
    trials = {AS_TRAINED: [0.6, 0.5], BEFORE_NORM: [0.1, 0.1]}
    found = verdict([0.1, 0.1], trials, same_as=BEFORE_NORM)
    assert found.verdict == "broken"
    assert names(found) == ["wrong norm, in the engine"]
    assert "at 1.00" in found.causes[0].figure


def test_the_engine_reads_something_unknown() -> None:
    trials = {AS_TRAINED: [0.6, 0.5], BEFORE_NORM: [0.1, 0.1]}
    assert names(verdict([0.1, 0.1], trials, same_as=None)) == ["wrong wiring in the engine"]


def test_a_draft_model_that_does_not_see_the_prompt() -> None:
    trials = {AS_TRAINED: [0.6], WITHOUT_PROMPT: [0.2]}
    found = verdict([0.2], trials, same_as=WITHOUT_PROMPT)
    assert names(found) == ["prompt states missing, in the engine"]


def behind_prompt(place: int) -> float:
    return 0.05 if place < FIRST_TOKENS else 0.6


def test_states_of_the_prompt_are_missing() -> None:
    found = verdict([behind_prompt], {AS_TRAINED: [0.6]}, same_as=None)
    assert names(found) == ["prompt states missing"]
    assert "outside the engine" in found.causes[0].figure
    assert names(verdict([behind_prompt])) == ["prompt states missing"]  # without trials


def test_hard_first_tokens_are_no_missing_prompt() -> None:
    """The text itself is harder there: outside the engine, too."""
    found = verdict([behind_prompt, 0.5], {AS_TRAINED: [behind_prompt, 0.5]})
    assert "prompt states missing" not in names(found)


def test_another_target_in_the_engine() -> None:
    found = verdict([0.1, 0.1], {AS_TRAINED: [0.1, 0.1]}, agreement=0.5)
    assert names(found) == ["another target in the engine"]


def test_no_drafts_at_all() -> None:
    found = judge(EXPECTED, Measured(answers(), (), 100))
    assert (found.verdict, names(found)) == ("broken", ["no drafts"])


def test_nothing_recorded_is_judged_by_the_weakest_that_works() -> None:
    assert Recorded().expected == LEAST_KNOWN
    assert verdict([LEAST_KNOWN], expected=Recorded()).verdict == "healthy"
    assert verdict([0.1], expected=Recorded()).verdict == "broken"


def test_few_drafts_are_not_called_broken() -> None:
    """Of four drafts none accepted: chance, and no verdict of 'broken'."""
    few = Measured(answers()[:1], tuple(FirstToken(0, 20 + i, i == 0) for i in range(4)))
    assert judge(EXPECTED, few).verdict == "low"


def test_layers_to_try() -> None:
    found = other_layers((8, 18, 28), 30, (9, 19, 29))
    assert found == [(9, 19, 29), (7, 17, 27), (6, 16, 26), (1, 14, 26)]
    assert (0, 1) not in other_layers((0, 1), 3, (0, 1))


def test_shares() -> None:
    share = Share(50, 100)
    assert (round(share.low, 3), round(share.high, 3)) == (0.404, 0.596)
    assert (Share(0, 0).value, Share(0, 0).high) == (0.0, 1.0)


def test_places_and_prompts() -> None:
    found = measured(rows([1.0]))
    assert {one.place for one in found.early()} == {1, 3, 5, 7}
    middle, short, long = found.by_prompt_length()
    assert middle == 40
    assert len(short) == len(long) == len(found.firsts) // 2
