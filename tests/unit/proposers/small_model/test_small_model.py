# SPDX-License-Identifier: Apache-2.0
"""`small_model`: its options, and requests that come and go."""

from typing import Any

import pytest
from fake_model import FakeModel, engine, random_next_logits, request, step

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import parse_options
from vllm_spec_ext.proposers.base import StepOutcome
from vllm_spec_ext.proposers.draft_tree import is_branching, parents_of
from vllm_spec_ext.proposers.models import ModelSpec
from vllm_spec_ext.proposers.small_model import SmallModel

VOCAB = 6


def made(model: FakeModel, num_speculative_tokens: int = 4, **given: Any) -> SmallModel:
    options = parse_options(SmallModel.info.options, {"model": "m", **given}, "small_model")
    proposer = SmallModel(options)
    proposer.start(engine(model, num_speculative_tokens=num_speculative_tokens))
    return proposer


def test_options() -> None:
    given = {"model": "drafts/cut4", "quantization": "fp8"}
    options = parse_options(SmallModel.info.options, given, "small_model")
    assert SmallModel.models(options) == [ModelSpec("cut4", "drafts/cut4", quantization="fp8")]
    for bad, words in (
        ({}, "model is missing"),
        ({"model": ""}, "at least 1 character"),
        ({"model": "a", "candidates": 0}, "candidates"),
        ({"model": "a", "modle": "b"}, "Did you mean 'model'?"),
    ):
        with pytest.raises(SpecExtError, match=words.replace("?", r"\?")):
            parse_options(SmallModel.info.options, bad, "small_model")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_is_drafted_if_asked_for(temperature: float) -> None:
    model = FakeModel(random_next_logits(0, VOCAB, sharpness=1.0), VOCAB)
    asked = request(temperature=temperature, room=12)
    (chain,) = made(model).propose(step(asked))
    assert chain.parents is None
    assert len(chain) == 4
    (tree,) = made(model, 12, tree=True, max_depth=3).propose(step(asked))
    assert is_branching(parents_of(tree))
    assert len(tree) == 12
    assert (tree.probs is not None) == (temperature > 0.0)


def test_requests_that_come_and_go() -> None:
    proposer = made(FakeModel(random_next_logits(0, VOCAB), VOCAB))
    for i in range(20):
        proposer.propose(step(*(request(name=str(i + k)) for k in range(3))))
        proposer.observe([StepOutcome(str(i + 1), 4, 2), StepOutcome("unknown", 3, 3)])
        proposer.finish([str(i), "never seen"])
    assert len(proposer._learning._waiting) <= 3
    assert len(proposer._read[0]) <= 3
    proposer.finish(["a"])
    fresh = SmallModel(proposer.options)
    fresh.finish(["a"])  # before start


def test_a_draft_without_an_outcome_is_no_news() -> None:
    proposer = made(FakeModel(random_next_logits(0, VOCAB), VOCAB))
    for _ in range(50):
        proposer.propose(step(request()))
    (record,) = proposer._learning.models
    assert record.levels.rate(0) == pytest.approx(0.7)
