# SPDX-License-Identifier: Apache-2.0
"""The proposer as the engine drives it, replay of recordings, and the commands around it."""

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from number_corpus import NumberTokenizer, build_corpus
from typer.testing import CliRunner

from vllm_spec_ext.cli import simulate as simulate_module
from vllm_spec_ext.cli.corpus import corpus_app, parse_bytes
from vllm_spec_ext.cli.simulate import make_points, parse_grid, read_recordings, simulate
from vllm_spec_ext.engine.drafting.barrier import draft_problem
from vllm_spec_ext.errors import SpecExtError, UnknownNameError
from vllm_spec_ext.options import RequestOptions, parse_options
from vllm_spec_ext.parsed_method import parse_method
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.adaptive_ngram import AdaptiveNgram
from vllm_spec_ext.proposers.adaptive_ngram.options import AdaptiveNgramOptions
from vllm_spec_ext.proposers.adaptive_ngram.reference import ADED_REFERENCE, INTERNAL
from vllm_spec_ext.proposers.adaptive_ngram.settings import NgramSettings, settings_of
from vllm_spec_ext.proposers.base import (
    UNSALTED,
    Draft,
    EngineHandle,
    RequestStep,
    StepContext,
    StepOutcome,
    chain,
)
from vllm_spec_ext.replay import (
    Recording,
    check_draft,
    replay,
)

V = 50


def engine(budget: int = 8, seqs: int = 4, tokenizer: object | None = None) -> EngineHandle:
    return EngineHandle(V, 4096, seqs, budget, "MODEL", lambda: tokenizer)


def started(budget: int = 8, seqs: int = 4, **options: object) -> AdaptiveNgram:
    proposer = AdaptiveNgram(NgramSettings.model_validate(options))
    proposer.start(engine(budget, seqs, NumberTokenizer(V)))
    return proposer


def request(name: str, tokens: list[int], room: int = 8, **options: object) -> RequestStep:
    return of_group(UNSALTED, name, tokens, room, **options)


def of_group(
    group: str | None, name: str, tokens: list[int], room: int = 8, **options: object
) -> RequestStep:
    ids, given = np.array(tokens, np.int32), RequestOptions.model_validate(options)
    return RequestStep(name, ids, 1, tokens[-1:], room, given, share_group=group)


def same(a: list[Draft], b: list[Draft]) -> bool:
    def flat(drafts: list[Draft]) -> list[list[list[int]]]:
        return [
            [d.tokens.tolist(), [] if d.parents is None else d.parents.tolist()] for d in drafts
        ]

    return flat(a) == flat(b)


REPEATING = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 9, 6, 1, 2]


def test_drafts_the_repetition_within_the_room() -> None:
    assert registry.load("adaptive_ngram") is AdaptiveNgram
    proposer = started()
    step = StepContext(
        [
            request("full", REPEATING),
            request("none", REPEATING, room=0),
            request("two", REPEATING, room=2),
            request("off", REPEATING, enabled=False),
        ]
    )
    full, none, two, off = proposer.propose(step)
    assert full.tokens[:2].tolist() == [3, 4]
    assert full.parents is not None
    assert len(full) == 8
    assert (len(none), len(off)) == (0, 0)
    assert two.tokens.tolist() == [3, 4]
    assert "off" not in proposer.drafter.learner.states
    capped = proposer.propose(StepContext([request("new", REPEATING, max_draft_tokens=1)]))
    assert capped[0].tokens.tolist() == [3]
    proposer.observe([StepOutcome("full", 8, 3)])
    proposer.finish(["full", "none", "two", "off", "new", "unknown"])
    assert not proposer.drafter.learner.states


def test_room_bounds_more_than_the_reserved_budget() -> None:
    proposer = started(budget=3)
    draft = proposer.propose(StepContext([request("a", REPEATING, room=100)]))[0]
    assert len(draft) == 3
    assert len(proposer.propose(StepContext([request("b", [V + 3])]))[0]) == 0
    assert len(proposer.propose(StepContext([request("c", [1])]))[0]) == 0


@pytest.mark.parametrize(
    "options",
    [{}, {"tree": False}, {"search": "mcts"}, {"preset": "aded_reference"}, {"overlay": "both"}],
)
def test_deterministic(options: dict[str, Any]) -> None:
    batches = []
    for length in range(20, 60, 3):
        texts = [np.random.default_rng(i).integers(0, 9, 80).tolist()[:length] for i in range(3)]
        batches.append(StepContext([request(f"r{i}", text) for i, text in enumerate(texts)]))
    first, second = started(**options), started(**options)
    for step in batches:
        drafts = first.propose(step)
        assert same(drafts, second.propose(step))
        for draft in drafts:
            check_draft(draft, 8, V)


