# SPDX-License-Identifier: Apache-2.0
"""`cache_view` on a view without an engine: what it drafts, and when it does not."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_model import random_next_logits
from fake_view import FakeView, engine_of
from pydantic import ValidationError

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.base import Draft, RequestStep, StepContext, StepOutcome
from vllm_spec_ext.proposers.cache_view import CacheView
from vllm_spec_ext.proposers.cache_view.fixed_cost import FixedCost
from vllm_spec_ext.proposers.cache_view.options import CacheViewOptions
from vllm_spec_ext.proposers.views import ReadFacts

VOCAB = 12
NEXT_LOGITS = random_next_logits(3, VOCAB)
PLAIN = 0.010  # seconds of a plain step


def started(view: FakeView, num_tokens: int = 4, **options: Any) -> CacheView:
    proposer = CacheView(CacheViewOptions(**{"adaptive_length": False, **options}))
    proposer.start(engine_of([view], VOCAB, num_tokens))
    return proposer


def request(name: str = "a", length: int = 30, room: int = 4, **more: Any) -> RequestStep:
    tokens = (np.arange(length) * 5 % VOCAB).astype(np.int32)
    return RequestStep(name, tokens, 3, [int(tokens[-1])], room, **more)


def greedy(text: Sequence[int], number: int) -> list[int]:
    made: list[int] = []
    for _ in range(number):
        made.append(int(NEXT_LOGITS([*text, *made]).argmax()))
    return made


def test_a_chain_of_likeliest_tokens() -> None:
    view = FakeView(NEXT_LOGITS)
    (draft,) = started(view).propose(StepContext([request()]))
    assert draft.tokens.tolist() == greedy(request().token_ids.tolist(), 4)
    assert draft.parents is None
    assert draft.probs is None
    assert view.passes == [1] * 4
    shares = [
        torch.from_numpy(NEXT_LOGITS([*request().token_ids, *draft.tokens[:i]])) for i in range(4)
    ]
    expected = np.cumprod([float(share.softmax(-1).max()) for share in shares])
    assert draft.path_probs == pytest.approx(expected, rel=1e-4)


def test_requests_of_all_lengths_share_passes() -> None:
    view = FakeView(NEXT_LOGITS, most_room=2)
    requests = [request("a", 30, 4), request("b", 5, 1), request("c", 40, 0), request("d", 33, 2)]
    drafts = started(view).propose(StepContext(requests))
    assert list(map(len, drafts)) == [3, 1, 0, 2]
    assert view.passes == [3, 2, 1]
    for one, draft in zip(requests, drafts, strict=True):
        assert draft.tokens.tolist() == greedy(one.token_ids.tolist(), len(draft))


def test_requests_that_are_left_out_get_nothing() -> None:
    view = FakeView(NEXT_LOGITS, refuses=["b"])
    proposer = started(view, min_context=20)
    drafts = proposer.propose(StepContext([request("a"), request("b"), request("c", 19)]))
    assert list(map(len, drafts)) == [4, 0, 0]
    assert started(view).propose(StepContext([request("b")]))[0].tokens.tolist() == []


def test_draws_report_the_view_s_probabilities() -> None:
    view = FakeView(NEXT_LOGITS)
    proposer = started(view, num_tokens=1)
    counts = np.zeros(VOCAB)
    for i in range(4000):
        one = request(f"r{i}", room=1, temperature=0.7, top_k=5)
        (draft,) = proposer.propose(StepContext([one]))
        assert draft.probs is not None
        assert draft.drawn == "iid"
        counts[draft.tokens[0]] += 1
        probs = draft.probs[0].numpy()
    logits = torch.from_numpy(NEXT_LOGITS(request().token_ids.tolist())) / 0.7
    logits[logits < logits.topk(5).values[-1]] = -torch.inf
    expected = logits.softmax(-1).numpy()
    assert probs == pytest.approx(expected, abs=1e-5)
    assert not counts[expected == 0].any()
    likely = expected > 0
    statistic = ((counts - 4000 * expected)[likely] ** 2 / (4000 * expected[likely])).sum()
    assert statistic < 18.5  # chi-square, 4 degrees of freedom, p = 0.001


def test_levels_of_a_draw_have_the_distributions_behind_the_drawn_tokens() -> None:
    one = request(temperature=1.0)
    (draft,) = started(FakeView(NEXT_LOGITS)).propose(StepContext([one]))
    assert draft.probs is not None
    for i in range(4):
        text = [*one.token_ids.tolist(), *draft.tokens[:i].tolist()]
        expected = torch.from_numpy(NEXT_LOGITS(text)).softmax(-1).numpy()
        assert draft.probs[i].numpy() == pytest.approx(expected, abs=1e-5)


def test_who_is_drawn_for() -> None:
    proposer = started(FakeView(NEXT_LOGITS))
    requests = [
        request("greedy"),
        request("drawn", temperature=1.0),
        request("seeded", temperature=1.0, seed=3),
    ]
    drafts = proposer.propose(StepContext(requests))
    assert [draft.probs is not None for draft in drafts] == [False, True, False]
    assert drafts[2].tokens.tolist() == drafts[0].tokens.tolist()
    chosen = started(FakeView(NEXT_LOGITS), draw=False).propose(StepContext(requests))
    assert all(draft.probs is None for draft in chosen)
    assert not CacheView(CacheViewOptions(draw=False)).needs.distributions


def test_the_same_request_is_drafted_the_same() -> None:
    one = request(temperature=1.0)
    first, second = (
        started(FakeView(NEXT_LOGITS)).propose(StepContext([one]))[0] for _ in range(2)
    )
    assert first.tokens.tolist() == second.tokens.tolist()


def adaptive(view: FakeView, **options: Any) -> CacheView:
    return started(view, adaptive_length=True, **options)


def context(*requests: RequestStep, min_probability: float = 0.05) -> StepContext:
    return StepContext(list(requests), None, min_probability, PLAIN)


def serve(
    proposer: CacheView, step: StepContext, accepted: int, num_steps: int = 40
) -> list[Draft]:
    """Steps in which so many tokens of each draft are accepted; the last drafts."""
    for _ in range(num_steps):
        drafts = proposer.propose(step)
        proposer.observe(
            [
                StepOutcome(one.request_id, len(draft), min(accepted, len(draft)))
                for one, draft in zip(step.requests, drafts, strict=True)
                if len(draft)
            ]
        )
    return drafts


def sure(text: Sequence[int]) -> np.ndarray:
    logits = np.zeros(VOCAB)
    logits[int(NEXT_LOGITS(text).argmax())] = 20.0
    return logits


def test_long_contexts_pay_and_short_ones_do_not() -> None:
    """Weights count as 100 tokens, the view as 8."""
    for length, is_drafting in ((9, False), (12, False), (2000, True)):
        view = FakeView(sure, budget=8, fixed=100)
        drafts = serve(adaptive(view), context(request(length=length)), accepted=4)
        assert (len(drafts[0]) > 0) == is_drafting, length


def test_batches_pay_earlier() -> None:
    """A pass reads the weights once for all."""
    length = 12
    alone = serve(adaptive(FakeView(sure)), context(request(length=length)), 4, num_steps=100)
    many = [request(f"r{i}", length) for i in range(8)]
    together = serve(adaptive(FakeView(sure)), context(*many), 4, num_steps=100)
    assert not len(alone[0])
    assert all(len(draft) == 4 for draft in together)


def test_short_requests_ride_along() -> None:
    view = FakeView(sure)
    step = context(request("long", 3000), request("short", 6))
    assert all(len(draft) for draft in serve(adaptive(view), step, accepted=4))
    view.passes.clear()
    proposer = adaptive(view)
    serve(proposer, context(request("short", 6)), accepted=4, num_steps=600)
    assert view.passes == []  # nothing is hidden, so not even a try


def test_a_request_pays_for_the_kv_that_it_shows() -> None:
    """Beside many others that show all they have, a view of a third saves too little."""
    others = [request(f"r{i}", 990) for i in range(7)]
    crowded = context(request("long", 3000), *others)
    assert not any(serve(adaptive(FakeView(sure, budget=1000)), crowded, 4, num_steps=30))
    alone = context(request("long", 3000))
    assert any(serve(adaptive(FakeView(sure, budget=1000)), alone, 4, num_steps=30))


def test_what_is_rejected_is_no_longer_drafted() -> None:
    view = FakeView(sure)
    proposer = adaptive(view)
    step = context(request(length=3000))
    assert len(serve(proposer, step, accepted=0, num_steps=200)[0]) == 0
    before = len(view.passes)
    serve(proposer, step, accepted=0, num_steps=500)
    assert 0 < len(view.passes) - before < 10  # a try of one token now and then
    assert len(serve(proposer, step, accepted=4, num_steps=3000)[0]) > 0


def test_measured_passes_correct_what_bytes_say() -> None:
    """Launches that take as long as all the KV: what bytes promise does not come true."""
    view = FakeView(sure, seconds=0.9 * PLAIN)
    drafts = serve(adaptive(view), context(request(length=2000)), accepted=2, num_steps=60)
    assert not len(drafts[0])


def test_one_slow_pass_does_not_end_drafting() -> None:
    view = FakeView(sure, seconds=1.2 * PLAIN)
    proposer, step = adaptive(view), context(request(length=2000))
    assert any(map(len, serve(proposer, step, accepted=4, num_steps=1)))
    view.seconds = 0.3 * PLAIN
    drafts = serve(proposer, step, accepted=4, num_steps=40)
    assert len(drafts[0]) > 0


def test_fixed_costs_come_back_from_what_was_slow() -> None:
    cost = FixedCost(ReadFacts(10_000, 10))
    for num_slow in (1, 100):
        for _ in range(num_slow):
            cost.observe(1, 4000, 500, 1.2)
        for _ in range(60):
            cost.observe(1, 4000, 500, 0.3)
        assert cost.share(1, 4000, 500) < 0.4


def test_unlikely_tokens_end_a_chosen_chain_and_no_drawn_one() -> None:
    def flat(text: Sequence[int]) -> np.ndarray:
        return np.linspace(0.0, 0.1, VOCAB)

    step = context(request("a", 3000), request("b", 3000, temperature=1.0), min_probability=0.2)
    chosen, drawn = adaptive(FakeView(flat)).propose(step)
    assert len(chosen) == 0
    assert len(drawn) > 0


def test_outcomes_that_do_not_come_are_forgotten() -> None:
    proposer = started(FakeView(NEXT_LOGITS))
    proposer.propose(StepContext([request("a"), request("b")]))
    proposer.finish(["a"])
    assert set(proposer._gate._pending) == {"b"}
    proposer.propose(StepContext([request("b", room=0)]))
    proposer.finish(["b", "unknown"])
    assert not proposer._gate._pending


def test_it_is_off_on_cpus(caplog: pytest.LogCaptureFixture) -> None:
    view = FakeView(NEXT_LOGITS)
    engine = replace(engine_of([view], VOCAB), device=torch.device("cpu"))
    off = CacheView(CacheViewOptions(adaptive_length=False))
    with caplog.at_level(logging.INFO, "vllm.spec_ext"):
        off.start(replace(engine, views=[]))  # an engine has none for it there
    assert "drafts nothing on this CPU" in caplog.text
    assert "draft_on_cpu" in caplog.text
    assert [len(draft) for draft in off.propose(StepContext([request()]))] == [0]
    off.observe([StepOutcome("a", 1, 1)])
    off.finish(["a"])
    on = CacheView(CacheViewOptions(adaptive_length=False, draft_on_cpu=True))
    on.start(engine)
    assert [len(draft) for draft in on.propose(StepContext([request()]))] == [4]


def test_it_needs_an_engine() -> None:
    with pytest.raises(SpecExtError, match="found 0 views of a target, expected 1"):
        CacheView(CacheViewOptions()).start(engine_of([], VOCAB))


def test_the_view_that_it_asks_for() -> None:
    asked = CacheViewOptions(view="stream", budget=256, sink=16, refresh=3, dense_layers=[0, 1])
    (spec,) = CacheView.views(asked)
    assert (spec.kind, spec.budget, spec.sink, spec.refresh) == ("stream", 256, 16, 3)
    assert spec.dense_layers == (0, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": 128, "sink": 16, "recent": 112}, "found 128 tokens for sink and recent"),
        ({"budget": 64, "sink": 64, "view": "stream"}, "found 64 tokens for sink"),
        ({"dense_layers": [1, 1]}, "different numbers from 0 on"),
        ({"dense_layers": [-1]}, "different numbers from 0 on"),
        ({"refresh": 0}, "greater than or equal to 1"),
        ({"budget": 31}, "greater than or equal to 32"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        CacheViewOptions(**options)


def test_fixed_costs_follow_what_passes_take() -> None:
    cost = FixedCost(ReadFacts(10_000, 10))  # 1000 tokens by bytes
    assert cost.share(1, 4000, 500) == pytest.approx(1500 / 5000)
    for _ in range(60):
        cost.observe(1, 4000, 500, (3000 + 500) / (3000 + 4000))
    assert cost.tokens(1) == pytest.approx(3000, rel=0.01)
    assert cost.tokens(8) == cost.tokens(1)  # the nearest that is known
    for _ in range(200):
        cost.observe(8, 4000, 500, 1.2)  # longer than a plain step
    assert cost.share(8, 4000, 500) > 0.85
    assert cost.tokens(1) == pytest.approx(3000, rel=0.01)
    before = cost.tokens(1)
    cost.observe(1, 400, 400, 0.9)  # nothing was hidden, which says nothing
    assert cost.tokens(1) == before
