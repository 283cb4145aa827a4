# SPDX-License-Identifier: Apache-2.0
"""Who writes what, who reviews it, in how many passes; and what methods are shown."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fake_model import NextLogits, engine, random_next_logits, request, step
from reviewed_model import GUESSES, GoingOn, Guess, ReviewedModel

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import parse_options
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import Continues, Draft, StepOutcome, TargetFacts
from vllm_spec_ext.proposers.cascade import Cascade
from vllm_spec_ext.proposers.cascade.judging import Noise, judge_drawn

VOCAB = 7
NEXT_LOGITS = random_next_logits(3, VOCAB)
TEXT = [1, 2, 3]


def greedy(next_logits: NextLogits, text: Sequence[int], number: int) -> list[int]:
    """What a model says by itself."""
    written = list(text)
    for _ in range(number):
        written.append(int(next_logits(written).argmax()))
    return written[len(text) :]


def right_but(*wrong: int) -> Any:
    """Foresees the next logits, but not at these places."""

    def foresee(text: list[int], most: int) -> list[int]:
        found = greedy(NEXT_LOGITS, text, most)
        for place in wrong:
            if place < len(found):
                found[place] = (found[place] + 1) % VOCAB
        return found

    return staticmethod(foresee)


@pytest.fixture(autouse=True)
def _guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, place in GUESSES.items():
        monkeypatch.setitem(registry.BUILTIN, name, place)


def made(*models: ReviewedModel, num_speculative_tokens: int = 16, **given: Any) -> Cascade:
    given.setdefault("adaptive_length", False)
    cascade = Cascade(parse_options(Cascade.info.options, given, "cascade"))
    cascade.start(engine(*models, num_speculative_tokens=num_speculative_tokens))
    return cascade


def model(next_logits: NextLogits = NEXT_LOGITS, **more: Any) -> ReviewedModel:
    return ReviewedModel(next_logits, VOCAB, **more)


def levels(*given: Any, method: str = "guess") -> list[dict[str, Any]]:
    return [{"method": method}, *({"model": f"m{i}", **one} for i, one in enumerate(given))]


def method_of(cascade: Cascade) -> Guess:
    one = cascade._methods[0].proposer
    assert isinstance(one, Guess)
    return one


def test_a_right_guess_is_reviewed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guess, "foresee", right_but())
    one = model()
    cascade = made(one, levels=levels({"reviews": 4}))
    (draft,) = cascade.propose(step(request(TEXT, room=15)))
    assert draft.tokens.tolist() == greedy(NEXT_LOGITS, TEXT, 15)
    assert draft.probs is None
    # Three passes: the root and four tokens, then the reviewer's own token and four.
    assert one.chunks == [[5], [5], [5]]
    assert draft.sources == (("fake",),) * 15


def test_behind_a_rejection_the_guess_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guess, "foresee", right_but(2))
    one = model()
    (draft,) = made(one, levels=levels({"reviews": 4})).propose(step(request(TEXT, room=6)))
    assert draft.tokens.tolist() == greedy(NEXT_LOGITS, TEXT, 6)
    # It writes the third token itself, and then has nothing to review.
    assert one.chunks == [[5], [1], [1], [1]]
    two = model()
    ending = made(two, levels=levels({"reviews": 4, "alone": False}))
    (draft,) = ending.propose(step(request(TEXT, room=6)))
    assert draft.tokens.tolist() == greedy(NEXT_LOGITS, TEXT, 3)
    assert two.chunks == [[5]]


def test_a_last_token_is_written_though_a_model_is_never_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Guess, "foresee", right_but())
    cascade = made(model(), levels=levels({"reviews": 4, "alone": False}))
    (draft,) = cascade.propose(step(request(TEXT, room=1)))
    assert draft.tokens.tolist() == greedy(NEXT_LOGITS, TEXT, 1)


def test_where_a_method_has_nothing_the_other_one_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guess, "foresee", right_but())
    monkeypatch.setattr(GoingOn, "foresee", staticmethod(lambda text, most: []))
    one = model()
    both = [{"method": "guess"}, {"method": "going_on"}, {"model": "m", "reviews": 4}]
    made(one, levels=both).propose(step(request(TEXT, room=10)))
    assert one.chunks == [[5], [5]]


def test_tokens_that_no_model_can_say_are_no_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt may have ids beyond the vocabulary of the target's logits."""
    first = greedy(NEXT_LOGITS, TEXT, 1)
    monkeypatch.setattr(Guess, "foresee", staticmethod(lambda text, most: [*first, VOCAB, 1]))
    for method in ("guess", "going_on"):
        cascade = made(model(), levels=levels({"reviews": 3}, method=method))
        (draft,) = cascade.propose(step(request(TEXT, room=4)))
        assert draft.tokens.tolist() == greedy(NEXT_LOGITS, TEXT, 4)


