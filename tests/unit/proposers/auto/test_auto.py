# SPDX-License-Identifier: Apache-2.0
"""All sources in one tree: each alone, together, switched off, and a drafter that has to pay."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from number_corpus import NumberTokenizer, build_corpus

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import MethodOptions, parse_options
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.adaptive_ngram.options import BUCKET_BYTES
from vllm_spec_ext.proposers.auto import Auto
from vllm_spec_ext.proposers.auto.drafter_payoff import DrafterPayoff
from vllm_spec_ext.proposers.auto.late_auto import why_not_late
from vllm_spec_ext.proposers.base import (
    UNSALTED,
    BaseProposer,
    Draft,
    EngineHandle,
    IntArray,
    RequestStep,
    StepContext,
    StepOutcome,
    TargetFacts,
    proposer,
)
from vllm_spec_ext.proposers.input_copy.options import InputCopyRequest
from vllm_spec_ext.proposers.payoff.forward_payoff import TokenCosts
from vllm_spec_ext.replay import Recording, replay

VOCAB = 500
RANDOM = np.random.default_rng(0)
OFF: dict[str, Any] = {
    "copy_input": False,
    "own_text": False,
    "earlier_answers": 0,
    "recycled_contexts": 0,
}
"""Every source that is there without a name."""


def engine(budget: int = 16) -> EngineHandle:
    return EngineHandle(
        vocab_size=VOCAB,
        max_model_len=4096,
        max_num_seqs=8,
        num_speculative_tokens=budget,
        model="none",
        load_tokenizer=lambda: NumberTokenizer(VOCAB),
    )


def started(name: str = "auto", budget: int = 16, **given: Any) -> BaseProposer:
    cls = registry.load(name)
    found = cls(parse_options(cls.info.options, given, name))
    found.start(engine(budget))
    return found


def words(count: int) -> list[int]:
    return [int(one) for one in RANDOM.integers(3, VOCAB, count)]


PROMPT = words(60)
COPIED = Recording(PROMPT, [*PROMPT[10:30], 1, *PROMPT[31:50]])
LOOP = words(12)
REPEATED = Recording(words(20), [*LOOP, *words(5), *LOOP, *words(5), *LOOP])


def test_it_drafts_as_well_as_the_best_of_its_sources() -> None:
    for recordings in ([COPIED], [REPEATED], [REPEATED, REPEATED], [COPIED, REPEATED]):
        together = replay(started(), recordings, engine()).tokens_per_step
        for name in ("suffix_tree", "input_copy"):
            alone = replay(started(name), recordings, engine()).tokens_per_step
            assert together >= 0.95 * alone


def test_each_source_can_be_switched_off() -> None:
    again = [REPEATED, Recording(words(20), REPEATED.output_token_ids)]
    found = {}
    for on in ({"own_text": True}, {"copy_input": True}, {"earlier_answers": 1000}):
        options = {**OFF, **on}
        found[next(iter(on))] = replay(started(**options), again, engine()).tokens_per_step
    assert found["own_text"] > 1.5
    assert found["copy_input"] == 1.0  # nothing of the prompt is said again
    assert found["earlier_answers"] > 1.5
    with pytest.raises(SpecExtError, match="every source switched off"):
        parse_options(Auto.info.options, OFF, "auto")


def test_a_corpus_is_a_source_of_all_requests(tmp_path: Path) -> None:
    texts = [words(30) for _ in range(3)]
    path = str(build_corpus(tmp_path, texts * 2, VOCAB).path.parent)
    asked = [Recording(words(20), text) for text in texts]  # each of them is said once
    assert replay(started(), asked, engine()).tokens_per_step < 1.1
    method = started(corpus=path)
    found = replay(method, asked, engine()).tokens_per_step
    assert found > 5
    tokens = np.array([*words(20), *texts[1][:4]], np.int32)
    request = RequestStep("r", tokens, 20, texts[1][:4], 8, InputCopyRequest(), share_group=None)
    [draft] = method.propose(StepContext([request]))
    assert draft.tokens[:3].tolist() == texts[1][4:7]
    assert draft.sources is not None
    assert draft.sources[0] == ("corpus",)
    assert replay(started(corpus=path, **OFF), asked, engine()).tokens_per_step > 0.9 * found


def test_a_corpus_that_does_not_fit_is_refused_before_the_engine_starts(tmp_path: Path) -> None:
    build_corpus(tmp_path, [[1, 2, 3]] * 2, VOCAB)

    def check(folder: Path, tokenizer: object | None, vocab_size: int = VOCAB) -> None:
        target = TargetFacts("MODEL", vocab_size, 8, 8, lambda: tokenizer)
        Auto.check(parse_options(Auto.info.options, {"corpus": str(folder)}, "auto"), target)

    check(tmp_path, NumberTokenizer(VOCAB), VOCAB + 4)
    with pytest.raises(SpecExtError, match="another tokenizer"):
        check(tmp_path, NumberTokenizer(VOCAB - 1))
    with pytest.raises(SpecExtError, match="found a vocabulary of 500, expected at most"):
        check(tmp_path, NumberTokenizer(VOCAB), VOCAB - 1)
    with pytest.raises(SpecExtError, match=r"found no tokenizer .*expected the one"):
        check(tmp_path, None)
    with pytest.raises(SpecExtError, match="no n-gram store"):
        check(tmp_path / "missing", NumberTokenizer(VOCAB))


def test_a_request_that_says_no_is_not_drafted_for_and_not_remembered() -> None:
    method = started()
    tokens = np.array([*PROMPT, *PROMPT[:5]], np.int32)

    def step(name: str, **options: Any) -> StepContext:
        asked = InputCopyRequest(**options)
        return StepContext(
            [RequestStep(name, tokens, len(PROMPT), PROMPT[:5], 8, asked, share_group=UNSALTED)]
        )

    assert not len(method.propose(step("off", enabled=False))[0])
    assert len(method.propose(step("on"))[0])
    method.propose(step("private", remember=False))
    method.finish(["off", "private", "unknown"])
    assert isinstance(method, Auto)
    assert not len(method._lookup._answers)
    method.finish(["on"])
    assert len(method._lookup._answers)


class FixedOptions(MethodOptions):
    """None of its own."""


@proposer("fixed", summary="Foresees one fixed text.", options=FixedOptions)
class Fixed(BaseProposer):
    """A drafter that knows what will be said, and takes its time in a stand-in's clock."""

    text: Sequence[int] = ()
    calls = 0
    told: ClassVar[list[StepOutcome]] = []
    min_probability: float | None = None

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        self.told.extend(outcomes)

    def propose(self, step: StepContext) -> list[Draft]:
        type(self).calls += 1
        type(self).min_probability = step.min_probability
        drafts = []
        for request in step.requests:
            at = request.num_output_tokens
            following = np.array(self.text[at : at + min(4, request.room)], np.int32)
            probs: Any = (0.9 ** np.arange(1, len(following) + 1)).astype(np.float32)
            drafts.append(Draft(following, path_probs=probs))
        return drafts


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> type[Fixed]:
    monkeypatch.setitem(registry.BUILTIN, "fixed", f"{__name__}:Fixed")
    monkeypatch.setattr(Fixed, "calls", 0)
    monkeypatch.setattr(Fixed, "told", [])
    return Fixed


