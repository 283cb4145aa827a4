# SPDX-License-Identifier: Apache-2.0
"""Simulated replicas, against what can be said by hand, and against queueing theory."""

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_spec_ext.bench import cluster
from vllm_spec_ext.bench.cluster import Arrival, Cluster, Costs, poisson, serve, summarise
from vllm_spec_ext.bench.planner import StepTimes
from vllm_spec_ext.cli.main import main
from vllm_spec_ext.errors import SpecExtError

# A step takes 10 ms and 1 ms for each further request; a node 0.5 ms for each request.
TIMES = {
    size: {0: 0.010 + 0.001 * (size - 1), 4: 0.010 + 0.001 * (size - 1) + 0.002 * size}
    for size in (1, 4, 8)
}
COSTS = Costs(StepTimes(TIMES), {1: (2.0, 4.0, 0.001), 8: (1.5, 4.0, 0.002)}, 1e-5)
ONE = Cluster(COSTS, "off", num_replicas=1, max_num_seqs=8)
GAINS: list[dict[str, Any]] = [
    {
        "method": "input_copy",
        "batch": size,
        "tokens_per_step": tokens,
        "nodes_per_step": nodes,
        "drafter_us": seconds * 1e6,
    }
    for size, (tokens, nodes, seconds) in COSTS.drafts.items()
]
PLANNED = {"step_seconds": TIMES, "gains": GAINS}


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(PLANNED), encoding="utf-8")
    return file


def test_one_request_alone() -> None:
    (served,) = serve([Arrival(1.0, 100, 11)], ONE)
    # The prompt's step gives the first token, as a step of one request; ten more follow.
    assert served.waited_s == pytest.approx(0.010 + 100 * 1e-5)
    assert served.done_at - served.first_at == pytest.approx(10 * 0.010)
    assert served.token_s == pytest.approx(0.010)
    (drafted,) = serve([Arrival(1.0, 100, 11)], replace(ONE, mode="on"))
    assert drafted.done_at - drafted.first_at == pytest.approx(5 * 0.013)
    assert drafted.waited_s == served.waited_s  # nothing is drafted while a prompt is read


def test_steps_between_measured_sizes() -> None:
    assert COSTS.decode(2, "off") == pytest.approx((0.011, 1.0))
    seconds, tokens = COSTS.decode(8, "on")
    assert (seconds, tokens) == pytest.approx((0.017 + 0.016 + 0.002, 1.5))
    assert COSTS.decode(8, "where it pays") == COSTS.decode(8, "off")  # 1.5 for 2.06 steps
    assert COSTS.decode(1, "where it pays") == COSTS.decode(1, "on")  # 2 for 1.3 steps


def test_a_full_batch_lets_others_wait() -> None:
    arrivals = [Arrival(0.0, 1, 5) for _ in range(3)]
    served = serve(arrivals, replace(ONE, max_num_seqs=2))
    assert served[0].done_at < served[2].first_at
    spread = serve(arrivals[:2], replace(ONE, num_replicas=2, max_num_seqs=1))
    assert spread[0].done_at == spread[1].done_at
    crowd = serve(arrivals[:2], replace(ONE, max_num_seqs=1))
    assert crowd[1].done_at > 1.9 * crowd[0].done_at


def test_prompts_come_in_chunks() -> None:
    (served,) = serve([Arrival(0.0, 250, 1)], replace(ONE, max_num_batched_tokens=100))
    assert served.waited_s == pytest.approx(3 * 0.010 + 250 * 1e-5)
    assert served.done_at == served.first_at


def test_routing_in_turn_piles_up_behind_long_answers() -> None:
    """Long and short ones by turns: in turn all long ones meet on one replica."""
    arrivals = [Arrival(0.15 * i, 1, 100 if i % 2 else 2) for i in range(60)]
    two = replace(ONE, num_replicas=2, max_num_seqs=2)
    waits = {
        routing: statistics.fmean(one.waited_s for one in serve(arrivals, one_cluster))
        for routing in ("round-robin", "least-loaded")
        for one_cluster in [replace(two, routing=routing)]
    }
    assert waits["least-loaded"] < 0.5 * waits["round-robin"]


def test_it_is_the_queue_that_theory_knows() -> None:
    """One request at a time, exponential answers: the M/M/1 queue waits rho / (mu - lambda)."""
    costs = Costs(StepTimes({1: {0: 0.05}}), {1: (1.0, 0.0, 0.0)}, 0.0)
    alone = Cluster(costs, "off", max_num_seqs=1)
    arrivals = poisson(0.5, 8000, 1, 20, seed=3)  # a second each; half of the time busy
    served = serve(arrivals, alone)
    in_line = statistics.fmean(one.waited_s - 0.05 for one in served)
    assert in_line == pytest.approx(0.5 / (1.0 - 0.5), rel=0.15)