def test_passes_in_vain_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small model's pass is served, then the last level finds no room."""
    monkeypatch.setattr(Guess, "foresee", right_but())
    cascade = made(model(), model(most_read=0), levels=levels({"reviews": 2}, {"reviews": 3}))
    counted: list[tuple[int, int]] = []
    monkeypatch.setattr(cascade._payoff, "verified", lambda kind, *numbers: counted.append(numbers))
    (draft,) = cascade.propose(step(request(TEXT, room=6)))
    assert not len(draft)
    assert counted == [(0, 0)]


def test_a_method_knows_that_it_is_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """So `blockwise` does not refuse a draft that is longer than its heads."""
    told: list[bool] = []
    monkeypatch.setattr(
        Guess, "check", classmethod(lambda cls, options, target: told.append(target.is_level))
    )
    monkeypatch.setattr(Guess, "start", lambda self, engine: told.append(engine.is_level))
    cascade = made(model(), levels=levels({"reviews": 2}))
    facts = TargetFacts("target", VOCAB, 16, 8, lambda: None)
    Cascade.check(cascade.options, facts)
    assert told == [True, True]


def test_a_method_that_goes_on_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guess, "foresee", right_but(2))
    one = model()
    assert isinstance(GoingOn(parse_options(GoingOn.info.options, {}, "")), Continues)
    cascade = made(one, levels=levels({"reviews": 4}, method="going_on"))
    (draft,) = cascade.propose(step(request(TEXT, room=9)))
    assert draft.tokens.tolist() == greedy(NEXT_LOGITS, TEXT, 9)
    assert one.chunks == [[5], [5], [3]]  # three tokens each: two of them guessed


def test_methods_are_never_shown_what_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guess, "foresee", right_but(1, 5))
    cascade = made(
        model(random_next_logits(4, VOCAB)),
        model(),
        levels=levels({"reviews": 2}, {"reviews": 3}, method="going_on"),
    )
    method = method_of(cascade)
    shown: list[list[int]] = []
    original = Guess._one

    def watched(self: Guess, asked: Any) -> Draft:
        shown.append(asked.token_ids.tolist())
        return original(self, asked)

    monkeypatch.setattr(Guess, "_one", watched)
    text = list(TEXT)
    verified = []
    for _ in range(8):
        (draft,) = cascade.propose(step(request(text, room=6)))
        verified.append(list(text))
        assert method.texts == {"a": text}  # whatever was continued in between
        accepted = len(draft) // 2
        cascade.observe([StepOutcome("a", len(draft), accepted)])
        text += [*draft.tokens.tolist()[:accepted], len(text) % VOCAB]
    assert shown == verified


