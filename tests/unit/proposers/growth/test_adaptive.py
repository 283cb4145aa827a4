# SPDX-License-Identifier: Apache-2.0
"""No pass that does not pay, and a way back; costs are made up, no clock runs."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from fake_model import FakeModel, engine, random_next_logits, request, step

from vllm_spec_ext.options import parse_options
from vllm_spec_ext.proposers.base import Draft, StepOutcome
from vllm_spec_ext.proposers.draft_tree import agreeing_path, parents_of
from vllm_spec_ext.proposers.payoff.forward_payoff import (
    Retries,
    TokenSeconds,
    paying,
    profit_by_depth,
)
from vllm_spec_ext.proposers.token_tree import TokenTree

VOCAB = 6
TARGET = random_next_logits(0, VOCAB, sharpness=4.0)
WRONG = random_next_logits(1, VOCAB, sharpness=4.0)


class Served:
    """Requests decoded greedily with a method, at given costs."""

    def __init__(self, *models: FakeModel, num_requests: int = 1, **given: Any) -> None:
        names = [model.name for model in models]
        options = parse_options(TokenTree.info.options, {"models": names, **given}, "token_tree")
        self.proposer = TokenTree(options)
        self.proposer.start(engine(*models))
        self.texts = [[1, 2, i % VOCAB] for i in range(num_requests)]
        self.new = [1] * num_requests
        self.drafts: list[Draft] = []

    def run(self, num_steps: int, *, plain_seconds: float | None, **costs: Any) -> float:
        """Tokens a step and request."""
        emitted = 0
        for _ in range(num_steps):
            asked = [
                request(text, name=str(i), num_new=new)
                for i, (text, new) in enumerate(zip(self.texts, self.new, strict=True))
            ]
            self.drafts = self.proposer.propose(step(*asked, plain_seconds=plain_seconds, **costs))
            outcomes = []
            for i, draft in enumerate(self.drafts):
                truth = list(self.texts[i])
                for _ in range(len(draft) + 1):
                    truth.append(int(TARGET(truth).argmax()))
                right = truth[len(self.texts[i]) :]
                nodes = agreeing_path(draft.tokens.tolist(), parents_of(draft), right)
                self.texts[i] += right[: len(nodes) + 1]
                self.new[i] = len(nodes) + 1
                emitted += len(nodes) + 1
                if len(draft):
                    outcomes.append(StepOutcome(str(i), len(draft), len(nodes), nodes))
            self.proposer.observe(outcomes)
        return emitted / num_steps / len(self.texts)


def model(
    next_logits: Any = TARGET, seconds: Callable[[int], float] | None = None, **more: Any
) -> FakeModel:
    return FakeModel(next_logits, VOCAB, seconds=seconds, max_model_len=10**6, **more)


def _always(cost: float, num_rows: int) -> float:
    return cost


def test_with_unknown_costs_all_is_drafted() -> None:
    slow = model(seconds=lambda n: 10.0)
    assert Served(slow, candidates=1).run(3, plain_seconds=None) == 9  # 8 levels
    unmeasured = model()
    assert Served(unmeasured, candidates=1).run(3, plain_seconds=1.0) == 9
    always = Served(model(seconds=lambda n: 10.0), candidates=1, adaptive_length=False)
    assert always.run(3, plain_seconds=1.0, min_probability=0.9) == 9


def test_a_model_as_slow_as_the_target_is_never_run() -> None:
    slow = model(seconds=lambda n: 1.01)
    assert Served(slow).run(3000, plain_seconds=1.0) == 1.0
    assert slow.num_passes == 0


def test_a_batch_shares_a_pass() -> None:
    """The same model at the same cost: too dear for one request, cheap for sixteen."""
    for num_requests, drafts in ((1, False), (16, True)):
        dear = model(seconds=lambda n: 1.01)
        served = Served(dear, num_requests=num_requests)
        # A batch's plain step takes longer, as on a busy machine.
        served.run(20, plain_seconds=1.0 if num_requests == 1 else 4.0)
        assert (dear.num_passes > 0) == drafts


def test_a_cheap_right_model_drafts_deep_and_a_dear_one_less() -> None:
    found = []
    for cost in (0.01, 0.5):
        served = Served(model(seconds=partial(_always, cost)), candidates=1)
        served.run(150, plain_seconds=1.0)
        found.append(served.run(20, plain_seconds=1.0))
    assert found[0] > 8.5
    assert found[1] > 1.5  # right always: each pass of 0.5 saves a step of 1


def test_a_wrong_model_is_stopped_and_tried_seldom() -> None:
    wrong = model(WRONG, seconds=lambda n: 0.3)
    served = Served(wrong, num_requests=4, candidates=1)
    served.run(100, plain_seconds=2.0)
    before = wrong.num_passes
    served.run(700, plain_seconds=2.0)
    assert 0 < wrong.num_passes - before < 40
    # A try is a small one.
    assert all(len(names) == 1 for names in wrong.synced[-3:])


def test_a_model_that_became_right_comes_back() -> None:
    turning = model(WRONG, seconds=lambda n: 0.2)
    served = Served(turning, candidates=1, max_depth=4)
    assert served.run(300, plain_seconds=1.0) < 1.3
    turning.next_logits = TARGET
    served.run(1600, plain_seconds=1.0)
    assert served.run(50, plain_seconds=1.0) > 3.0


def test_a_second_model_that_adds_nothing_is_dropped() -> None:
    first, second = model(seconds=lambda n: 0.1), model(seconds=lambda n: 0.1, name="copy")
    served = Served(first, second)
    served.run(300, plain_seconds=1.0)
    passes = first.num_passes, second.num_passes
    served.run(200, plain_seconds=1.0)
    assert first.num_passes - passes[0] >= 400
    assert second.num_passes - passes[1] < 60


def test_levels_stop_where_the_model_is_unsure() -> None:
    flat = random_next_logits(5, VOCAB, sharpness=0.05)  # every token has about a sixth

    def sure_then_unsure(text: Any) -> Any:
        return TARGET(text) * 10 if len(text) % 5 else flat(text)

    found = model(sure_then_unsure, seconds=lambda n: 0.4)
    served = Served(found, candidates=1)
    served.run(60, plain_seconds=1.0)
    lengths = {tuple(len(text) % 5 for text in texts) for texts in found.read[-40:]}
    assert lengths  # it drafts
    reading_unsure = sum(len(text) % 5 == 1 for texts in found.read[-40:] for text in texts)
    assert reading_unsure < 4  # it does not read on behind a token it was not sure of


def test_nodes_that_cost_more_than_they_bring_are_left_out() -> None:
    cheap = Served(model(seconds=lambda n: 0.01))
    cheap.run(100, plain_seconds=1.0, min_probability=0.0)
    all_nodes = len(cheap.drafts[0])
    dear = Served(model(seconds=lambda n: 0.01))
    dear.run(100, plain_seconds=1.0, min_probability=0.5)
    assert all_nodes == 16
    assert len(dear.drafts[0]) < 12


def test_drawn_drafts_are_held_back_too() -> None:
    slow = model(seconds=lambda n: 1.01)
    options = parse_options(TokenTree.info.options, {"models": ["m"]}, "token_tree")
    proposer = TokenTree(options)
    proposer.start(engine(slow))
    for _ in range(50):
        (draft,) = proposer.propose(step(request(temperature=1.0), plain_seconds=1.0))
        assert not len(draft)
    assert slow.num_passes == 0
    for min_probability, least in ((0.0, 16), (0.3, 1)):
        fast = model(seconds=lambda n: 0.01)
        proposer = TokenTree(options)
        proposer.start(engine(fast))
        asked = request(temperature=1.0)
        (draft,) = proposer.propose(step(asked, plain_seconds=1.0, min_probability=min_probability))
        assert least <= len(draft) <= (16 if least == 16 else 5)


def test_draws_that_were_worth_nothing_are_tried_again() -> None:
    fast = model(seconds=lambda n: 0.01)
    options = parse_options(TokenTree.info.options, {"models": ["m"]}, "token_tree")
    proposer = TokenTree(options)
    proposer.start(engine(fast))
    steps_with_drafts = []
    for i in range(400):
        (draft,) = proposer.propose(
            step(request(temperature=1.0), plain_seconds=1.0, min_probability=0.4)
        )
        if len(draft):
            steps_with_drafts.append(i)
            # Nothing is accepted at first, later all of it.
            accepted = len(draft) if i > 200 and draft.parents is None else int(i > 200)
            proposer.observe([StepOutcome("a", len(draft), accepted)])
    assert sum(30 < i <= 200 for i in steps_with_drafts) <= 3
    assert any(i > 200 for i in steps_with_drafts)


def test_a_pass_that_finds_nothing_to_draft_counts_as_a_failure() -> None:
    """The model is never sure enough; without drafts there are no outcomes to learn from."""
    flat = random_next_logits(5, VOCAB, sharpness=0.05)
    unsure = model(flat, seconds=lambda n: 0.1)
    served = Served(unsure, candidates=1)
    served.run(150, plain_seconds=1.0, min_probability=0.6)
    before = unsure.num_passes
    served.run(100, plain_seconds=1.0, min_probability=0.6)
    assert unsure.num_passes - before < 20


def test_which_branches_a_pass_reads() -> None:
    assert paying([0.9, 0.1, 0.5], lambda n: 0.3 * n) == [0, 2]
    assert paying([0.9, 0.1, 0.5], lambda n: 1.0) == [0, 1, 2]  # more of them cost nothing
    assert paying([0.2, 0.1], lambda n: 1.0) == []
    assert paying([0.2, 0.1], lambda n: None) == [0, 1]
    assert paying([], lambda n: 0.0) == []


def test_how_deep_it_pays() -> None:
    assert profit_by_depth([0.8, 0.6, 0.3], 0.4, 0.4)[0] == 2
    assert profit_by_depth([0.8, 0.6, 0.3], 0.4, 0.4)[1] == pytest.approx(0.6)
    assert profit_by_depth([0.3, 0.3, 0.3], 0.5, 0.1)[0] == 3  # one level alone would not
    assert profit_by_depth([0.3], 0.5, 0.1) == (0, 0.0)


def test_what_a_token_is_worth() -> None:
    fresh = TokenSeconds()
    assert fresh.costs(4, 2.0, None).token_seconds == pytest.approx(0.5)
    assert fresh.costs(4, None, 0.1).token_seconds is None
    busy = TokenSeconds()
    for _ in range(50):
        busy.observe(1, 3, 0, 0.5)  # three tokens in a step of 1 + 0.5 seconds
    assert busy.costs(1, 1.0, 0.0).token_seconds == pytest.approx(0.5)
    losing = TokenSeconds()
    for _ in range(50):
        losing.observe(1, 1, 8, 2.0)
    assert losing.costs(1, 1.0, 0.2).token_seconds == pytest.approx(1.0)  # plain is the floor


def test_tries_become_rare() -> None:
    retries = Retries()
    due = [i for i in range(1, 3000) if retries.due()]
    assert due[0] == 32
    assert [b - a for a, b in itertools.pairwise(due)][:5] == [64, 128, 256, 512, 512]
    retries.pays()
    assert not any(retries.due() for _ in range(511))  # once is luck
    for _ in range(32):
        retries.pays()
    assert [retries.due() for _ in range(32)].index(True) == 31
