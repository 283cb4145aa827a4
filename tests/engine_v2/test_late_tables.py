# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling without waiting: drafts are looked up on the device, in late tables."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from generation import (
    ALWAYS_DRAFT,
    count_preempted,
    run,
    run_with_aborts,
    sampling_params,
    tokens,
)
from scenarios import PROMPTS, SCENARIOS, Scenario
from test_blockwise_engine import save_random_heads
from test_corpus_engine import save_corpus
from test_greedy_identity import METHODS, runner_of
from worker_counts import kept_counts

from vllm_spec_ext.engine.v2 import rejection
from vllm_spec_ext.engine.v2.late_tables import late_steps
from vllm_spec_ext.proposers.base import UNSALTED
from vllm_spec_ext.proposers.text_index.answer_memory import NUM_MARKS

COPY: dict[str, Any] = {"method": "input_copy", "num_speculative_tokens": 8}
NGRAM = {"method": "adaptive_ngram", "num_speculative_tokens": 4, "tree": False}
AUTO = {"method": "auto", "num_speculative_tokens": 8}  # copies, where it drafts late
HEADS: dict[str, Any] = {"method": "blockwise", "num_speculative_tokens": 3}
# Heads, and tri-grams of a corpus where copies end.
ALL: dict[str, Any] = {"method": "auto", "num_speculative_tokens": 8, "drafter": HEADS}
LATE = {
    "input_copy": COPY,
    "adaptive_ngram": NGRAM,
    "blockwise": HEADS,
    "auto_of_all": ALL,
}
# Few tokens to choose from: the text repeats itself, so that copies are right.
FEW_IDS = [40, 42, 44]
FEW = {"allowed_token_ids": FEW_IDS, "ignore_eos": True}
LENGTHS = (12, 60, 33, 1, 70, 2, 47, 59)
REPEATED = Scenario([{"max_tokens": n, **FEW} for n in LENGTHS], PROMPTS)
TOGETHER = Scenario(
    [
        {"max_tokens": 30, "temperature": 1.0, "seed": 7, **FEW},
        {"max_tokens": 20, "structured_outputs": {"regex": "(ab|cd){3,9}[0-9]+x"}},
        {"max_tokens": 30, "presence_penalty": 1.0, "frequency_penalty": 0.5, **FEW},
        {"max_tokens": 30, "temperature": 0.7, "seed": 8, "top_k": 2, "logprobs": 2, **FEW},
    ],
    PROMPTS,
)