def test_weights_of_the_reference_are_no_probabilities_above_one() -> None:
    """The engine refuses such drafts."""
    proposer = started(preset="aded_reference")
    text = REPEATING * 8
    drafts = [proposer.propose(StepContext([request("a", text[:n])]))[0] for n in range(9, 60)]
    assert sum(map(len, drafts)) > 50
    for draft in drafts:
        assert draft_problem(draft, V) is None


def test_neighbours_do_not_matter_to_request_overlays() -> None:
    alone, together = started(), started()
    tokens = np.random.default_rng(3).integers(0, 6, 60).tolist()
    for length in range(10, 60):
        one = alone.propose(StepContext([request("a", tokens[:length])]))
        others = [request("b", tokens[::-1][:length]), request("a", tokens[:length])]
        assert same(one, together.propose(StepContext(others))[1:])


def test_drafting_goes_on_when_the_cost_is_unknown_again() -> None:
    proposer = started()
    requests = [request("a", REPEATING)]
    assert len(proposer.propose(StepContext(requests))[0])
    assert not len(proposer.propose(StepContext(requests, min_probability=1.0))[0])
    assert len(proposer.propose(StepContext(requests))[0])


def test_memory_is_flat() -> None:
    proposer = started(overlay="both")
    rng = np.random.default_rng(0)
    stream = rng.integers(0, V, 400).astype(np.int32)

    def run(steps: int) -> None:
        for index in range(steps):
            length = 2 + index % 390
            name = f"request-{index // 390}"
            view = RequestStep(name, stream[:length], 1, stream[length - 1 : length].tolist(), 8)
            proposer.propose(StepContext([view]))
            if length == 391:
                proposer.finish([name])

    run(2_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(10_000)
    growth_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    # The published code leaks over 40 kB a step: 400 MB here.
    assert growth_kb < 4_000
    assert len(proposer.drafter.learner.states) <= 4


def test_corpus_is_used_and_checked(tmp_path: Path) -> None:
    build_corpus(tmp_path, [[7, 8, 9, 10] * 20], V)
    proposer = started(corpus=str(tmp_path), overlay="none")
    draft = proposer.propose(StepContext([request("a", [7, 8])]))[0]
    assert draft.tokens[:4].tolist() == [9, 10, 7, 8]
    options = AdaptiveNgramOptions(corpus=str(tmp_path))
    with pytest.raises(SpecExtError, match="another tokenizer"):
        AdaptiveNgram(options).start(engine(tokenizer=NumberTokenizer(V - 1)))
    with pytest.raises(SpecExtError, match="skip_tokenizer_init"):
        AdaptiveNgram(options).start(engine())
    with pytest.raises(SpecExtError, match="no n-gram store"):
        started(corpus=str(tmp_path / "missing"))


def test_shared_overlay_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "overlay.safetensors"
    first = started(overlay="shared", overlay_file=str(path), overlay_save_every=1)
    first.propose(StepContext([request("a", REPEATING)]))
    first.close()
    assert path.exists()
    second = started(overlay="shared", overlay_file=str(path))
    draft = second.propose(StepContext([request("b", [1, 2], room=2)]))[0]
    assert draft.tokens.tolist() == [3, 4]


def test_options_are_checked() -> None:
    preset = NgramSettings.model_validate({"preset": "aded_reference", "cap": 2.0})
    assert (preset.cap, preset.increment, preset.search) == (2.0, 0.04, "mcts")
    for bad in (
        {"overlay": "none"},
        {"request_buckets": 100},
        {"overlay_file": "x"},
        {"normalise": False},
        {"max_sequences": 5},
        {"preset": "aded_reference", "min_confidence": 0.1},
        {"preset": "aded_reference", "tree": False},
    ):
        with pytest.raises(SpecExtError, match="adaptive_ngram"):
            parse_options(AdaptiveNgramOptions, bad, "adaptive_ngram")
    with pytest.raises(UnknownNameError, match="backoff"):
        parse_options(AdaptiveNgramOptions, {"back_off": True}, "adaptive_ngram")
    with pytest.raises(SpecExtError, match="21 bits"):
        AdaptiveNgram(AdaptiveNgramOptions()).start(
            EngineHandle(1 << 21, 64, 1, 4, "MODEL", lambda: None)
        )


def test_public_options_become_all_settings_of_their_preset() -> None:
    given = {"preset": "aded_reference", "cap": 2.0, "overlay": "request"}
    options = parse_options(AdaptiveNgramOptions, given, "adaptive_ngram")
    settings = AdaptiveNgram(options).settings
    assert settings.model_dump() == {
        **NgramSettings(**ADED_REFERENCE).model_dump(),
        **given,
    }
    assert settings_of(settings) is settings
    ours = settings_of(AdaptiveNgramOptions(max_depth=3))
    assert ours == NgramSettings(max_depth=3)


def test_a_setting_of_the_reference_alone_is_refused_with_its_preset() -> None:
    assert set(NgramSettings.model_fields) == {*AdaptiveNgramOptions.model_fields, *INTERNAL}
    for name in INTERNAL:
        with pytest.raises(UnknownNameError, match='set by "preset": "aded_reference" alone'):
            parse_options(AdaptiveNgramOptions, {name: 1}, "adaptive_ngram")
        with pytest.raises(UnknownNameError, match='set by "preset": "aded_reference" alone'):
            parse_method({name: 1}, "adaptive_ngram")
    with pytest.raises(UnknownNameError, match="aded_reference"):
        make_points("adaptive_ngram", [{"search": "mcts"}])
    (point,) = make_points("adaptive_ngram", [{"preset": "aded_reference"}])
    assert point.options == AdaptiveNgramOptions(preset="aded_reference")


def test_drafts_that_break_the_contract_are_refused() -> None:
    ids = np.array([5, 6, 7, 8, 9], np.int32)
    tree = Draft(ids, np.array([-1, 0, 1, 0, -1], np.int32))
    check_draft(tree, 5, V)
    with pytest.raises(SpecExtError, match="precede"):
        check_draft(Draft(ids, np.array([-1, 1, 0, 0, 0], np.int32)), 8, V)
    with pytest.raises(SpecExtError, match="at most 4"):
        check_draft(tree, 4, V)
    with pytest.raises(SpecExtError, match="vocabulary"):
        check_draft(tree, 8, 9)


RECORDINGS = [Recording([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6] * 4, "x"), Recording([1], [2, 3])]


class Oracle:
    """Drafts the right chain of two tokens at every step."""

    info = AdaptiveNgram.info

    def __init__(self) -> None:
        self.seen: list[StepOutcome] = []

    def propose(self, step: StepContext) -> list[Draft]:
        drafts = []
        for view in step.requests:
            tokens = RECORDINGS[int(view.request_id.split("-")[1])].output_token_ids
            done = view.num_output_tokens
            drafts.append(chain(list(tokens[done : done + min(2, view.room)])))
        return drafts

    def observe(self, outcomes: list[StepOutcome]) -> None:
        self.seen += outcomes

    def finish(self, request_ids: list[str]) -> None:
        pass


def test_replay_counts_by_hand() -> None:
    oracle = Oracle()
    ticks = iter(np.arange(0, 100, 0.001))
    result = replay(
        oracle,  # type: ignore[arg-type]
        RECORDINGS,
        engine(),
        clock=lambda: float(next(ticks)),
    )
    # 24 outputs: one by the prefill, 23 in steps of 3 (the last yields 2); then 1 in one step,
    # which has no room for a draft. Each request is read once more at its end.
    assert (result.num_requests, result.num_steps, result.num_tokens) == (2, 9, 24)
    assert result.tokens_per_step == pytest.approx(24 / 9)
    assert result.accepted_at_depth == [8, 7]
    assert result.propose_us == pytest.approx([1000.0] * 11)
    assert len(oracle.seen) == 9
    with pytest.raises(SpecExtError, match="batch_size"):
        replay(oracle, RECORDINGS, engine(), batch_size=5)  # type: ignore[arg-type]


def test_replay_of_batches_agrees_with_single_requests() -> None:
    rng = np.random.default_rng(0)
    items = [
        Recording(rng.integers(0, 5, 9).tolist(), rng.integers(0, 5, 40).tolist()) for _ in range(6)
    ]
    one = replay(started(), items, engine())
    four = replay(started(), items, engine(), batch_size=4)
    one.propose_us, four.propose_us = [], []
    assert one == four
    assert one.tokens_per_step > 1


def make_app() -> typer.Typer:
    app = typer.Typer()
    app.command()(simulate)
    app.add_typer(corpus_app, name="corpus")
    return app


def test_simulate_and_corpus_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_module, "load_tokenizer", lambda name: NumberTokenizer(V))
    monkeypatch.setattr("vllm_spec_ext.cli.corpus.load_tokenizer", lambda name: NumberTokenizer(V))
    rows = [
        {"prompt_token_ids": [1, 2, 3], "output_token_ids": [1, 2, 3] * 5, "category": "a"},
        {"prompt": "1 2 3", "output": "1 2 3 1 2 4 1 2 3"},
    ]
    recordings = tmp_path / "rec.jsonl"
    recordings.write_text("\n".join(map(json.dumps, rows)))
    runner, figures = CliRunner(), tmp_path / "out.json"
    (tmp_path / "text.txt").write_text("1 2 3 4 5 " * 50)
    out = str(tmp_path / "store")
    given = ["corpus", "build", "--tokenizer", "t", "--input", str(tmp_path / "text.txt")]
    built = runner.invoke(make_app(), [*given, "--out", out, "--quiet"], catch_exceptions=False)
    assert built.exit_code == 0
    shown = runner.invoke(make_app(), ["corpus", "info", out, "--verify", "--json"])
    assert json.loads(shown.stdout)["num_tokens"] == 250
    given = ["simulate", str(recordings), "--tokenizer", "t", "--set", "tree=true,false"]
    refused = runner.invoke(make_app(), [*given, "--set", "adaptive_length=true,false"])
    assert "a replay has no times of steps" in str(refused.exception)
    given += ["--set", "num_speculative_tokens=4,8", "--set", f"corpus={out}", "--by-category"]
    done = runner.invoke(make_app(), [*given, "--json", str(figures)], catch_exceptions=False)
    assert done.exit_code == 0
    table = json.loads(figures.read_text())
    assert len(table) == 8
    assert {row["num_speculative_tokens"] for row in table} == {4, 8}
    assert all(row["tokens_per_step"] > 1 for row in table)


