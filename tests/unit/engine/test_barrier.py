# SPDX-License-Identifier: Apache-2.0
"""Whatever a proposer does wrong costs drafts, is logged once a kind and counted; or it raises."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from vllm_spec_ext.engine.drafting.barrier import STRICT, Barrier
from vllm_spec_ext.errors import ProposerError
from vllm_spec_ext.proposers.base import EMPTY_DRAFT, Draft, RequestStep, StepContext, chain

VOCAB = 10


def step(num_requests: int = 2) -> StepContext:
    request = RequestStep("r", np.array([1, 2], np.int32), 1, [2], room=4)
    return StepContext([request] * num_requests)


def tree(parents: Any, tokens: Any = (1, 2, 3), **more: Any) -> Draft:
    return Draft(np.array(tokens, np.int32), parents, **more)


def probs(rows: int = 2, value: float = 1 / VOCAB, width: int = VOCAB) -> torch.Tensor:
    return torch.full((rows, width), value)


def spoiled(value: float) -> torch.Tensor:
    rows = probs()
    rows[1, 3] = value
    return rows


def without(token: int) -> torch.Tensor:
    rows = torch.full((2, VOCAB), 1 / (VOCAB - 1))
    rows[:, token] = 0.0
    return rows


def nearly_without(token: int) -> torch.Tensor:
    """A probability that float32, in which drafts are verified, does not have."""
    rows = without(token).double()
    rows[:, token] = 1e-60
    return rows


def paths(value: float) -> Draft:
    return tree(None, path_probs=np.array([1.0, value, 0.5], np.float32))


def named(strengths: Any) -> Draft:
    """By two sources each."""
    return tree(None, sources=(("a", "c"),) * 3, strengths=(strengths,) * 3)


BROKEN: dict[str, tuple[Any, str]] = {
    "no draft": ([1, 2], "found a list, expected a Draft"),
    "none": (None, "found a NoneType"),
    "list of tokens": (Draft([1, 2]), "tokens: found list"),  # type: ignore[arg-type]
    "two dimensions": (Draft(np.zeros((2, 2), np.int32)), r"tokens: found ndarray int32\[2, 2\]"),
    "floats": (Draft(np.zeros(2)), "tokens: found ndarray float64"),  # type: ignore[arg-type]
    "above the vocabulary": (chain([1, VOCAB]), "found id 10, expected 0 to 9"),
    "negative": (chain([1, -1]), "found id -1"),
    "huge": (Draft(np.array([2**40])), "found id 1099511627776"),
    "too few parents": (tree(np.array([-1, 0])), "found 2 parents"),
    "parents as a list": (tree([-1, 0, 1]), "parents: found list"),
    "own parent": (tree(np.array([-1, 1, 0])), "node 1: found parent 1"),
    "parent behind": (tree(np.array([-1, 2, 0])), "node 1: found parent 2"),
    "parent below the root": (tree(np.array([-2, 0, 1])), "node 0: found parent -2"),
    "path_probs": (tree(None, path_probs=np.ones(2, np.float32)), r"path_probs: .*float32\[2\]"),
    "path_probs as a list": (tree(None, path_probs=[1.0] * 3), "path_probs: found list"),
    "path_probs as integers": (tree(None, path_probs=np.ones(3, int)), "path_probs: .*int64"),
    "log-probabilities": (paths(-0.1), "path_probs: found -0.1, expected 0 to 1"),
    "path_probs above one": (paths(1.5), "path_probs: found 1.5, expected 0 to 1"),
    "path_probs that are NaN": (paths(float("nan")), "path_probs: found nan"),
    "sources": (tree(None, sources=[("a",)]), "sources: found 1, expected one for each node"),
    "sources as a number": (tree(None, sources=5), "sources: found int"),
    "sources that are no tuples": (tree(None, sources=("a",) * 3), "sources: found 'a'"),
    "sources that are no names": (tree(None, sources=((7,),) * 3), r"sources: found \(7,\)"),
    "strengths of nobody": (tree(None, strengths=("b",) * 3), "strengths: found no sources"),
    "strengths": (
        named(("b",)),
        r"strengths: found \('b',\), expected one for each of \('a', 'c'\)",
    ),
    "strengths as a number": (named(5), r"strengths: found 5, expected one for each of"),
    "too few strengths": (
        tree(None, sources=(("a",),) * 3, strengths=(("b",),)),
        "strengths: found 1, expected one for each node",
    ),
    "sparse": (tree(None, (1, 2), probs=probs().to_sparse()), "checks raised"),
    "rows": (tree(None, (1, 2), probs=probs(3)), r"probs: found shape \(3, 10\)"),
    "width": (tree(None, (1, 2), probs=probs(2, 0.1, 11)), r"expected \(2, 10\)"),
    "array": (tree(None, (1, 2), probs=np.ones((2, VOCAB))), "expected a tensor of floats"),
    "integers": (tree(None, (1, 2), probs=torch.ones(2, VOCAB).long()), "tensor of floats"),
    "logits": (tree(None, (1, 2), probs=probs(2, 1.0)), "rows that sum to"),
    "NaN": (tree(None, (1, 2), probs=spoiled(float("nan"))), "rows that sum to"),
    "infinite": (tree(None, (1, 2), probs=spoiled(float("inf"))), "rows that sum to"),
    "negative probability": (tree(None, (1, 2), probs=spoiled(-0.001)), "least -0.001"),
    "impossible": (tree(None, (1, 2), probs=without(2)), "probability 0"),
    "nearly impossible": (tree(None, (1, 2), probs=nearly_without(2)), "probability 0"),
    "kind": (tree(None, (1, 2), probs=probs(), drawn="chosen"), "drawn: found 'chosen'"),
    "twice": (
        tree(np.array([-1, -1]), (1, 1), probs=probs(), drawn="without_replacement"),
        "a token twice among siblings",
    ),
}

SOUND = {
    "empty": EMPTY_DRAFT,
    "empty floats": Draft(np.empty(0, np.int64)),
    "chain": chain([0, VOCAB - 1]),
    "longer than the room": chain([1] * 9),
    "tree": tree(np.array([-1, -1, 0], np.int32)),
    "drawn": tree(None, (1, 2), probs=probs()),
    "bfloat16": tree(None, (1, 2), probs=probs().to(torch.bfloat16)),
    "rounded up": paths(1.0 + 1e-6),
    "named": tree(None, path_probs=np.ones(3, np.float16), sources=[("a", "b"), (), ("a",)]),
    "strengths": named(("b", "d")),
    "siblings": tree(np.array([-1, -1]), (1, 2), probs=probs(), drawn="without_replacement"),
}


@pytest.fixture
def barrier(monkeypatch: pytest.MonkeyPatch) -> Barrier:
    monkeypatch.delenv(STRICT, raising=False)
    # vLLM, where another test has imported it, lets its loggers pass nothing on to caplog.
    logger = logging.getLogger("barrier")
    monkeypatch.setattr("vllm_spec_ext.engine.drafting.barrier.logger", logger)
    return Barrier("mine", VOCAB)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_draft_costs_its_request_the_draft(
    name: str, barrier: Barrier, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, message = BROKEN[name]
    good = chain([3])
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert barrier.drafts(lambda step: [good, broken], step()) == [good, EMPTY_DRAFT]
    assert barrier.num_refused == 3
    assert len(caplog.records) == 1
    monkeypatch.setenv(STRICT, "1")
    with pytest.raises(ProposerError, match=rf"proposer 'mine': .*{message}"):
        barrier.drafts(lambda step: [good, broken], step())


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_draft_passes(name: str, barrier: Barrier) -> None:
    draft = SOUND[name]
    assert barrier.drafts(lambda step: [draft, draft], step())[1] is draft
    assert barrier.num_refused == 0


@pytest.mark.parametrize("made", [[], [EMPTY_DRAFT], [EMPTY_DRAFT] * 3, 7, None, EMPTY_DRAFT])
def test_a_wrong_number_of_drafts(
    made: Any, barrier: Barrier, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert barrier.drafts(lambda step: made, step()) == [EMPTY_DRAFT] * 2
    assert "propose() returned" in caplog.text
    assert barrier.num_refused == 2


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def test_each_kind_of_failure_is_logged_once_with_its_trace(
    barrier: Barrier, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.ERROR):
        for error in (KeyError("a"), KeyError("b"), ValueError("c"), RuntimeError("d")):
            assert barrier.drafts(failing(error), step()) == [EMPTY_DRAFT] * 2
        assert barrier.call("observe", failing(KeyError("a")), None) is None
    assert [record.message.split(".")[0] for record in caplog.records] == [
        "vllm-spec-ext: proposer 'mine': propose() raised KeyError: 'a'",
        "vllm-spec-ext: proposer 'mine': propose() raised ValueError: c",
        "vllm-spec-ext: proposer 'mine': propose() raised RuntimeError: d",
        "vllm-spec-ext: proposer 'mine': observe() raised KeyError: 'a'",
    ]
    assert all(record.exc_info for record in caplog.records)
    assert barrier.num_refused == 8
    monkeypatch.setenv(STRICT, "1")
    with pytest.raises(ProposerError, match="raised ValueError: c"):
        barrier.drafts(failing(ValueError("c")), step())


def test_a_person_can_still_stop_the_engine(barrier: Barrier) -> None:
    with pytest.raises(KeyboardInterrupt):
        barrier.call("propose", failing(KeyboardInterrupt()), None)
