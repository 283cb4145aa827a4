# SPDX-License-Identifier: Apache-2.0
"""Earlier answers, each behind what says which prompt it answered."""

import numpy as np
import pytest

from vllm_spec_ext.proposers.base import UNSALTED, IntArray
from vllm_spec_ext.proposers.text_index.answer_memory import (
    NUM_MARKS,
    AnswerMemories,
    AnswerMemory,
    heading,
)

SEPARATOR = 1000


def ids(*tokens: int) -> IntArray:
    return np.array(tokens, np.int32)


def remembered(*asked: tuple[IntArray, IntArray], limit: int = 200) -> AnswerMemory:
    memories = AnswerMemories(limit, 1, SEPARATOR)
    for prompt, answer in asked:
        memories.add(UNSALTED, answer, answer, memories.heading(prompt))
    found = memories.of(UNSALTED)
    assert found is not None
    return found


@pytest.mark.parametrize("separator", [1, 50_000, 2**31 - 2])
def test_a_heading_has_no_token_and_ends_with_the_separator(separator: int) -> None:
    for prompt in (ids(), ids(1), ids(2), np.arange(5000, dtype=np.int32)):
        found = heading(prompt, separator)
        assert found.dtype == np.int32
        assert found[-1] == separator
        assert len(found) == NUM_MARKS + 1
        assert (found[:-1] > separator).all(), "told from a separator, and from all tokens"


def test_a_heading_belongs_to_a_prompt() -> None:
    text = np.arange(40, dtype=np.int32)
    prompts = [text[:20], text[:19], text[1:20], text[20:]]
    assert len({heading(prompt, 7)[0] for prompt in prompts}) == len(prompts)
    strided = np.stack([text, text], 1)[:20, 0]  # a view, of another layout
    assert np.array_equal(heading(strided, 7), heading(text[:20], 7))


def test_an_answer_opens_as_the_one_to_the_same_prompt_did() -> None:
    first, second = ids(1, 2, 3), ids(1, 2, 4)
    memory = remembered((first, ids(10, 11, 12)), (second, ids(10, 21, 22)))
    for prompt, rest, num_agreeing in (
        (first, [11, 12], NUM_MARKS + 2),
        (second, [21, 22], NUM_MARKS + 2),
        (ids(9), [21, 22], 2),  # the latest that began alike
    ):
        match = memory.longest(ids(10), 16, heading(prompt, SEPARATOR))
        assert memory.following(match, 8).tolist() == rest
        assert match.length == num_agreeing


def test_what_followed_ends_with_the_answer() -> None:
    memory = remembered((ids(1), ids(10, 11)), (ids(2), ids(12, 13)))
    match = memory.longest(ids(10), 16, heading(ids(1), SEPARATOR))
    assert memory.following(match, 8).tolist() == [11]


def test_a_long_answer_is_known_by_its_end_alone() -> None:
    answer = np.arange(300, dtype=np.int32)
    memory = remembered((ids(1), answer), limit=100)
    assert memory.longest(ids(0), 16, heading(ids(1), SEPARATOR)).length == 0
    match = memory.longest(answer[280:290], 16, heading(ids(1), SEPARATOR))
    assert memory.following(match, 3).tolist() == [290, 291, 292]


def test_it_knows_where_answers_to_the_same_prompt_are() -> None:
    first, second = ids(1, 2), ids(3)
    asked = [(first, ids(10, 11)), (second, ids(20)), (first, ids(30, 31, 32))]
    memory = remembered(*asked)
    for prompt, answers in ((first, [[30, 31, 32], [10, 11]]), (second, [[20]]), (ids(9), [])):
        same = memory.same(heading(prompt, SEPARATOR))
        assert same.shape == (len(answers), 2)
        assert [memory.tokens[start:end].tolist() for start, end in same] == answers


def test_what_it_knows_of_a_prompt_is_bounded_and_forgotten_with_the_answers() -> None:
    memory = remembered(*[(ids(1), ids(number)) for number in range(60)], limit=10_000)
    same = memory.same(heading(ids(1), SEPARATOR))
    assert len(same) == 32
    assert memory.tokens[same[:, 0]].tolist() == list(range(59, 27, -1))
    others = [(ids(2), ids(*range(number, number + 9))) for number in range(30)]
    memory = remembered((ids(1), ids(5)), *others, limit=100)
    assert not len(memory.same(heading(ids(1), SEPARATOR)))
    last = memory.same(heading(ids(2), SEPARATOR))[0]
    assert memory.tokens[last[0] : last[1]].tolist() == list(range(29, 38))


@pytest.mark.parametrize("limit", [1, 2, 3, 21, 22, 100])
def test_it_is_bounded(limit: int) -> None:
    memory = AnswerMemory(limit, SEPARATOR)
    for i in range(50):
        answer = np.arange(i, i + i % 30 + 1, dtype=np.int32)
        memory.add(answer, answer, heading(ids(i), SEPARATOR))
        assert 0 < len(memory) <= limit + (limit == 1)
        assert memory.tokens[-1] == answer[-1], "the newest is there"
