# SPDX-License-Identifier: Apache-2.0
"""A grammar, a thought or a thinking budget that ends inside a draft changes no token."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from generation import sampling_params, tokens
from scenarios import PROMPTS, SCHEMA
from test_greedy_identity import runner_of
from tiny_model import build_tiny_model

EOS = 0
JUNK = 70
NUM_DRAFTED = 8
GRAMMARS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "regex": {"regex": "(ab|cd){2,4}[0-9]x"},
    "enum": {"json": {"enum": ["left", "right"]}},
    "open_regex": {"regex": "[a-z]{2,9}"},  # may end at several places
    "choice": {"choice": ["yes", "no", "not at all"]},
}
TAILS = {
    "nothing": [],
    "end": [EOS],
    "two_ends": [EOS, EOS, JUNK],
    "junk": [JUNK, JUNK + 1, JUNK + 2],
}
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 1}  # judged by another path, same tokens
MODES = {"greedy": GREEDY, "sampled": SAMPLED}

Drafts = dict[int, tuple[list[int], list[int]]]


def chain(tokens_: Sequence[int]) -> tuple[list[int], list[int]]:
    drafted = list(tokens_)[:NUM_DRAFTED]
    return drafted, list(range(-1, len(drafted) - 1))


def fork(tokens_: Sequence[int]) -> tuple[list[int], list[int]]:
    """The tokens behind a wrong first branch; only the first path is used under a grammar."""
    drafted = [(tokens_[0] + 1) % 500, *tokens_][:NUM_DRAFTED] if tokens_ else []
    return drafted, [-1, -1, *range(1, len(drafted) - 1)][: len(drafted)]


def drafts_along(truth: Sequence[int], tail: Sequence[int], shape: Any = chain) -> Drafts:
    """At every place: the rest of the true output, and what a drafter says behind its end."""
    return {n: shape([*truth[n:], *tail]) for n in range(1, len(truth) + 1)}


def outputs_of(engine: Any, prompts: Sequence[Any], params: Sequence[Any]) -> list[list[int]]:
    return [out[0] for out in tokens(engine.generate(list(prompts), list(params), use_tqdm=False))]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("thinker"), thinks=True)


@pytest.fixture(scope="module")
def engines(thinker: Path, make_engine: Any) -> dict[str, Any]:
    common = {"model": str(thinker), "reasoning_parser": "deepseek_r1"}
    script = {"method": "script", "num_speculative_tokens": NUM_DRAFTED}
    return {
        "plain": make_engine(**common),
        "script": make_engine(**common, speculative_config=script),
    }


@pytest.fixture(scope="module")
def marks(engines: dict[str, Any]) -> tuple[int, int]:
    """Ids of ``<think>`` and ``</think>``."""
    tokenizer = engines["plain"].get_tokenizer()
    return tuple(tokenizer.convert_tokens_to_ids(["<think>", "</think>"]))


def accepted(engine: Any) -> int:
    """Accepted tokens since the last call."""
    outcomes = runner_of(engine).drafter._proposer.outcomes
    result = sum(outcome.num_accepted for outcome in outcomes)
    outcomes.clear()
    return result


@pytest.fixture(scope="module")
def same(engines: dict[str, Any]) -> Callable[..., list[list[int]]]:
    """Assert that drafted requests say what plain ones say; gives what they say."""

    def check(
        prompts: Sequence[Any],
        given: Sequence[dict[str, Any]],
        drafts: Callable[[int, list[int]], Drafts],
        least: int = 1,
    ) -> list[list[int]]:
        expected = outputs_of(engines["plain"], prompts, [sampling_params(one) for one in given])
        params = [
            sampling_params(one, {"drafts": drafts(i, truth)})
            for i, (one, truth) in enumerate(zip(given, expected, strict=True))
        ]
        accepted(engines["script"])
        assert outputs_of(engines["script"], prompts, params) == expected
        assert accepted(engines["script"]) >= least
        return expected

    return check


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_a_grammar_that_ends_inside_a_draft(
    grammar: str, mode: str, marks: tuple[int, int], same: Any
) -> None:
    """Drafts that end with it, before it and behind it. The prompts have no open thought."""
    kinds = [(tail, shape) for tail in TAILS.values() for shape in (chain, fork)]
    given = {"max_tokens": 40, **MODES[mode], "structured_outputs": GRAMMARS[grammar]}
    prompts = [f"<think></think>{PROMPTS[i % 3]}" for i in range(len(kinds))]
    expected = same(
        prompts,
        [given] * len(kinds),
        lambda i, truth: drafts_along(truth, *kinds[i]),
        least=8,
    )
    if grammar != "json":  # a random model fills its strings
        assert all(said[-1] == EOS for said in expected)
    assert all(marks[1] not in said for said in expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_grammar_beside_free_requests_with_trees(mode: str, same: Any) -> None:
    """And with a minimum length, a stop string, or an end-of-sequence token that ends nothing."""
    common = {"max_tokens": 40, **MODES[mode]}
    structured = {**common, "structured_outputs": GRAMMARS["open_regex"]}
    more: list[dict[str, Any]] = [
        {"min_tokens": 3},
        {"ignore_eos": True},
        {"stop": ["a", "e", "n"]},
    ]
    given = [common, *({**structured, **one} for one in more), common, structured]
    tails = list(TAILS.values())
    same(
        [f"<think></think>{prompt}" for prompt in PROMPTS[: len(given)]],
        given,
        lambda i, truth: drafts_along(
            truth, tails[i % 4], chain if "structured_outputs" in given[i] else fork
        ),
        least=20,
    )


def thoughts(engines: dict[str, Any], marks: tuple[int, int], given: dict[str, Any]) -> list[str]:
    """Prompts whose thought ends by itself a few tokens into the plain output."""
    prompts = [f"{i} {PROMPTS[i % 2]}<think>" for i in range(60)]
    found = outputs_of(engines["plain"], prompts, [sampling_params(given)] * len(prompts))
    ended = [
        prompt
        for prompt, said in zip(prompts, found, strict=True)
        if marks[1] in said[2:10] and marks[1] not in said[:2]
    ]
    assert len(ended) >= 3
    return ended[:4]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("grammar", ["regex", "choice"])
def test_a_thought_that_ends_inside_a_draft(
    grammar: str, mode: str, engines: dict[str, Any], marks: tuple[int, int], same: Any
) -> None:
    """The grammar starts behind ``</think>``, wherever in a draft that stands."""
    _, end = marks
    # Few tokens, so that a random model closes its thought: bytes that the grammars need, too.
    tokenizer = engines["plain"].get_tokenizer()
    letters = tokenizer.convert_tokens_to_ids(list("abcdx019yesnotl"))
    given = {
        "max_tokens": 40,
        **MODES[mode],
        "structured_outputs": GRAMMARS[grammar],
        "allowed_token_ids": sorted({EOS, end, *letters}),
    }
    if grammar == "choice":
        given["structured_outputs"] = {"choice": ["yes", "no"]}
    prompts = thoughts(engines, marks, given)

    def too_early(truth: list[int]) -> Drafts:
        """Drafts that close the thought at once and go on as the grammar asks."""
        answer = truth[truth.index(end) + 1 :]
        return {n: chain([end, *answer]) for n in range(1, len(truth) + 1)}

    def too_late(truth: list[int]) -> Drafts:
        """Drafts that think on where the target closes its thought."""
        return drafts_along([letters[0] if token == end else token for token in truth], [])

    def ungrammatical(truth: list[int]) -> Drafts:
        """Drafts that close the thought in time and then break the grammar."""
        at = truth.index(end)
        return drafts_along([*truth[: at + 1], JUNK, *truth[at + 1 :]], [])

    def right(tail: Sequence[int]) -> Callable[[list[int]], Drafts]:
        return lambda truth: drafts_along(truth, tail)

    kinds = [too_early, too_late, ungrammatical, *(right(tail) for tail in TAILS.values())]
    for first in range(2):
        rotated = [prompts[(first + i) % len(prompts)] for i in range(len(kinds))]
        expected = same(
            rotated, [given] * len(kinds), lambda i, truth: kinds[i](truth), least=len(kinds)
        )
        assert all(said[-1] == EOS for said in expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [0, 1, 3, 6, 11])
def test_a_thinking_budget_that_ends_inside_a_draft(
    budget: int, mode: str, marks: tuple[int, int], same: Any
) -> None:
    """Beside requests without a budget, which draft trees."""
    common = {"max_tokens": 24, "ignore_eos": True, **MODES[mode]}
    limited = {**common, "thinking_token_budget": budget}
    prompts = [PROMPTS[0] + "<think>", PROMPTS[1], PROMPTS[2] + "<think>", "A<think>"]
    given = [limited, common, limited, common]

    def drafts(i: int, truth: list[int]) -> Drafts:
        return drafts_along(truth, [], fork if i % 2 else chain)

    expected = same(prompts, given, drafts, least=0)
    for said in (expected[0], expected[2]):
        assert marks[1] in said[: budget + 1]

    def without_end(i: int, truth: list[int]) -> Drafts:
        return drafts_along([JUNK if token == marks[1] else token for token in truth], [])

    same(prompts, given, without_end, least=0)


def test_no_rule_lets_a_draft_outlive_a_thinking_budget(
    thinker: Path, marks: tuple[int, int], make_engine: Any
) -> None:
    """A minimum block lets every token stand, but where the end is forced nothing else may."""
    engine = make_engine(
        model=str(thinker),
        reasoning_parser="deepseek_r1",
        speculative_config={
            "method": "fixed",
            "num_speculative_tokens": NUM_DRAFTED,
            "scorer": {"type": "min_block", "length": NUM_DRAFTED + 1},
            "allow_lossy": True,
        },
    )
    budget = 5
    given = {"max_tokens": 24, "ignore_eos": True, "thinking_token_budget": budget}
    params = sampling_params(given, {"tokens": [JUNK] * NUM_DRAFTED})
    (said,) = outputs_of(engine, [PROMPTS[2] + "<think>"], [params])
    assert said[0] != marks[1]  # or there would be no thought
    assert said[1:budget] == [JUNK] * (budget - 1)
    assert said[budget] == marks[1]
    assert JUNK in said[budget + 1 :]
