# SPDX-License-Identifier: Apache-2.0
"""The method by itself; what the search finds is in ../candidates/test_search.py."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import RequestOptions, parse_options
from vllm_spec_ext.proposers.base import UNSALTED, Draft, EngineHandle, RequestStep, StepContext
from vllm_spec_ext.proposers.suffix_tree import SuffixTree
from vllm_spec_ext.proposers.suffix_tree.options import SuffixTreeOptions
from vllm_spec_ext.proposers.text_index.answer_memory import NUM_MARKS
from vllm_spec_ext.replay import Recording, replay

VOCAB = 500


def engine() -> EngineHandle:
    return EngineHandle(VOCAB, 4096, 8, 16, "none", lambda: None)


def started(**given: Any) -> SuffixTree:
    method = SuffixTree(parse_options(SuffixTreeOptions, given, "suffix_tree"))
    method.start(engine())
    return method


def words(count: int, seed: int) -> list[int]:
    return [int(one) for one in np.random.default_rng(seed).integers(3, VOCAB, count)]


def drafted(
    method: SuffixTree, text: list[int], num_prompt: int, name: str = "a", **given: Any
) -> Draft:
    new = text[num_prompt:]
    step = RequestStep(name, np.array(text, np.int32), num_prompt, new, 6, **given)
    (draft,) = method.propose(StepContext([step]))
    return draft


def test_what_followed_most_often_comes_first() -> None:
    text = [5, 6, 10, 5, 6, 20, 5, 6, 20, 5, 6, 20, 5, 6]
    draft = drafted(started(), text, 13, share_group=UNSALTED)
    assert draft.tokens[0] == 20
    assert draft.sources is not None
    assert draft.sources[0] == ("own text",)


def test_the_longest_suffix_that_is_looked_up_can_be_set() -> None:
    # Behind "4 5 6" stands 10; behind "5 6" alone the 20 is more frequent.
    text = [4, 5, 6, 10, *[9, 5, 6, 20] * 6, 4, 5, 6]
    firsts = [
        int(drafted(started(max_ngram=longest), text, len(text) - 1).tokens[0])
        for longest in (24, 2)
    ]
    assert firsts == [10, 20]


def test_without_its_own_text_it_draws_on_earlier_answers_alone() -> None:
    method = started(own_text=False)
    text = words(8, 0) * 3
    assert len(drafted(method, text, 16, share_group=UNSALTED).tokens) == 0
    method.finish(["a"])
    draft = drafted(method, [3, *text[16:19]], 1, "b", share_group=UNSALTED)
    assert draft.tokens[0] == text[19]
    assert draft.sources is not None
    assert draft.sources[0] == ("earlier answers",)


@pytest.mark.parametrize("kept", [65_536, 0])
def test_earlier_answers_shorten_later_ones_unless_none_are_kept(kept: int) -> None:
    answer = words(40, 1)
    again = [Recording(words(10, 2), [5, *answer]), Recording(words(10, 3), [6, *answer])]
    gained = replay(started(earlier_answers=kept), again, engine()).tokens_per_step
    assert gained > 1.5 if kept else gained < 1.1


def test_a_prompt_that_is_asked_again_is_answered_alike() -> None:
    method = started(own_text=False)
    answers = [[5, *words(12, 10)], [5, *words(12, 11)]]
    for number, answer in enumerate(answers):
        name = f"{number}"
        drafted(method, [7, 8 + number, *answer], 2, name, share_group=UNSALTED)
        method.finish([name])
    for number, answer in enumerate(answers):
        draft = drafted(method, [7, 8 + number, 5], 2, f"again {number}", share_group=UNSALTED)
        assert draft.tokens.tolist()[:6] == answer[1:7]


def test_answers_open_as_earlier_ones_to_other_prompts_did() -> None:
    method = started(own_text=False)
    opening = words(6, 12)
    for number in range(4):
        # Each opens in the same words, the first of which stands elsewhere, too.
        said = [*opening, *words(5, 20 + number), opening[0], *words(5, 30 + number)]
        drafted(method, [number, *said], 1, f"{number}", share_group=UNSALTED)
        method.finish([f"{number}"])
    draft = drafted(method, [9, opening[0]], 1, "other", share_group=UNSALTED)
    assert draft.tokens[0] == opening[1]
    assert draft.path_probs is not None
    assert draft.path_probs[0] > 0.4


def test_a_request_may_keep_its_answer_to_itself() -> None:
    answer = words(20, 4)
    for remember, num_nodes in ((True, 6), (False, 0)):
        method = started(own_text=False)
        options = RequestOptions(remember=remember)
        drafted(method, [7, 8, *answer], 2, share_group=UNSALTED, options=options)
        method.finish(["a"])
        draft = drafted(method, [9, *answer[:5]], 1, "b", share_group=UNSALTED)
        assert len(draft.tokens) == num_nodes


def test_wrong_options_are_refused() -> None:
    with pytest.raises(SpecExtError, match="max_ngram"):
        started(max_ngram=0)


class Costly(SuffixTree):
    """In an engine whose nodes and branches cost something."""

    branch_cost = 0.0

    def propose(self, step: StepContext) -> list[Draft]:
        return super().propose(
            replace(step, min_probability=0.3, branch_cost=self.branch_cost, fixed_cost=0.0)
        )


@pytest.mark.parametrize("branch_cost", [0.0, 0.05])
def test_what_failed_for_long_is_tried_again_whatever_branches_cost(branch_cost: float) -> None:
    """Two hundred requests whose copies are wrong, and then those whose copies are right."""
    draw = np.random.default_rng(0)

    def request(copies: bool) -> Recording:
        said = words(60, int(draw.integers(1 << 30)))
        other = [said[20], *words(39, int(draw.integers(1 << 30)))]
        return Recording([*said, *said[:20]], said[20:] if copies else other)

    method = Costly(parse_options(SuffixTreeOptions, {"earlier_answers": 0}, "suffix_tree"))
    method.start(engine())
    method.branch_cost = branch_cost
    replay(method, [request(copies=False) for _ in range(200)], engine())
    result = replay(method, [request(copies=True) for _ in range(60)], engine())
    assert result.tokens_per_step > 2


def test_an_answer_is_remembered_as_a_whole_after_a_preemption() -> None:
    method = started(own_text=False)
    answer = words(40, 5)
    drafted(method, [7, 8, *answer[:10]], 2, share_group=UNSALTED)
    method.finish(["a"])  # preempted
    again = RequestStep("a", np.array([7, 8, *answer[:11]], np.int32), 2, answer[10:11], 6)
    method.propose(StepContext([replace(again, share_group=UNSALTED)]))
    drafted(method, [7, 8, *answer], 2, share_group=UNSALTED)
    method.finish(["a"])
    for start, end in ((0, 5), (5, 10), (6, 12), (20, 30)):  # the seam is nowhere to be seen
        draft = drafted(method, [9, *answer[start:end]], 1, f"{end}", share_group=UNSALTED)
        assert draft.tokens[0] == answer[end]
    (memory,) = method._lookup._answers._memories.values()
    headings = 2 * (NUM_MARKS + 1)
    assert len(memory) == 10 + len(answer) + headings  # what was there then stays, too


@pytest.mark.parametrize("first", [3, 8])
def test_what_is_said_while_nothing_is_drafted_is_remembered(first: int) -> None:
    """Eight tokens at a time are read then, wherever the count began."""
    method = started()
    text = [5, *words(400, 6)]
    known = 1
    for end in range(1 + first, len(text), 8):
        step = RequestStep("a", np.array(text[:end], np.int32), 1, text[known:end], 0)
        method.propose(StepContext([replace(step, share_group=UNSALTED)]))
        known = end
    method.finish(["a"])
    (memory,) = method._lookup._answers._memories.values()
    assert len(memory) > known - 16


def test_it_needs_a_source() -> None:
    with pytest.raises(SpecExtError, match="own_text, earlier_answers"):
        started(own_text=False, earlier_answers=0)
