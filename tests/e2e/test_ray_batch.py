# SPDX-License-Identifier: Apache-2.0
"""The example of Ray Data: killed half-way, and started again."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fenced_blocks import ROOT
from ray_cluster import QUESTIONS, SOURCE, Cluster, plain_answers, shared_cluster, tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[data,serve]"),
]


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return shared_cluster()


def write_questions(path: Path) -> None:
    rows = [
        {"id": f"row {i}", "question": question, "source_text": SOURCE if i % 2 else None}
        for i, question in enumerate(QUESTIONS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_answers(folder: Path) -> list[dict]:
    from pyarrow import parquet

    return [
        row for path in folder.glob("*.parquet") for row in parquet.read_table(path).to_pylist()
    ]


@pytest.mark.timeout(1500)
def test_a_killed_run_is_taken_up_where_it_was(cluster: Cluster, tmp_path: Path) -> None:
    model = tiny_model()
    questions, answers = tmp_path / "q.jsonl", tmp_path / "answers"
    text = (ROOT / "examples/ray_batch.py").read_text()
    text = text.replace('"max_tokens": 64', '"max_tokens": 64, "ignore_eos": True')
    # Exact comparisons, and no clock that may hold drafts back on a busy machine.
    text = text.replace('"max_model_len": 1024', '"max_model_len": 256, "dtype": "float32"')
    always = '"method": "input_copy", "adaptive_length": False'
    assert text.count('"method": "input_copy"') == 1
    text = text.replace('"method": "input_copy"', always)
    write_questions(questions)

    def command(name: str, text: str) -> list[str]:
        script = tmp_path / name
        script.write_text(text)
        return [sys.executable, str(script), "q.jsonl", "answers/", str(model)]  # as the docs do

    # One replica starts sooner; whoever takes the run up may have more.
    assert text.count("concurrency=(2, 2)") == 1
    first = subprocess.Popen(
        command("first.py", text.replace("concurrency=(2, 2)", "concurrency=(1, 1)")),
        env=cluster.environment,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 600
    while not list(answers.glob("*.parquet")) and first.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait(10)
    early = len(read_answers(answers))
    done = subprocess.run(
        command("second.py", text),
        env=cluster.environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,  # two engines start on a core that other tests use, too
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    rows = read_answers(answers)
    assert len(rows) >= early > 0
    assert sorted(row["id"] for row in rows) == sorted(f"row {i}" for i in range(len(QUESTIONS)))
    assert sum(row["num_accepted_draft_tokens"] for row in rows) > 0
    assert all(row["num_accepted_draft_tokens"] <= row["num_draft_tokens"] for row in rows)

    asked = {row["id"]: row["question"] for row in map(json.loads, questions.open())}
    assert {asked[row["id"]]: row["answer"] for row in rows} == plain_answers(64)