def test_a_drafter_joins_the_tree(fixed: type[Fixed], monkeypatch: pytest.MonkeyPatch) -> None:
    said = words(60)
    monkeypatch.setattr(fixed, "text", said)
    new = Recording(words(20), said)
    without = replay(started(), [new], engine())
    method = started(drafter={"method": "fixed"})
    result = replay(method, [new], engine())
    assert result.tokens_per_step > 3.0 > without.tokens_per_step
    # Recordings have no clock: nothing says that it costs anything.
    assert fixed.calls == result.num_steps


def test_sources_that_agree_are_both_named(
    fixed: type[Fixed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed, "text", COPIED.output_token_ids)
    method = started(drafter={"method": "fixed"})
    tokens: IntArray = np.array([*PROMPT, *COPIED.output_token_ids[:6]], np.int32)
    new = tokens[len(PROMPT) :].tolist()
    step = RequestStep("r", tokens, len(PROMPT), new, 8, InputCopyRequest(), share_group=UNSALTED)
    (draft,) = method.propose(StepContext([step]))
    assert draft.sources is not None
    assert set(draft.sources[0]) == {"own text", "copy", "fixed"}
    assert draft.tokens[0] == COPIED.output_token_ids[6]
    assert draft.strengths is not None
    assert [len(named) for named in draft.strengths] == [len(names) for names in draft.sources]
    strength = dict(zip(draft.sources[0], draft.strengths[0], strict=True))
    assert strength["own text"] == "4 to 9 tokens agree, one continuation"
    assert strength["copy"].startswith("probability ")
    assert strength["fixed"] == "probability 0.85 or more"


def test_a_drafter_learns_what_became_of_its_drafts(
    fixed: type[Fixed], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = words(60)
    monkeypatch.setattr(fixed, "text", [*said[:18], 1, *said[19:]])  # all but one is right
    replay(started(drafter={"method": "fixed"}), [Recording(words(20), said)], engine())
    assert len(fixed.told) > 10
    wrong = [outcome for outcome in fixed.told if outcome.num_accepted < outcome.num_drafted]
    assert [(outcome.num_drafted, outcome.num_accepted) for outcome in wrong] == [(4, 2)]


@pytest.mark.parametrize("models", [(), ("a model",)])
def test_whose_levels_each_take_a_pass_is_told_what_a_node_costs(
    fixed: type[Fixed], models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed, "text", words(60))
    method = Auto(parse_options(Auto.info.options, {"drafter": {"method": "fixed"}}, "auto"))
    method.start(replace(engine(), models=models))
    tokens: IntArray = np.array(words(20), np.int32)
    step = RequestStep("r", tokens, 19, tokens[19:].tolist(), 8, InputCopyRequest())
    method.propose(StepContext([step], min_probability=0.25))
    assert fixed.min_probability == (0.25 if models else None)


@pytest.mark.parametrize(
    ("off", "asked"),
    [
        ({}, [0, 3]),
        ({"copy_input": False, "own_text": False, "recycled_contexts": 0}, [15, 48]),
    ],
)
def test_for_drafts_that_are_not_verified_a_drafter_is_seldom_asked(
    fixed: type[Fixed], off: dict[str, Any], asked: list[int]
) -> None:
    method = started(drafter={"method": "fixed"}, earlier_answers=0, **off)
    tokens: IntArray = np.array([*PROMPT, *PROMPT[:5]], np.int32)
    step = RequestStep("r", tokens, len(PROMPT), PROMPT[:5], 8, InputCopyRequest())
    found = []
    for count in (15, 33):
        for _ in range(count):
            method.propose(StepContext([step], is_shadow=True))
        found.append(fixed.calls)
    assert found == asked
    before = fixed.calls
    method.propose(StepContext([step]))
    assert fixed.calls == before + 1  # nothing is known of its cost


def test_a_drafter_that_adds_nothing_is_left_alone_and_tried_again() -> None:
    payoff = DrafterPayoff()
    costs = TokenCosts(token_seconds=0.01, min_probability=0.1)
    assert payoff.pays([1.0], costs)  # nothing is known
    asked = 0
    for _ in range(2000):
        if payoff.pays([1.0], costs):
            asked += 1
            payoff.asked([1.0], [1.1], 0.005)
    assert 3 <= asked < 150
    # It may add more to trees that are worth little.
    for _ in range(200):
        payoff.asked([0.1], [0.9], 0.005)
    assert payoff.pays([0.1], costs)
    assert not payoff.pays([1.0], costs)


@pytest.mark.parametrize("slow", [1, 2])
def test_a_drafter_whose_first_passes_are_slow_is_not_given_up(slow: int) -> None:
    """They find their buffers; another program may run beside the one after them."""
    payoff = DrafterPayoff()
    costs = TokenCosts(token_seconds=0.01, min_probability=0.1)
    asked = 0
    for _ in range(400):
        if payoff.pays([1.0], costs):
            asked += 1
            payoff.asked([1.0], [1.5], 0.03 if asked <= slow else 0.003)
    assert asked > 200


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"drafter": {"method": "suffix_tree"}}, "options of its own"),
        ({"drafter": {"method": "blockwis", "model": "x"}}, "blockwise"),
        ({"drafter": {"method": "blockwise", "model": "x", "draw": True}}, "expected false"),
        ({"drafter": {"method": "blockwise", "model": "x", "treee": True}}, "treee"),
        ({"drafter": {"model": "x"}}, "method"),
        ({"recycled": 3}, "recycled"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(SpecExtError, match=expected):
        parse_options(Auto.info.options, given, "auto")


def test_where_nothing_pays_a_little_is_tried_now_and_then() -> None:
    method = started()
    drafted = []
    tokens = np.array([*PROMPT, *PROMPT[:20]], np.int32)
    for end in range(len(PROMPT) + 1, len(tokens)):
        request = RequestStep(
            "r",
            tokens[:end],
            len(PROMPT),
            [int(tokens[end - 1])],
            8,
            InputCopyRequest(),
            share_group=UNSALTED,
        )
        for _ in range(20):
            step = StepContext([request], min_probability=0.2, fixed_cost=50.0)
            drafted.append(len(method.propose(step)[0]))
            method.observe([StepOutcome("r", drafted[-1], 0, ())] if drafted[-1] else [])
    assert 0 < sum(n > 0 for n in drafted) < 0.1 * len(drafted)
    assert max(drafted) <= 4


@pytest.mark.parametrize(
    ("drafter", "reason"),
    [
        (None, None),
        ({"method": "blockwise", "model": "heads"}, None),
        ({"method": "blockwise", "model": "heads", "tree": True}, 'leave "tree" out'),
        (
            {"method": "blockwise", "model": "heads", "min_confidence": 0.1},
            "reads them on the host",
        ),
        ({"method": "nar", "model": "drafter"}, "reads them on the host"),
        ({"method": "adaptive_ngram", "tree": False}, "in the place of all copies"),
    ],
)
def test_which_drafters_wait_for_no_step(
    drafter: dict[str, Any] | None, reason: str | None
) -> None:
    options: Any = parse_options(Auto.info.options, {"drafter": drafter}, "auto")
    found = why_not_late(options)
    assert (found is None) == (reason is None) == Auto.drafts_late(options)
    assert (reason or "") in (found or "")


def test_which_corpora_wait_for_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever chooses the scheduling has loaded nothing: the size of the file is known."""
    store = build_corpus(tmp_path / "store", [words(30)] * 2, VOCAB)

    def found(corpus: Path) -> bool:
        return Auto.drafts_late(parse_options(Auto.info.options, {"corpus": str(corpus)}, "auto"))

    assert found(tmp_path / "store")
    assert found(store.path)
    assert not found(tmp_path / "elsewhere")
    most = store.path.stat().st_size + 1024 * BUCKET_BYTES * 512
    monkeypatch.setattr("vllm_spec_ext.proposers.adaptive_ngram.options.MOST_LATE_BYTES", most)
    assert found(store.path)
    monkeypatch.setattr("vllm_spec_ext.proposers.adaptive_ngram.options.MOST_LATE_BYTES", most - 1)
    assert not found(store.path)
    # Asked for all the same, it is the tables themselves that count.
    pytest.importorskip("triton")
    assert not isinstance(started(corpus=str(store.path)).late_drafter(engine()), str)


def test_tables_that_turn_out_too_large_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    build_corpus(tmp_path, [words(30)] * 2, VOCAB)
    method = started(corpus=str(tmp_path))
    assert not isinstance(method.late_drafter(engine()), str)
    monkeypatch.setattr("vllm_spec_ext.proposers.adaptive_ngram.MOST_LATE_BYTES", 1000)
    assert "its tables take 1 MiB, expected at most 0" in str(method.late_drafter(engine()))