def test_what_methods_learn_of_their_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next level's verdict; of what nobody reviewed the target's."""
    monkeypatch.setattr(Guess, "foresee", right_but(3))
    cascade = made(model(), levels=levels({"reviews": 5}))
    (draft,) = cascade.propose(step(request(TEXT, room=8)))
    cascade.observe([StepOutcome("a", len(draft), 1)])  # the target agrees in less
    assert method_of(cascade).outcomes == [StepOutcome("a", 4, 3)]
    tail = made(model(), levels=levels({"reviews": 2}), tokens=[3, 4])
    (draft,) = tail.propose(step(request(TEXT, room=8)))
    assert len(draft) == 7  # two accepted and one more, four guessed
    tail.observe([StepOutcome("a", 7, 3)])  # the first of the tail is wrong
    assert method_of(tail).outcomes == [StepOutcome("a", 4, 3)]
    (draft,) = tail.propose(step(request([*TEXT, 5], room=0)))
    assert method_of(tail).rooms[-1] == [0]
    assert not len(draft)


def test_without_an_outcome_the_verdict_of_the_next_level_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Guess, "foresee", right_but())
    cascade = made(model(), levels=levels({"reviews": 2}))
    cascade.propose(step(request(TEXT, room=4)))
    cascade.observe([])
    assert method_of(cascade).outcomes == []
    cascade.propose(step(request([*TEXT, 1], room=4)))
    assert [(o.num_drafted, o.num_accepted) for o in method_of(cascade).outcomes] == [(4, 4)]


def test_three_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last model decides, whatever the others write; each reads a chunk in one pass."""
    monkeypatch.setattr(Guess, "foresee", right_but())
    for next_logits in (NEXT_LOGITS, random_next_logits(4, VOCAB)):
        small, base = model(next_logits), model()
        cascade = made(
            small, base, levels=levels({"reviews": 2}, {"reviews": 5}, method="going_on")
        )
        (draft,) = cascade.propose(step(request(TEXT, room=12)))
        assert draft.tokens.tolist() == greedy(NEXT_LOGITS, TEXT, 12)
        if next_logits is NEXT_LOGITS:
            assert base.chunks == [[7], [5]]  # two reviews of three tokens below each
            assert small.chunks[:2] == [[3], [3]]
        assert base.num_passes <= small.num_passes


def test_tokens_by_level() -> None:
    """Horizontal: the large model first, the small one behind it, without a review."""
    small, large = model(random_next_logits(4, VOCAB)), model()
    cascade = made(
        small,
        large,
        levels=[{"model": "a"}, {"model": "b", "reviews": 0}],
        tokens=[2, 3],
    )
    (draft,) = cascade.propose(step(request(TEXT, room=12)))
    first = greedy(NEXT_LOGITS, TEXT, 2)
    assert draft.tokens.tolist() == [*first, *greedy(small.next_logits, [*TEXT, *first], 3)]
    assert large.chunks == [[1], [1]]
    assert small.chunks == [[3], [1], [1]]
    (draft,) = cascade.propose(step(request(TEXT, room=3)))
    assert len(draft) == 3


def test_lenience_takes_what_is_nearly_as_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guess, "foresee", staticmethod(lambda text, most: [1] * most))

    def next_logits(text: Sequence[int]) -> np.ndarray:
        logits = np.full(VOCAB, -9.0)
        logits[0], logits[1] = 0.0, np.log(0.6)  # the guess has 0.6 of the likeliest
        return logits

    for lenience, expected in ((1.0, [0]), (0.7, [0]), (0.5, [1, 1, 1, 1, 0])):
        given = levels({"reviews": 4, "alone": False})
        cascade = made(model(next_logits), levels=given, lenience=lenience)
        (draft,) = cascade.propose(step(request(TEXT, room=8)))
        assert draft.tokens.tolist()[: len(expected)] == expected
        drawn = made(model(next_logits), levels=given, lenience=lenience)
        (draft,) = drawn.propose(step(request(TEXT, room=8, temperature=1.0)))
        assert draft.probs is not None  # reviewed exactly


def test_drawn_drafts_have_the_distributions_of_the_last_reviewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Guess, "foresee", right_but())
    next_logits = random_next_logits(5, VOCAB, sharpness=1.0)
    given = levels({"reviews": 3}, method="going_on")
    cascade = made(model(next_logits), levels=given, tokens=[6, 2])
    texts = set()
    for name in range(40):
        asked = request(TEXT, name=str(name), room=8, temperature=1.0)
        (draft,) = cascade.propose(step(asked))
        (again,) = cascade.propose(step(asked))
        assert draft.tokens.tolist() == again.tokens.tolist()  # by request and position alone
        assert draft.probs is not None
        written = list(TEXT)
        for place, token in enumerate(draft.tokens.tolist()):
            expected = torch.from_numpy(next_logits(written)).softmax(-1).float()
            if draft.sources[place] == ("going_on",):  # type: ignore[index]
                expected = torch.eye(VOCAB)[token]
            assert draft.probs[place].numpy() == pytest.approx(expected.numpy(), abs=1e-6)
            written.append(token)
        texts.add(tuple(draft.tokens.tolist()))
    assert len(texts) > 20
    (seeded,) = cascade.propose(step(request(TEXT, room=8, temperature=1.0, seed=3)))
    assert seeded.probs is None
    (chosen,) = made(model(next_logits), levels=given, draw=False).propose(
        step(request(TEXT, room=8, temperature=1.0))
    )
    assert chosen.probs is None