def test_drafts_help_where_replicas_are_idle_and_hurt_where_they_are_full() -> None:
    eight = replace(ONE, num_replicas=2)
    quiet, busy = poisson(0.5, 100, 10, 100), poisson(30.0, 400, 10, 100)
    speeds = {}
    for name, arrivals in (("quiet", quiet), ("busy", busy)):
        for mode in cluster.MODES:
            load = summarise(serve(arrivals, replace(eight, mode=mode)), mode)
            speeds[name, mode] = load.token_ms
    assert speeds["quiet", "on"] < 0.8 * speeds["quiet", "off"]
    assert speeds["busy", "on"] > 1.1 * speeds["busy", "off"]
    for name in ("quiet", "busy"):
        best = min(speeds[name, "on"], speeds[name, "off"])
        assert speeds[name, "where it pays"] <= 1.02 * best


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["plan", "cluster", *words])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_the_command(planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, plot = tmp_path / "found.json", tmp_path / "found.svg"
    words = ["--requests", "60", "--json", str(data), "--plot", str(plot)]
    assert run(*words, "--rate", "1,20", str(planned)) == 0
    printed = capsys.readouterr().out
    assert "simulated, from measured steps" in printed
    assert printed.count("where it pays") == 2
    rows = json.loads(data.read_text(encoding="utf-8"))["simulated"]
    assert [row["mode"] for row in rows] == 2 * list(cluster.MODES)
    assert "ms to the first token" in plot.read_text(encoding="utf-8")
    assert run(*words, "--rate", "1", "--rate", "20", str(planned)) == 0
    assert capsys.readouterr().out == printed, "one by one"
    assert run(str(planned), "--requests", "20") == 0
    assert capsys.readouterr().out.count("| off") == 6


def test_a_trace(planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"at": i / 4, "prompt_tokens": 50, "answer_tokens": 20} for i in range(40)]
    trace.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert run(str(planned), "--trace", str(trace)) == 0
    assert "| 4.00 | off" in capsys.readouterr().out
    trace.write_text('{"at": 1, "prompt_tokens": 5}\n')
    with pytest.raises(SpecExtError, match="line 1: found"):
        cluster.read_trace(trace)
    trace.write_text("")
    with pytest.raises(SpecExtError, match="holds no requests"):
        cluster.read_trace(trace)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "nar"], "expected one of its methods: input_copy"),
        (["--max-num-seqs", "9"], "steps were measured for up to 8 requests"),
        (["--rate", "fast"], "expected numbers like 0.5,1,2"),
        (["--rate", "-1"], "expected numbers above 0"),
        (["--rate", "1", "--trace", "no.jsonl"], "drop --rate"),
        (["--trace", "no.jsonl"], "cannot read no.jsonl"),
    ],
)
def test_what_is_wrong(
    words: list[str], said: str, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(planned), *words) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")


def test_another_file(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"step_seconds": TIMES}))
    with pytest.raises(SpecExtError, match="holds no drafts"):
        Costs.read(file, None, None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"step_seconds": {"1": {"4": 0.1}}},
            "batch size 1: no time of a step with 0 draft tokens",
        ),
        ({"step_seconds": {"1": {}}}, "batch size 1: no time of a step with 0 draft tokens"),
        ({"step_seconds": {}}, "holds no step times"),
        ({"step_seconds": {"1": {"0": 0.0}}}, "found 0.0 s, expected seconds above 0"),
        ({"step_seconds": {"1": {"0": float("nan")}}}, "found nan s, expected seconds above 0"),
        ({"step_seconds": {"1": {"0": 10**400}}}, "holds no step times"),
        ({"step_seconds": {"0": {"0": 1.0}}}, "found a batch of 0"),
        ({"step_seconds": {"1": {"0": 1.0, "-1": 1.0}}}, "found -1 draft tokens"),
        (
            {"step_seconds_with_branches": {"1": {"0": 1.0}}},
            "with_branches: holds no step times of batch sizes 1, 4, 8; found 1",
        ),
        ({"gains": []}, "holds no drafts"),
        ({"gains": {}}, "holds no drafts"),
        ({"gains": [{**GAINS[0], "tokens_per_step": 0.0}]}, "tokens_per_step.*found 0.0"),
        ({"gains": [{**GAINS[0], "nodes_per_step": -1}]}, "nodes_per_step.*found -1"),
        ({"gains": [{**GAINS[0], "drafter_us": float("inf")}]}, "drafter_us.*found inf"),
        ({"gains": [{**GAINS[0], "batch": 0}]}, "batch.*found 0"),
    ],
)
def test_tables_with_gaps(
    change: dict[str, Any], said: str, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some ended in a traceback, some in a simulation without end."""
    branches = [{**row, "branches": "step_seconds_with_branches" in change} for row in GAINS]
    planned.write_text(json.dumps({**PLANNED, "gains": branches, **change}), encoding="utf-8")
    assert run(str(planned), "--requests", "20") == 2
    printed = capsys.readouterr().err.replace("\n", " ")
    assert str(planned) in printed
    assert re.search(said, printed), printed


@pytest.mark.parametrize("at", ["NaN", "Infinity", "1e400"])
def test_requests_that_never_come(at: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f'{{"at": {at}, "prompt_tokens": 1, "answer_tokens": 1}}')
    with pytest.raises(SpecExtError, match="line 1"):
        cluster.read_trace(trace)
    trace.write_text(f'{{"at": 1, "prompt_tokens": {at}, "answer_tokens": 1}}')
    with pytest.raises(SpecExtError, match="line 1"):
        cluster.read_trace(trace)


def test_trees_cost_what_steps_with_branches_take(planned: Path) -> None:
    whole = json.loads(json.dumps(PLANNED))
    dear = {size: {n: 2 * s for n, s in row.items()} for size, row in TIMES.items()}
    whole["step_seconds_with_branches"] = dear
    trees = [{**row, "method": "tree", "branches": True} for row in whole["gains"]]
    whole["gains"] = [{**row, "branches": False} for row in whole["gains"]] + trees
    planned.write_text(json.dumps(whole), encoding="utf-8")
    assert (
        Costs.read(planned, "input_copy", None).decode(4, "on")[0]
        < (Costs.read(planned, "tree", None).decode(4, "on")[0])
    )
    assert Costs.read(planned, "tree", None).times.table == dear
