# SPDX-License-Identifier: Apache-2.0
"""The benchmark and the demo on the real small model, as a user calls them (minutes)."""

import importlib.util
import json
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from published_runs import ONE_PROCESS, model_folder, vllm_spec

from vllm_spec_ext.bench.engine_client import EngineClient
from vllm_spec_ext.bench.methods import Method
from vllm_spec_ext.bench.prompts import Question
from vllm_spec_ext.bench.vllm_engine import Sampling

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

# Without the draft budget: its clock may hold all drafts of a short test back.
ALWAYS_DRAFTS = {"method": "input_copy", "adaptive_length": False}

SMALL_CACHE = {"kv_cache_memory_bytes": 256 << 20}

needs_plugin = pytest.mark.skipif(
    not any(entry.name == "spec_ext" for entry in entry_points(group="vllm.general_plugins")),
    reason="needs this package installed, so that vLLM finds its entry point",
)


@pytest.fixture(scope="module")
def model() -> str:
    """Folder of the small model."""
    return model_folder()


@needs_plugin
def test_bench_compares_methods_and_finds_identical_answers(model: str, tmp_path: Path) -> None:
    settings = {
        "model": model,
        "methods": {
            "plain": None,
            "input_copy": ALWAYS_DRAFTS,
            "broken": {"method": "no_such_method"},
        },
        "limit": 2,
        "max_tokens": 24,
        "repeats": 2,
        "batch_size": [1, 2],
        "dtype": "float32",
        "engine_args": SMALL_CACHE,
    }
    config, result = tmp_path / "bench.json", tmp_path / "result.json"
    config.write_text(json.dumps(settings))
    done = vllm_spec("bench", "--config", str(config), "--json", str(result), forked=True)
    assert done.returncode == 1, done.stderr  # the broken method
    assert "FAILED broken:" in done.stdout
    assert "\x1b[" not in done.stdout
    data = json.loads(result.read_text())
    assert list(data["failures"]) == ["broken"]
    order = [(run["batch_size"], run["repeat"], run["method"]) for run in data["runs"]]
    assert order == [
        (size, repeat, name)
        for size in (1, 2)
        for repeat, names in enumerate((["plain", "input_copy"], ["input_copy", "plain"]))
        for name in names
    ]
    rows = {(row["method"], row["batch_size"]): row for row in data["summaries"]}
    for size in (1, 2):
        plain, copy = rows["plain", size], rows["input_copy", size]
        assert plain["tokens_per_step"] == 1.0
        assert copy["tokens_per_step"] > 1.2
        assert copy["num_identical"] == copy["num_compared"] == 4
        assert copy["counters"]["num_drafts"] > 0
        assert copy["propose_p50_us"] > 0


@needs_plugin
def test_demo_runs_without_a_terminal(model: str) -> None:
    done = vllm_spec(
        *("demo", "--model", model, "--num-prompts", "2", "--max-tokens", "24"),
        forked=True,
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b[" not in done.stdout + done.stderr
    assert "[2/2] correction:" in done.stdout
    assert done.stdout.count("steps of the target") == 4
    assert "speed-up" in done.stdout


@needs_plugin
def test_plan_measures_this_machine(model: str, tmp_path: Path) -> None:
    result = tmp_path / "plan.json"
    done = vllm_spec(
        *("plan", "--model", model, "--limit", "2", "--max-tokens", "24", "--dtype", "float32"),
        # So few steps that the draft budget of a fresh engine may allow next to nothing.
        *("--method", 'input_copy={"adaptive_length": false}'),
        *("--batch-size", "1,2", "--context", "32", "--json", str(result)),
        variables=ONE_PROCESS,  # not forked: it starts a program that measures steps
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(result.read_text())
    assert set(data["step_seconds"]) == {"1", "2"}
    for row in data["step_seconds"].values():
        assert row["32"] > row["0"] > 0
    one, two = data["gains"]
    assert one["tokens_per_step"] > 1.2
    # Steps in which both requests decode are few, and of another part of the answers.
    assert two["tokens_per_step"] >= 1.0
    assert one["acceptance_per_position"]
    assert one["speed_up"] > 0 < two["speed_up"]
    assert "accepted per position: " in done.stdout


@needs_plugin
def test_an_idle_engine_takes_no_cpu_time_once_paused(model: str, tmp_path: Path) -> None:
    """In vLLM's own three processes, which all stop, and through which all figures come."""
    import psutil

    question = Question(1, "x", ({"role": "user", "content": "Say one two one two one two."},))
    args = {"max_model_len": 256, "max_num_seqs": 1, **SMALL_CACHE}
    method = Method("input_copy", ALWAYS_DRAFTS)
    with EngineClient("input_copy", tmp_path / "engine.log") as client:
        client.start(model, method, args, Sampling(16))
        client.prepare([question], 1, 1)
        family = [psutil.Process(client.process.pid)]
        family += family[0].children(recursive=True)
        assert len(family) >= 3

        def cpu_s() -> float:
            return sum(sum(process.cpu_times()[:2]) for process in family)

        run = client.run([0], 1)
        assert run.propose_us
        assert run.counters.num_drafts > 0
        client.pause()
        time.sleep(0.1)
        before = cpu_s()
        time.sleep(1.0)
        assert cpu_s() - before < 0.02
        again = client.run([0], 1).questions[0]
        assert again.token_ids == run.questions[0].token_ids  # it woke up unharmed
    _, alive = psutil.wait_procs(family, timeout=30)  # the watchdog takes a moment to notice
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
