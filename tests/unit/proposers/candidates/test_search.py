# SPDX-License-Identifier: Apache-2.0
"""The search for the best tree, against its definition."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from number_corpus import build_corpus

from vllm_spec_ext.proposers.base import UNSALTED, NextTokens, RequestStep
from vllm_spec_ext.proposers.candidates import evidence
from vllm_spec_ext.proposers.candidates.evidence import (
    ANSWERS,
    COPY,
    CORPUS,
    DRAFTER,
    OWN,
    RECYCLED,
)
from vllm_spec_ext.proposers.candidates.given_drafts import NOTHING_GIVEN, Given
from vllm_spec_ext.proposers.candidates.kernels import given_class
from vllm_spec_ext.proposers.candidates.lookup import Lookup
from vllm_spec_ext.proposers.candidates.priors import first_log_odds
from vllm_spec_ext.proposers.draft_tree import tree_problem
from vllm_spec_ext.proposers.text_index.answer_memory import NUM_MARKS, heading

VOCAB = 6
WEIGHTS = first_log_odds()
MOST_PLACES = 32


def lookup(**given: Any) -> Lookup:
    options: dict[str, Any] = {
        "own_text": True,
        "earlier_answers": 0,
        "recycled_contexts": 0,
        "max_cache_salts": 2,
        "max_ngram": 5,
    }
    return Lookup(VOCAB, **{**options, **given})


def request(tokens: Any, room: int = 8, name: str = "r", **given: Any) -> RequestStep:
    ids = np.asarray(tokens, np.int32)
    options: dict[str, Any] = {"num_prompt_tokens": len(ids) - 1, "new_tokens": ids[-1:].tolist()}
    options = {"share_group": UNSALTED, **options, **given}
    return RequestStep(name, ids, room=room, **options)


class Definition:
    """The same tree, from the words that describe it."""

    def __init__(
        self,
        text: list[int],
        said: list[int],
        answers: list[int],
        max_ngram: int,
        ends: frozenset[int],
        num_said: int,
    ) -> None:
        self.text, self.said, self.answers = text, said, answers
        self.max_ngram, self.ends, self.num_said = max_ngram, ends, num_said

    def looked_up(self, path: list[int], index: list[int], own: bool) -> tuple[int, list[int]]:
        whole = (self.text if own else self.said) + path
        last = len(index) - 1 if own and not path else len(index)
        best: tuple[int, list[int]] = (0, [])
        for end in range(last, 0, -1):
            agree = 0
            while (
                agree < min(self.max_ngram, len(whole), end)
                and index[end - 1 - agree] == whole[-1 - agree]
            ):
                agree += 1
            if agree > best[0]:
                best = (agree, [])
            if agree and agree == best[0]:
                best[1].append(end)
        return best[0], best[1][:MOST_PLACES]

    def same_answer(self, path: list[int]) -> list[int]:
        """Where the only earlier answer is as far as this one, if the same prompt was given it."""
        at = NUM_MARKS + 1 + self.num_said + len(path)
        least = min(self.max_ngram, evidence.LEAST_SAME)
        agrees = self.answers[max(0, at - least) : at] == (self.said + path)[-least:]
        return [at] if agrees and at < len(self.answers) else []

    def places(self, path: list[int], index: list[int], own: bool) -> tuple[int, list[int]]:
        if path:
            length, above = self.places(path[:-1], index, own)
            virtual = index + (path[:-1] if own else [])
            kept = [at + 1 for at in above if at < len(virtual) and virtual[at] == path[-1]]
            if kept:
                return length + 1, kept
        same = [] if own else self.same_answer(path)
        return (evidence.SAME_ANSWER, same) if same else self.looked_up(path, index, own)

    def children(self, path: list[int]) -> dict[int, float]:
        if path and path[-1] in self.ends:
            return {}
        classes: dict[int, list[int]] = {}
        agreeing: dict[int, int] = {}
        for source, index in ((OWN, self.text), (ANSWERS, self.answers)):
            length, places = self.places(path, index, source == OWN)
            agreeing[source] = self.place(length)
            virtual = index + (path if source == OWN else [])
            said = [virtual[at] for at in places if at < len(virtual) and virtual[at] < VOCAB]
            for token, count in Counter(said).items():
                row = classes.setdefault(token, [0] * evidence.NUM_SOURCES + [1])
                row[source] = self.matched(length, count, len(said))
                row[evidence.TOGETHER] += 2**source
        for source in (OWN, ANSWERS):
            if any(row[source] for row in classes.values()):
                for row in classes.values():
                    row[source] = row[source] or evidence.OTHERS + agreeing[source]
        odds = {
            token: 1 / (1 + np.exp(-sum(WEIGHTS[s, c] for s, c in enumerate(row))))
            for token, row in classes.items()
        }
        together = sum(odds.values())
        if together <= 1.0:
            return odds
        best = max(odds, key=lambda token: odds[token])
        if classes[best][ANSWERS] in range(evidence.matched_class(7, 0), evidence.OTHERS):
            others = (1.0 - odds[best]) / (together - odds[best])
            return {token: p * (1.0 if token == best else others) for token, p in odds.items()}
        return {token: probability / together for token, probability in odds.items()}

    @staticmethod
    def place(length: int) -> int:
        return next((i for i, most in enumerate(evidence.LENGTHS) if length <= most), 7)

    def matched(self, length: int, count: int, total: int) -> int:
        place = self.place(length)
        share = count / total
        if total == 1:
            return evidence.matched_class(place, 0)
        if share > 0.9:
            return evidence.matched_class(place, 1 if total < 4 else 2)
        return evidence.matched_class(
            place, 3 + next((i for i, least in enumerate((0.6, 0.3, 0.1)) if share > least), 3)
        )

    def best(self, room: int, least: float) -> list[tuple[float, tuple[int, ...]]]:
        waiting: list[tuple[float, tuple[int, ...]]] = [
            (p, (token,)) for token, p in self.children([]).items()
        ]
        found: list[tuple[float, tuple[int, ...]]] = []
        while len(found) < room:
            waiting = [one for one in waiting if one[0] >= least]
            if not waiting:
                break
            best = max(waiting, key=lambda one: one[0])
            waiting.remove(best)
            found.append(best)
            for token, p in self.children(list(best[1])).items():
                waiting.append((best[0] * p, (*best[1], token)))
        return found


@pytest.mark.parametrize("ends", [(), (1,), (0, 3)])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("longest", [5, 14])
def test_the_tree_is_the_one_that_is_described(
    seed: int, ends: tuple[int, ...], longest: int
) -> None:
    random = np.random.default_rng(seed)
    text = random.integers(0, 3 + seed % 3, int(random.integers(2, 60))).tolist()
    num_prompt = len(text) - int(random.integers(1, min(len(text), 6)))
    prompt = text[:num_prompt] if seed % 2 else [1]  # what was asked before, or other words
    answer = random.integers(0, 4, 30)
    sources = lookup(earlier_answers=100, max_ngram=longest)
    before = [*prompt, *answer]
    sources.follow(
        request(before, name="earlier", num_prompt_tokens=len(prompt), new_tokens=answer)
    )
    sources.finish("earlier")
    step = request(text, room=12, ends=frozenset(ends), num_prompt_tokens=num_prompt)
    sources.follow(step)
    found = sources.grow(step, WEIGHTS, 0.01)
    assert tree_problem(found.parents.tolist(), len(found)) is None
    said, answers = (
        [*heading(np.array(ids[:size], np.int32), VOCAB).tolist(), *ids[size:]]
        for ids, size in ((text, num_prompt), (before, len(prompt)))
    )
    num_said = len(text) - num_prompt
    expected = Definition(text, said, answers, longest, step.ends, num_said).best(12, 0.01)
    np.testing.assert_allclose(found.paths, [p for p, _ in expected], rtol=1e-4)
    paths: list[tuple[int, ...]] = []
    for parent, token in zip(found.parents.tolist(), found.tokens.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    # Equally likely nodes may stand in any order, and of the last ones either may be there.
    last = expected[-1][0] if expected else 0.0
    sure = {path for p, path in expected if p > last * 1.001}
    assert sure <= set(paths)
    assert len(set(paths)) == len(paths)


def test_a_short_repetition_repeats_itself() -> None:
    sources = lookup()
    step = request([5, 1, 2, 1, 2, 1], room=6)
    sources.follow(step)
    assert sources.grow(step, WEIGHTS, 0.05).tokens.tolist()[:4] == [2, 1, 2, 1]


def rows(contexts: list[tuple[int, int]], tokens: list[int]) -> NextTokens:
    probs = np.full((len(contexts), 8), 0.01, np.float32)
    probs[:, 0] = 0.9
    ids = np.full((len(contexts), 8), 5, np.int32)
    ids[:, 0] = tokens
    return NextTokens(np.array(contexts, np.int32), ids, probs)


def test_recycled_rows_are_found_by_two_tokens_and_then_by_one() -> None:
    sources = lookup(own_text=False, recycled_contexts=64)
    seen = rows([(1, 2), (3, 2)], [3, 4])
    sources.follow(request([0, 1], next_tokens=seen))
    for text, expected in (([1, 2], 3), ([3, 2], 4), ([5, 2], 4)):  # the newest one wins
        step = request(text, name=f"{text}")
        sources.follow(step)
        found = sources.grow(step, WEIGHTS, 0.0)
        assert found.tokens[0] == expected
        assert found.evidence[0, RECYCLED] > 0
        assert not found.evidence[0, [OWN, ANSWERS, COPY, DRAFTER]].any()


@pytest.mark.parametrize("groups", [("a", "b"), ("a", UNSALTED), (None, None), (None, "a")])
def test_nobody_is_drafted_what_another_group_said(groups: tuple[str | None, str | None]) -> None:
    sources = lookup(recycled_contexts=64, earlier_answers=100)
    first, second = groups
    said = request(
        [0, 1, 2, 3, 4],
        name="1",
        share_group=first,
        num_prompt_tokens=1,
        new_tokens=[1, 2, 3, 4],
        next_tokens=rows([(1, 2), (2, 3)], [3, 4]),
    )
    sources.follow(said)
    sources.finish("1")
    other = request([0, 1, 2], name="2", share_group=second)
    sources.follow(other)
    assert not len(sources.grow(other, WEIGHTS, 0.0))
    if first is not None:
        friend = request([0, 1, 2], name="3", share_group=first)
        sources.follow(friend)
        found = sources.grow(friend, WEIGHTS, 0.0)
        assert found.tokens[0] == 3
        assert found.evidence[0, RECYCLED]
        assert found.evidence[0, ANSWERS]


def test_a_forgotten_group_is_forgotten() -> None:
    sources = lookup(own_text=False, recycled_contexts=64)
    sources.follow(request([0, 1], share_group="a", next_tokens=rows([(1, 2)], [3])))
    for group in ("b", "c"):  # two are known at a time
        sources.follow(
            request([0, 1], name=group, share_group=group, next_tokens=rows([(4, 4)], [4]))
        )
    again = request([1, 2], name="again", share_group="a")
    sources.follow(again)
    assert not len(sources.grow(again, WEIGHTS, 0.0))


def test_the_table_keeps_its_size_and_the_newest_rows() -> None:
    from vllm_spec_ext.proposers.candidates.recycled_rows import RecycledRows

    table = RecycledRows(16)
    for token in range(500):
        table.keep(0, rows([(token, token)], [token % VOCAB]))
    assert len(table) <= 16
    tokens, probs = table.find(0, 499, 499)
    assert tokens[0] == 499 % VOCAB
    assert probs[0] == pytest.approx(0.9)
    assert not len(table.find(0, 1, 1)[0])
    assert not len(table.find(1, 499, 499)[0])


def test_two_drafts_are_merged_and_credited_to_both() -> None:
    sources = lookup(own_text=False)
    step = request([0, 1])
    sources.follow(step)
    high = given_class(0.9, 0)
    given = Given(
        np.array([2, 3, 2, 4], np.int32),
        np.array([-1, 0, -1, 0], np.int32),
        np.array([0.9, 0.81, 0.9, 0.81], np.float32),
        2,
    )
    found = sources.grow(step, WEIGHTS, 0.0, given)
    assert found.tokens.tolist()[0] == 2
    assert found.evidence[0, COPY] == found.evidence[0, DRAFTER] == high
    assert sorted(found.tokens.tolist()) == [2, 3, 4]
    assert found.parents.tolist() == [-1, 0, 0]
    assert not len(sources.grow(step, WEIGHTS, 0.0, NOTHING_GIVEN))


def answered(
    sources: Lookup, name: str, prompt: list[int], answer: list[int], **given: Any
) -> None:
    """A request comes, is answered in one step, and goes."""
    given = {"num_prompt_tokens": len(prompt), "new_tokens": answer, **given}
    sources.follow(request([*prompt, *answer], name=name, **given))
    sources.finish(name)


def is_same_answer(found: Any) -> bool:
    return bool(found.evidence[0, ANSWERS] >= evidence.matched_class(len(evidence.LENGTHS), 0))


@pytest.mark.parametrize("size", [1, 3, 8])  # shorter and longer than what is looked up
def test_what_the_same_prompt_was_answered_counts_for_more(size: int) -> None:
    answer = [1, 2, 3, 4, 1, 2, 3, 4, 5, 5]
    others = [*answer[:size], 0, 0]  # they go on otherwise
    sources = lookup(own_text=False, earlier_answers=200)
    answered(sources, "same", [0, 5], answer)
    for number in range(4):
        answered(sources, f"other {number}", [0, number], others)
    for prompt, token, is_same in (([0, 5], answer[size], True), ([4, 4], 0, False)):
        step = request([*prompt, *answer[:size]], name=f"{prompt}", num_prompt_tokens=2)
        sources.follow(step)
        found = sources.grow(step, WEIGHTS, 0.01)
        assert found.tokens[0] == token
        assert is_same_answer(found) is is_same
    again = request([0, 5, *answer[:size]], name="again", num_prompt_tokens=2)
    sources.follow(again)
    found = sources.grow(again, WEIGHTS, 0.01)
    chain = answer[size : size + 5]
    assert found.tokens.tolist()[: len(chain)] == chain


def test_an_answer_elsewhere_in_the_same_answer_is_not_as_far_into_it() -> None:
    sources = lookup(earlier_answers=200)
    answered(sources, "earlier", [0, 5], [3, 1, 2, 4, 4])
    step = request([0, 5, 1, 2], num_prompt_tokens=2)  # without the 3
    sources.follow(step)
    found = sources.grow(step, WEIGHTS, 0.01)
    assert found.tokens[0] == 4
    assert not is_same_answer(found)


def test_many_other_answers_that_begin_alike_do_not_hide_it() -> None:
    sources = lookup(own_text=False, earlier_answers=100_000, max_ngram=12)
    opening, answer = [2, 3, 4] * 6, [*[2, 3, 4] * 6, 5, 4, 3, 2, 1]
    answered(sources, "same", [0, 5], answer)
    for number in range(300):
        prompt = [number // 36 % 6, number // 6 % 6, number % 6]
        answered(sources, f"other {number}", prompt, [*opening, 1, 1])
    for size in (1, len(opening)):
        step = request([0, 5, *answer[:size]], name=f"{size}", num_prompt_tokens=2)
        sources.follow(step)
        found = sources.grow(step, WEIGHTS, 0.01)
        assert is_same_answer(found)
        assert found.tokens.tolist()[:5] == answer[size : size + 5]


def test_a_word_in_the_same_place_is_not_the_same_answer() -> None:
    sources = lookup(own_text=False, earlier_answers=200, max_ngram=12)
    answered(sources, "other words", [0, 5], [1, 1, 1, 1, 1, 1, 3, 2, 4, 4, 4])
    step = request([0, 5, 2, 5, 2, 5, 2, 5, 3, 2], num_prompt_tokens=2)
    sources.follow(step)
    found = sources.grow(step, WEIGHTS, 0.01)
    assert found.tokens[0] == 4
    assert not is_same_answer(found)


def test_an_answer_that_was_cut_short_does_not_hide_the_whole_one() -> None:
    sources = lookup(own_text=False, earlier_answers=200)
    answer = [1, 2, 3, 4, 5, 5, 4]
    for name, said in (("whole", answer), ("cut", answer[:3])):
        answered(sources, name, [0, 5], said)
    step = request([0, 5, *answer[:3]], num_prompt_tokens=2)
    sources.follow(step)
    assert sources.grow(step, WEIGHTS, 0.2).tokens.tolist()[:4] == answer[3:]


def test_an_answer_that_was_interrupted_is_known_as_a_whole() -> None:
    sources = lookup(own_text=False, earlier_answers=200)
    answer = [1, 2, 3, 4, 5, 5, 4, 2, 2]
    answered(sources, "preempted", [0, 5], answer[:4])
    for size in (5, 9):  # it comes back with what it said
        given: dict[str, Any] = {"num_prompt_tokens": 2, "new_tokens": answer[4:size][-4:]}
        sources.follow(request([0, 5, *answer[:size]], name="preempted", **given))
    sources.finish("preempted")
    for size in (2, 4, 5):
        step = request([0, 5, *answer[:size]], name=f"{size}", num_prompt_tokens=2)
        sources.follow(step)
        assert sources.grow(step, WEIGHTS, 0.2).tokens.tolist()[:4] == answer[size : size + 4]


LAST = [3, 4, 5, 5, 4]


@pytest.mark.parametrize(
    ("steps", "ends"),
    [
        ([([2], 8), (LAST, 0), ([0], 0)], ()),  # the last token comes for nothing, and may be lost
        ([([2, *LAST], 0), ([0], 0)], ()),
        ([([token], 0) for token in (2, *LAST, 0)], (0,)),  # nothing is drafted in this engine
    ],
)
def test_an_answer_is_remembered_to_its_last_drafted_token(
    steps: list[tuple[list[int], int]], ends: tuple[int, ...]
) -> None:
    sources = lookup(earlier_answers=200)
    said = [0, 5]
    for new, room in (([1], 8 * (not ends)), *steps):
        said += new
        given: dict[str, Any] = {"num_prompt_tokens": 2, "new_tokens": new, "room": room}
        sources.follow(request(said, name="earlier", ends=frozenset(ends), **given))
    sources.finish("earlier")
    again = request([0, 5, 1, 2], num_prompt_tokens=2)
    sources.follow(again)
    found = sources.grow(again, WEIGHTS, 0.2)
    assert found.tokens.tolist()[: len(LAST)] == LAST


def test_a_corpus_is_asked_by_two_tokens_and_then_by_one(tmp_path: Path) -> None:
    # 1 2 -> 3 twice, 3 2 -> 4 thrice; so 2 -> 4 in three of five. What occurs once is left out.
    store = build_corpus(tmp_path, [*[[1, 2, 3]] * 2, *[[3, 2, 4]] * 3, [5, 1, 0]], VOCAB)
    sources = lookup(own_text=False, corpus=store.arrays)
    two, one = given_class(1.0, 0), given_class(0.6, 1)
    for text, token, strength in (
        ([1, 2], 3, two),
        ([3, 2], 4, two),
        ([5, 2], 4, one),
        ([2], 4, one),
        ([-1, 2], 4, one),
    ):
        step = request(text, name=f"{text}", num_prompt_tokens=1)
        sources.follow(step)
        found = sources.grow(step, WEIGHTS, 0.0)
        assert found.tokens[0] == token
        assert found.evidence[0, CORPUS] == strength
        assert not found.evidence[0, [OWN, ANSWERS, RECYCLED, COPY, DRAFTER]].any()
    step = request([1, 2], name="on", num_prompt_tokens=1)
    sources.follow(step)
    assert sources.grow(step, WEIGHTS, 0.0).tokens.tolist()[:1] == [3]
    unknown = request([0, 0], name="unknown", num_prompt_tokens=1)
    sources.follow(unknown)
    assert not len(sources.grow(unknown, WEIGHTS, 0.0))


def test_a_corpus_of_fewer_tokens_than_the_target_has(tmp_path: Path) -> None:
    store = build_corpus(tmp_path, [[1, 2, 3]] * 2, 4)  # ids 4 and 5 are the target's alone
    sources = lookup(own_text=False, corpus=store.arrays)
    for text, expected in (([1, 2], [3]), ([5, 2], [3]), ([1, 5], []), ([4, 4], [])):
        step = request(text, name=f"{text}", num_prompt_tokens=1)
        sources.follow(step)
        assert sources.grow(step, WEIGHTS, 0.0).tokens.tolist() == expected