def test_draws_are_the_reviewers() -> None:
    """Many verdicts on one chunk: the first token is distributed as h, whatever was proposed."""
    h = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
    for q0 in (None, torch.tensor([0.1, 0.8, 0.1])):
        noise = Noise(np.random.default_rng(4))
        counts = np.zeros(3)
        for _ in range(4000):
            token = 1 if q0 is None else noise.draws(q0)
            verdict = judge_drawn(h, [token], [q0], noise)
            counts[token if verdict.num_accepted else verdict.token] += 1
        expected = h[0].numpy() * 4000
        assert float(((counts - expected) ** 2 / expected).sum()) < 20


def test_a_batch_shares_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guess, "foresee", right_but(4))
    one = model()
    texts = [[1, 2, 3, 4], [2, 2], [6, 5, 1]]
    asked = [request(text, name=str(i), room=7 + i) for i, text in enumerate(texts)]
    asked.append(request([1, 1], name="none", room=0))
    drafts = made(one, levels=levels({"reviews": 3})).propose(step(*asked))
    for text, draft, room in zip(texts, drafts, (7, 8, 9), strict=False):
        assert draft.tokens.tolist() == greedy(NEXT_LOGITS, text, room)
    assert not len(drafts[3])
    assert one.chunks[:3] == [[4, 4, 4], [3, 4, 4], [1, 1, 1]]


def test_a_request_that_a_model_cannot_follow() -> None:
    one = model(max_model_len=3)
    cascade = made(one, levels=levels({"reviews": 3}))
    long, short = request([1, 2, 3, 4], name="a"), request([1, 2], name="b", room=1)
    drafts = cascade.propose(step(long, short))
    assert [len(draft) for draft in drafts] == [0, 1]


def test_where_a_pass_finds_no_room_the_draft_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guess, "foresee", right_but())
    one = model(most_read=6)
    (draft,) = made(one, levels=levels({"reviews": 3})).propose(step(request(TEXT, room=12)))
    assert draft.tokens.tolist() == greedy(NEXT_LOGITS, TEXT, 4)
    small, base = model(most_read=4), model()
    three = made(small, base, levels=levels({"reviews": 2}, {"reviews": 3}))
    (draft,) = three.propose(step(request(TEXT, room=9)))
    assert draft.tokens.tolist() == greedy(NEXT_LOGITS, TEXT, 9)  # the last level writes on alone
    # The last level is lost at the first token: what the one below wrote is not the draft's.
    small, base = model(name="small"), model(name="base", most_read=0)
    lost = made(small, base, levels=levels({"reviews": 2}, {"reviews": 3}), tokens=[4, 5])
    (draft,) = lost.propose(step(request(TEXT, room=9)))
    assert draft.tokens.tolist() == greedy(NEXT_LOGITS, TEXT, 9)
    assert draft.sources == (("small",),) * 9


def test_disabled_requests_and_requests_that_go() -> None:
    cascade = made(model(), levels=levels({"reviews": 3}))
    for i in range(10):
        cascade.propose(step(request(TEXT, name=str(i)), request(TEXT, name="stays")))
        cascade.observe([StepOutcome(str(i), 3, 1), StepOutcome("unknown", 2, 2)])
        cascade.finish([str(i), "never seen"])
    assert len(cascade._waiting) <= 1
    assert len(cascade._read) <= 1
    assert len(cascade._methods[0]._waiting) <= 1
    assert set(method_of(cascade).texts) == {"stays"}
    fresh = Cascade(cascade.options)
    fresh.finish(["a"])  # before start
    fresh.close()


def test_only_an_engine_has_models() -> None:
    with pytest.raises(SpecExtError, match="found 0 loaded draft models, expected 1"):
        made(levels=levels({}))


def test_a_level_gets_the_likeliest_tokens_that_it_asks_for() -> None:
    asked = [{"method": "recycling"}, {"model": "m1"}]
    parsed = parse_options(Cascade.info.options, {"levels": asked}, "cascade")
    assert Cascade(parsed).needs.next_tokens == registry.load("recycling").needs.next_tokens > 0