@pytest.fixture(scope="module", params=LATE)
def config(
    request: pytest.FixtureRequest,
    tiny_model: Path,
    plain: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """Of each method that drafts late."""
    found = LATE[request.param]
    if found is not HEADS and found is not ALL:
        return found
    folder = tmp_path_factory.mktemp("heads")
    model = str(save_random_heads(folder / "heads", FEW_IDS, 4, copy_trust=100.0))
    if found is HEADS:
        return {**HEADS, "model": model}
    corpus = save_corpus(tiny_model, run(plain, REPEATED), folder)
    return {**ALL, "drafter": {"method": "blockwise", "model": model}, "corpus": corpus}


@pytest.fixture(scope="module")
def engine(make_engine: Any, config: dict[str, Any]) -> Any:
    return make_engine(speculative_config=config, async_scheduling=True)


@pytest.fixture(scope="module")
def copies(make_engine: Any) -> Any:
    """One engine, for what no method does in its own way."""
    return make_engine(speculative_config=COPY, async_scheduling=True)


@pytest.fixture(scope="module")
def expected(plain: Any) -> Any:
    return tokens(run(plain, REPEATED))


def fresh(engine: Any) -> Any:
    """Without what was learned, and with nothing in the prefix cache."""
    engine.collective_rpc("spec_ext_reset")
    engine.reset_prefix_cache()
    return engine


@pytest.fixture
def num_rows(copies: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Requests in each step that verified drafts."""
    steps: list[int] = []
    verify = rejection.WalkSampler._verify

    def count(self: Any, *args: Any) -> Any:
        steps.append(len(self._runner.spec_step.request_ids))
        return verify(self, *args)

    monkeypatch.setattr(rejection.WalkSampler, "_verify", count)
    return steps  # type: ignore[return-value]


def test_the_start_up_line_says_so(make_engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    late = "asynchronous scheduling, drafts made on the device before the host has the tokens"
    waits = "asynchronous scheduling, drafts made behind each step's tokens (its drafts are trees)"
    expected = (
        (COPY, "chains", late),
        (NGRAM, "chains", late),
        (METHODS["oracle"], "trees", waits),
    )
    for config, shape, reason in expected:
        method = config["method"]
        runner = runner_of(make_engine(speculative_config=config, async_scheduling=True))
        assert (runner.late_steps is None) == (reason == waits)
        logger = logging.getLogger("vllm.spec_ext")
        logger.addHandler(caplog.handler)
        with caplog.at_level(logging.INFO, logger="vllm.spec_ext"):
            runner.drafter.load_model(runner.get_model())
        logger.removeHandler(caplog.handler)
        [line] = {message for message in caplog.messages if f"method {method}," in message}
        assert f"drafts {shape}" in line
        assert reason in line


@pytest.mark.parametrize("name", ["prefix_reused", "penalties", "regex", "several_samples"])
def test_same_tokens(name: str, plain: Any, copies: Any) -> None:
    reference = run(plain, SCENARIOS[name])
    for _ in range(1 + (name == "prefix_reused")):  # the same again, with earlier answers
        outputs = run(copies, SCENARIOS[name])
        assert tokens(outputs) == tokens(reference)
        for ours, theirs in zip(outputs, reference, strict=True):
            for a, b in zip(ours.outputs, theirs.outputs, strict=True):
                assert a.finish_reason == b.finish_reason


def test_sampling_grammars_and_penalties_together(plain: Any, engine: Any) -> None:
    assert tokens(run(engine, TOGETHER)) == tokens(run(plain, TOGETHER))


def test_auto_without_heads_is_copies(
    plain: Any, expected: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(speculative_config=AUTO, async_scheduling=True)
    assert runner_of(engine).late_steps is not None
    assert tokens(run(engine, TOGETHER)) == tokens(run(plain, TOGETHER))
    steps = count_steps(fresh(engine), monkeypatch)
    assert tokens(run(engine, REPEATED)) == expected
    assert len(steps) < 0.75 * sum(len(answer[0]) for answer in expected)


def read_last_step(engine: Any) -> None:
    """As it is before the next step, or when a server has nothing to do."""
    late = runner_of(engine).late_steps
    if late is not None:
        late.read_if_told()


def count_steps(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each request in each step from now on, where it got some."""
    runner, steps = runner_of(engine), list[int]()
    make = runner.step_drafts.make

    def count(step: Any, new_tokens: Any, *args: Any) -> Any:
        steps.extend(len(tokens) for tokens in new_tokens if tokens)
        return make(step, new_tokens, *args)

    monkeypatch.setattr(runner.step_drafts, "make", count)
    return steps


def test_as_many_drafts_as_with_synchronous_scheduling(
    expected: Any,
    config: dict[str, Any],
    engine: Any,
    make_engine: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = make_engine(speculative_config={**config, **ALWAYS_DRAFT})
    num_tokens = sum(len(answer[0]) for answer in expected)
    counts = []
    for one in (engine, waiting):
        steps = count_steps(fresh(one), monkeypatch)
        assert tokens(run(one, REPEATED)) == expected
        read_last_step(one)
        assert sum(steps) >= num_tokens, "every step was read"
        counts.append(len(steps))
    late, sync = counts
    assert sync < 0.75 * num_tokens, "drafts are right"
    if "drafter" in config:  # not in the place of trees: heads go first
        assert late < 0.75 * num_tokens
    else:  # an n-gram is learned one step late, and these short texts have hardly any others
        assert late <= (1.02 if config is COPY else 1.1) * sync


def test_a_fresh_proposer_hears_nothing_of_requests_before_it(copies: Any) -> None:
    run(fresh(copies), TOGETHER)
    fresh(copies)  # the last step of the run is only read with the next one, or here
    for _ in range(2):  # of the second one the last step may not have been read
        run(copies, Scenario([{"max_tokens": 4, **FEW}], PROMPTS[:1]))
    answers = runner_of(copies).drafter._proposer.earlier_answers(UNSALTED)
    assert answers is not None
    headings, own = 2 * (NUM_MARKS + 1), 2 * 4
    assert 0 < len(answers) <= headings + own, "no other answers, of up to 70 tokens"


def test_an_old_query_drafts_less(
    expected: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is the same and takes more steps: what is looked up must be the current end."""
    steps = count_steps(fresh(engine), monkeypatch)
    assert tokens(run(engine, REPEATED)) == expected
    current = len(steps)
    steps.clear()
    texts = late_steps.DeviceTexts

    def old(tokens: Any, lengths: Any, places: Any, *rest: Any) -> Any:
        known = [runner.spec_requests.num_tokens(name) for name in runner.spec_step.request_ids]
        lengths = lengths.clone()
        lengths[places] = lengths.new_tensor(known)
        return texts(tokens, lengths, places, *rest)

    runner = runner_of(engine)
    monkeypatch.setattr(late_steps, "DeviceTexts", old)
    assert tokens(run(fresh(engine), REPEATED)) == expected
    assert len(steps) > 1.2 * current


def test_a_wrong_verification_shows(
    expected: Any, copies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: were all drafts accepted, the text would be another."""
    follow = rejection.follow_chains

    def accept_all(sampled: Any, drafted: Any, starts: Any, num_drafted: int) -> Any:
        tokens, num_sampled = follow(sampled, drafted, starts, num_drafted)
        sizes = (starts[1:] - starts[:-1]).to(num_sampled.dtype)
        for row, start in enumerate(starts[:-1].tolist()):
            size = int(sizes[row]) - 1
            tokens[row, :size] = drafted[start + 1 : start + 1 + size]
        return tokens, sizes

    monkeypatch.setattr(rejection, "follow_chains", accept_all)
    assert tokens(run(fresh(copies), REPEATED)) != expected


def test_nobody_waits_for_the_step_that_is_queued(
    copies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(copies)
    sample, told = runner.sample_tokens, []

    def watch(*args: Any) -> Any:
        output = sample(*args)
        told.append(output.is_told)
        return output

    monkeypatch.setattr(runner, "sample_tokens", watch)
    run(copies, replace(REPEATED, prompts=PROMPTS[:3]))
    assert len(told) > 5
    assert not any(told)


def test_the_host_says_what_the_device_drafted(
    engine: Any, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step later it drafts the same, and tells the proposer what became of it."""
    runner = runner_of(fresh(engine))
    looked_up: dict[str, list[list[int]]] = {}
    draft, make = runner.late_steps.draft, runner.step_drafts.make
    compared = []

    def look(batch: Any, *args: Any) -> Any:
        drafts = draft(batch, *args)
        for name, row in zip(batch.req_ids, drafts.tolist(), strict=True):
            looked_up.setdefault(name, []).append(row)
        return drafts

    def compare(step: Any, new_tokens: Any, *args: Any) -> Any:
        made = make(step, new_tokens, *args)
        for name, said, drafted in zip(step.request_ids, new_tokens, made, strict=True):
            if said and drafted:
                compared.append((drafted, looked_up[name][-1][: len(drafted)]))
        return made

    monkeypatch.setattr(runner.late_steps, "draft", look)
    monkeypatch.setattr(runner.step_drafts, "make", compare)
    outcomes: list[Any] = []
    proposer = runner.drafter._proposer
    observe = proposer.observe

    def remember(new: Any) -> None:
        outcomes.extend(new)
        observe(new)

    monkeypatch.setattr(proposer, "observe", remember)
    counted = kept_counts(runner, monkeypatch)
    run(engine, REPEATED)
    assert len(compared) > 50
    assert all(ours == theirs for ours, theirs in compared)
    assert sum(outcome.num_accepted for outcome in outcomes) > 50
    assert all(outcome.num_accepted <= outcome.num_drafted for outcome in outcomes)
    assert len(runner.spec_states) <= 1
    assert len(runner.spec_requests) <= 1
    if config["method"] == "blockwise":
        kept = proposer._texts
    elif config["method"] == "adaptive_ngram":
        kept = proposer.drafter.learner.states
    else:
        kept = (proposer._late.copies if config["method"] == "auto" else proposer)._copies
    assert len(kept) <= 1
    if "corpus" in config:
        accepted = {name: counts[1] for name, counts in counted()["sources"].items()}
        assert min(accepted[name] for name in ("blockwise", "copy", "corpus")) > 0
        assert len(proposer._late._ngrams.drafter.learner.states) <= 1


def test_a_width_for_each_batch_size(
    expected: Any, config: dict[str, Any], make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host says of a step is of the tokens that the step verified, not of more."""
    widths = [[1, 1, config["num_speculative_tokens"]], [2, 3, 2], [4, 8, 0]]
    engine = make_engine(
        speculative_config={**config, "num_speculative_tokens_per_batch_size": widths},
        async_scheduling=True,
    )
    runner, outcomes = runner_of(engine), list[Any]()
    verified: set[tuple[int, int]] = set()
    make, observe = runner.step_drafts.make, runner.drafter._proposer.observe

    def note(step: Any, new_tokens: Any, *args: Any) -> Any:
        verified.update((len(step.drafts), len(draft)) for draft in step.drafts)
        assert all(
            len(said) <= len(draft) + 1 for draft, said in zip(step.drafts, new_tokens, strict=True)
        )
        return make(step, new_tokens, *args)

    def remember(new: Any) -> None:
        outcomes.extend(new)
        observe(new)

    looked_up: list[int] = []
    draft_late = runner.drafter.draft_late

    def look(known: Any, texts: Any) -> Any:
        looked_up.append(len(known))
        return draft_late(known, texts)

    monkeypatch.setattr(runner.step_drafts, "make", note)
    monkeypatch.setattr(runner.drafter._proposer, "observe", remember)
    monkeypatch.setattr(runner.drafter, "draft_late", look)
    assert tokens(run(engine, REPEATED)) == expected
    assert looked_up
    assert max(looked_up) < 4, "nothing is looked up where nothing is verified"
    assert tokens(run(engine, replace(REPEATED, prompts=PROMPTS[:1]))) == expected[:1]
    most = config["num_speculative_tokens"]
    assert {width for _, width in verified} <= {most, 2, 0}
    assert {width for _, width in verified} >= {2, 0}
    assert max(outcome.num_drafted for outcome in outcomes) <= most
    assert sum(outcome.num_accepted for outcome in outcomes) > 10


def test_a_look_up_that_fails_costs_drafts_alone(
    expected: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any width: vLLM overwrites what the next step does not verify."""
    widths = [[1, 1, 8], [2, 3, 4], [4, 8, 2]]
    engine = make_engine(
        speculative_config={**COPY, "num_speculative_tokens_per_batch_size": widths},
        async_scheduling=True,
    )
    runner = runner_of(engine)
    monkeypatch.setattr(runner.drafter, "draft_late", lambda *arguments: None)
    assert tokens(run(engine, REPEATED)) == expected


def test_preemption(
    plain: Any, make_engine: Any, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come back in other places, with what they had said."""
    scenario = Scenario([{"max_tokens": 50, **FEW}], PROMPTS)
    answers = tokens(run(plain, scenario))
    engine = make_engine(
        speculative_config=config, async_scheduling=True, num_gpu_blocks_override=12
    )
    preempted = count_preempted(engine, monkeypatch)
    assert tokens(run(engine, scenario)) == answers
    assert preempted


def test_abort(expected: Any, engine: Any) -> None:
    scenario = Scenario([REPEATED.params[i] for i in range(8)], PROMPTS)
    finished = run_with_aborts(fresh(engine), scenario, (4, 7), at_step=4)
    assert finished == {i: expected[i][0] for i in range(8) if i not in (4, 7)}


def test_second_turns(plain: Any, engine: Any) -> None:
    """The first answer is part of the second prompt, whose beginning is in the prefix cache."""
    first = run(plain, Scenario([{"max_tokens": 20, **FEW}], PROMPTS[:3]))
    prompts: Any = [
        {"prompt_token_ids": [*out.prompt_token_ids, *out.outputs[0].token_ids]} for out in first
    ]
    second = Scenario([{"max_tokens": 20, "ignore_eos": True}], prompts)
    answers = tokens(run(plain, second))
    for _ in range(2):
        assert tokens(run(engine, second)) == answers


def test_sources_of_requests(plain: Any, copies: Any, num_rows: list[int]) -> None:
    """A span of the prompt, tokens beside it, and a request that wants no drafts."""
    base = Scenario([{"max_tokens": 30, "ignore_eos": True}], PROMPTS[:4])
    answers = tokens(run(plain, base))
    given: list[dict[str, Any]] = [
        {"source_token_ids": answers[0][0]},
        {"source_span": [1, 4]},
        {"enabled": False},
        {"source_token_ids": answers[3][0], "max_draft_tokens": 2},
    ]
    params = [sampling_params(base.params[0], extra) for extra in given]
    outputs = fresh(copies).generate(base.prompts, params, use_tqdm=False)
    assert tokens(outputs) == answers
    # The first knew its answer: 30 tokens in about 30 / 9 steps, and then the batch is smaller.
    assert min(num_rows) < 4


def test_a_fresh_proposer_drafts_late_as_the_one_before_it(engine: Any) -> None:
    """It needs its tables, which are there before anything is drafted, and drafts as ever."""
    runner = runner_of(engine)
    runner.drafter.reset()
    scenario = Scenario([{"max_tokens": 20, "ignore_eos": True}], PROMPTS[:2])
    before = tokens(run(fresh(engine), scenario))
    runner.drafter.reset()
    assert tokens(run(fresh(engine), scenario)) == before


def lost(*args: Any) -> Any:
    raise RuntimeError("look-up")


@pytest.mark.parametrize(
    "draft",
    [
        lost,
        lambda requests, texts: None,
        lambda requests, texts: torch.zeros(len(requests), 3, dtype=torch.int64),
        lambda requests, texts: torch.zeros(len(requests), COPY["num_speculative_tokens"]),
    ],
    ids=["raises", "nothing", "too narrow", "floats"],
)
def test_a_failing_look_up_costs_drafts_alone(
    draft: Any, expected: Any, copies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(fresh(copies))
    monkeypatch.setattr(runner.drafter.late, "draft", draft)
    monkeypatch.setenv("VLLM_SPEC_EXT_STRICT", "0")
    counted = kept_counts(runner, monkeypatch)
    assert tokens(run(copies, REPEATED)) == expected
    assert counted()["counts"]["refused_drafts"] > 10


def test_tokens_that_there_are_not_are_not_looked_up(
    expected: Any, copies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draft(requests: Any, texts: Any) -> torch.Tensor:
        ids = torch.tensor([2**40, -(2**40)]).repeat(COPY["num_speculative_tokens"] // 2)
        return ids.repeat(len(requests), 1)

    monkeypatch.setattr(runner_of(fresh(copies)).drafter.late, "draft", draft)
    assert tokens(run(copies, REPEATED)) == expected


def test_what_waits_takes_nothing_on_the_device(make_engine: Any) -> None:
    relaxed = {**COPY, "scorer": {"type": "top_k", "k": 2}, "allow_lossy": True}
    runner = runner_of(make_engine(speculative_config=relaxed, async_scheduling=True))
    assert runner.late_steps is None
    assert runner.drafter.late is None


def test_a_request_that_wants_no_drafts_of_heads_gets_none(
    plain: Any, make_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = str(save_random_heads(tmp_path / "heads", FEW_IDS, 4, copy_trust=100.0))
    config = {**ALL, "drafter": {"method": "blockwise", "model": heads}}
    engine = make_engine(speculative_config=config, async_scheduling=True)
    base = Scenario([{"max_tokens": 30, **FEW}], PROMPTS[:3])
    answers = tokens(run(plain, base))
    outcomes: dict[str, list[int]] = {}
    proposer = runner_of(engine).drafter._proposer

    def note(new: Any) -> None:
        for outcome in new:
            outcomes.setdefault(outcome.request_id, []).append(outcome.num_drafted)

    monkeypatch.setattr(proposer, "observe", note)
    given: list[dict[str, Any]] = [{"enabled": False}, {"max_draft_tokens": 1}, {}]
    params = [sampling_params(base.params[0], extra) for extra in given]
    assert tokens(engine.generate(base.prompts, params, use_tqdm=False)) == answers
    assert sorted(max(sizes) for sizes in outcomes.values()) == [1, 8]


@pytest.mark.parametrize("is_async", [True, False])
def test_earlier_answers_do_not_grow_behind_their_end(
    is_async: bool, plain: Any, make_engine: Any
) -> None:
    """What is accepted behind a stop token nobody got; it would be drafted, and grow, each time."""
    engine = make_engine(
        speculative_config={**COPY, "adaptive_length": False}, async_scheduling=is_async
    )
    runner = runner_of(fresh(engine))
    assert (runner.late_steps is not None) == is_async
    base = tokens(run(plain, Scenario([{"max_tokens": 30, "ignore_eos": True}], PROMPTS[:1])))
    ending = {"max_tokens": 30, "ignore_eos": True, "stop_token_ids": [base[0][0][12]]}
    scenario = Scenario([ending], PROMPTS[:1])
    answer = tokens(run(plain, scenario))
    sizes = []
    for _ in range(4):
        assert tokens(run(engine, scenario)) == answer
        run(engine, Scenario([{"max_tokens": 1, "ignore_eos": True}], PROMPTS[1:2]))  # lets it go
        memory = runner.drafter._proposer.earlier_answers("")
        sizes.append(len(memory.tokens))
    growth = [after - before for before, after in pairwise(sizes)]
    assert len(set(growth)) == 1, sizes
    assert growth[0] == sizes[0]
