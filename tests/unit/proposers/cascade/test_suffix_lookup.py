# SPDX-License-Identifier: Apache-2.0
"""Methods that may be asked for a text that is not verified learn nothing from it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_model import engine, request, step

from vllm_spec_ext.options import parse_options
from vllm_spec_ext.proposers.adaptive_ngram import AdaptiveNgram
from vllm_spec_ext.proposers.base import BaseProposer, Continues, Draft, RequestStep
from vllm_spec_ext.proposers.cascade.suffix_lookup import NgramOptions, SuffixLookup
from vllm_spec_ext.proposers.input_copy import InputCopy
from vllm_spec_ext.proposers.input_copy.options import InputCopyRequest

VOCAB = 50
METHODS: dict[str, tuple[type[BaseProposer], dict[str, Any]]] = {
    "ngram": (SuffixLookup, {}),
    "input_copy": (InputCopy, {"source": "prompt", "growth": 0}),
    "adaptive_ngram": (AdaptiveNgram, {"tree": False, "min_confidence": 0.0}),
    "adaptive_ngram tree": (AdaptiveNgram, {"min_confidence": 0.0}),
}


def started(name: str) -> Any:
    cls, given = METHODS[name]
    options = {"adaptive_length": False, **given}
    method = cls(parse_options(cls.info.options, options, name))
    method.start(replace(engine(num_speculative_tokens=16), vocab_size=VOCAB))
    return method


def asked(text: list[int], num_prompt: int, room: int = 16) -> RequestStep:
    one = request(text, room=room)
    return replace(one, num_prompt_tokens=num_prompt, options=InputCopyRequest())


PROMPT = [*range(10, 30), 7, 8, *range(30, 40), 9]
ANSWER = [12, 13, 14, 15]


def run(name: str, provisional: bool) -> list[list[int]]:
    """Drafts of an answer that follows the prompt, is off once, and follows it again."""
    method = started(name)
    answer = [*ANSWER, 16, 5, 31, 32, 33, 34]
    drafts: list[list[int]] = []
    for number in range(1, len(answer) + 1):
        draft: Draft
        (draft,) = method.propose(step(asked([*PROMPT, *answer[:number]], len(PROMPT))))
        drafts.append(draft.tokens.tolist())
        if provisional:
            for added in ([17], [5, 6], [3] * 9, [45, 46, 47], answer[number:]):
                if added:
                    method.continue_from("a", added, 6)
    return drafts


@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_learned_of_what_is_not_verified(name: str) -> None:
    plain = run(name, provisional=False)
    assert any(plain)
    assert run(name, provisional=True) == plain


@pytest.mark.parametrize("name", METHODS)
def test_it_goes_on_behind_what_was_written(name: str) -> None:
    method = started(name)
    assert issubclass(METHODS[name][0], Continues)
    assert len(method.continue_from("never seen", [1], 4)) == 0
    (draft,) = method.propose(step(asked([*PROMPT, *ANSWER], len(PROMPT))))
    assert draft.tokens.tolist()[:3] == [16, 17, 18]
    following = method.continue_from("a", [16, 17], 3)
    assert isinstance(following, np.ndarray)
    assert following.tolist() == [18, 19, 20]
    assert method.continue_from("a", [16, 30, 31], 2).tolist() == [32, 33]  # another place
    assert len(method.continue_from("a", [16, 17], 0)) == 0
    method.finish(["a"])
    assert len(method.continue_from("a", [16], 3)) == 0


def test_a_replaced_token_of_a_copy() -> None:
    """As after verification, copying goes on behind it for a few tokens."""
    method = started("input_copy")
    method.propose(step(asked([*PROMPT, *ANSWER], len(PROMPT))))
    assert method.continue_from("a", [16, 45], 9).tolist() == [18, 19, 20, 21]
    assert method.continue_from("a", [45, 46], 9).tolist() == []


def test_of_several_places_the_next_one_is_copied() -> None:
    """As after verification: the first place behind the one that was being copied."""
    method = started("input_copy")
    prompt = [7, 8, 20, 21, *range(30, 40), 7, 8, 22, 23]
    method.propose(step(asked([*prompt, 30, 31, 32], len(prompt))))
    assert method.continue_from("a", [7, 8], 2).tolist() == [22, 23]


def test_a_lookup_prefers_the_longest_and_latest_and_repeats_itself() -> None:
    method = started("ngram")
    text = [1, 2, 3, 9, 2, 3, 4, 2, 3]
    (draft,) = method.propose(step(asked(text, 2, room=5)))
    assert draft.tokens.tolist() == [4, 2, 3, 4, 2]
    (draft,) = method.propose(step(asked([*text, 41], 2)))
    assert not len(draft)  # never seen before
    (draft,) = method.propose(step(asked([*text, 41, 1], 2, room=0)))
    assert not len(draft)
    assert method.continue_from("a", [9, 2], 3).tolist() == [3, 4, 2]


def test_lengths_that_find_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="min_ngram=20 is above max_ngram=4; lower min_ngram"):
        NgramOptions(min_ngram=20, max_ngram=4)