def test_simulate_refuses_bad_input(tmp_path: Path) -> None:
    assert parse_grid(["a=1,x", "b=true"]) == [{"a": 1, "b": True}, {"a": "x", "b": True}]
    assert parse_grid(['a=["x", "y"]', "b=[1,2]"]) == [{"a": ["x", "y"], "b": [1, 2]}]
    assert parse_bytes("1.5G") == 3 << 29
    for bad in ("a", "=1", "a="):
        with pytest.raises(SpecExtError, match="key=value"):
            parse_grid([bad])
    with pytest.raises(SpecExtError, match="twice"):
        parse_grid(["a=1", "a=2"])
    with pytest.raises(SpecExtError, match="size"):
        parse_bytes("much")
    with pytest.raises(UnknownNameError):
        make_points("adaptive_ngram", [{"trees": True}])
    with pytest.raises(SpecExtError, match="num_speculative_tokens"):
        make_points("adaptive_ngram", [{"num_speculative_tokens": 0}])
    path = tmp_path / "rec.jsonl"
    for line, message in (
        ('{"prompt": "a", "output": "b"}', "--tokenizer"),
        ('{"text": "a"}', "expected prompt_token_ids"),
        (
            '{"prompt": "a\\ud83d", "output": ""}',
            r"rec.jsonl, line 1: the prompt holds half a char",
        ),
        (
            '{"prompt": "", "output": "a\\ud83d"}',
            r"rec.jsonl, line 1: the output holds half a char",
        ),
        ('{"prompt_token_ids": [-1], "output_token_ids": []}', "integers"),
        ('{"prompt_token_ids": [3000000000], "output_token_ids": []}', "from 0 to 4194303"),
        (
            '{"prompt_token_ids": [1], "output_token_ids": [1], "foreseen": [[1, [], [-1], [1]]]}',
            "foreseen: expected token ids",
        ),
        ("{", "not JSON"),
        ("", "no recordings"),
    ):
        path.write_text(line + "\n")
        with pytest.raises(SpecExtError, match=message):
            read_recordings(path, None)
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(SpecExtError, match="UTF-8"):
        read_recordings(path, None)


def test_a_replay_writes_no_files(tmp_path: Path) -> None:
    """What replicas save of recordings would be merged into what they learned of their users."""
    pattern = str(tmp_path / "{replica}.safetensors")
    options = {"overlay": "shared", "overlay_file": pattern, "overlay_save_every": 1}
    (point,) = make_points("adaptive_ngram", [options])
    recordings = [Recording([1, 2, 3, 1, 2], [3, 1, 2, 3, 1, 2])]
    proposer, engine = simulate_module.start(
        "adaptive_ngram", point, recordings, NumberTokenizer(V), "", 1
    )
    replay(proposer, recordings, engine)
    proposer.close()
    assert not list(tmp_path.iterdir())
