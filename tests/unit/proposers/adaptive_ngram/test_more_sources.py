# SPDX-License-Identifier: Apache-2.0
"""Suffix frequency and recycled rows in the tree of n-grams."""

import itertools
from typing import Any

import numpy as np
import pytest

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import parse_options
from vllm_spec_ext.proposers.adaptive_ngram import AdaptiveNgram
from vllm_spec_ext.proposers.adaptive_ngram.options import AdaptiveNgramOptions
from vllm_spec_ext.proposers.base import (
    UNSALTED,
    EngineHandle,
    NextTokens,
    RequestStep,
    StepContext,
)
from vllm_spec_ext.replay import Recording, replay

VOCAB = 500
RANDOM = np.random.default_rng(0)


def engine() -> EngineHandle:
    return EngineHandle(VOCAB, 4096, 8, 16, "none", lambda: None)


def started(**given: Any) -> AdaptiveNgram:
    method = AdaptiveNgram(parse_options(AdaptiveNgramOptions, given, "adaptive_ngram"))
    method.start(engine())
    return method


def words(count: int) -> list[int]:
    return [int(one) for one in RANDOM.integers(3, VOCAB, count)]


# Trigrams lead from every "7 8" to the word that stood there last; three more words tell.
PARTS = [[*words(3), 7, 8, *words(8)] for _ in range(6)]
AMBIGUOUS = Recording([2, *itertools.chain(*PARTS)], [*PARTS[2], *PARTS[0], *PARTS[4]])


def test_longer_matches_tell_what_trigrams_cannot() -> None:
    alone = replay(started(), [AMBIGUOUS], engine())
    together = replay(started(own_text=True), [AMBIGUOUS], engine())
    assert together.tokens_per_step > 1.1 * alone.tokens_per_step


def test_answers_are_found_by_later_requests() -> None:
    answer = words(30)
    again = [Recording(words(10), [5, *answer]), Recording(words(10), [6, *answer])]
    alone = replay(started(), again, engine())
    together = replay(started(earlier_answers=1000), again, engine())
    assert together.tokens_per_step > 1.3 * alone.tokens_per_step


def test_what_the_target_foresaw_is_drafted() -> None:
    method = started(recycled_contexts=64)
    assert method.needs.next_tokens == 8
    ids = np.array([[41, 42, 43, 44, 45, 46, 47, 48]], np.int32)
    probs = np.array([[0.9, *[0.01] * 7]], np.float32)
    rows = NextTokens(np.array([[30, 31]], np.int32), ids, probs)
    text = np.array([9, 30, 31], np.int32)
    step = RequestStep("a", text, 2, [31], 4, share_group=UNSALTED, next_tokens=rows)
    (draft,) = method.propose(StepContext([step]))
    assert draft.tokens[0] == 41
    assert draft.sources is not None
    assert draft.sources[0] == ("recycled",)
    method.finish(["a"])


def test_trees_of_both_name_their_sources() -> None:
    method = started(own_text=True)
    text = np.array([9, 30, 31, 32, 33, 9, 30, 31], np.int32)
    step = RequestStep("a", text, 7, [31], 4, share_group=UNSALTED)
    (draft,) = method.propose(StepContext([step]))
    assert draft.tokens[0] == 32
    assert draft.sources is not None
    assert draft.sources[0] == ("own text", "n-grams")


@pytest.mark.parametrize("given", [{"tree": False}, {"preset": "aded_reference"}])
def test_they_join_trees_of_probabilities_alone(given: dict[str, Any]) -> None:
    with pytest.raises(SpecExtError, match="join a tree of probabilities"):
        parse_options(AdaptiveNgramOptions, {**given, "own_text": True}, "adaptive_ngram")
