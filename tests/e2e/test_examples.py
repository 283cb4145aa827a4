# SPDX-License-Identifier: Apache-2.0
"""Every file in examples/ is run on the small model."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fenced_blocks import ROOT
from forked_programs import run_forked
from published_runs import (
    OFFLINE_EXAMPLES,
    ONE_PROCESS,
    QUESTIONS,
    environment,
    model_folder,
    python_runs,
    server_runs,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

OWN_DRAFTS = [
    "examples/token_tree_offline.py",
    "examples/cascade_offline.py",
    "examples/triforce_offline.py",
]
"""Without a draft model the target drafts for itself."""

ONLINE = "examples/online_learning.py"

BLOCKS = "examples/nar_offline.py"
"""With the drafter in this package."""

ON_RAY = ["examples/ray_batch.py", "examples/ray_serve.py"]
"""Run by test_ray_batch.py and test_ray_serve.py."""

SERVED = ["examples/serve_and_stream.py", "examples/long_document_questions.py"]

ENGINE_WITH_REPEAT = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        sys.argv[1],
        max_model_len=512,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config={"method": "repeat", "period": 3, "adaptive_length": False},
    )
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    answer = llm.generate("one two three one two three one two three", params)[0].outputs[0]
    counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    drafted = counters["vllm:spec_decode_num_draft_tokens"]
    accepted = counters["vllm:spec_decode_num_accepted_tokens"]
    with open(sys.argv[2], "w") as file:
        json.dump([len(answer.token_ids), drafted, accepted], file)
    llm.llm_engine.engine_core.shutdown()
"""


def test_every_example_is_run_and_short() -> None:
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*.py")}
    run_here = {*OFFLINE_EXAMPLES, *SERVED, *OWN_DRAFTS, *ON_RAY, ONLINE, BLOCKS}
    assert files == run_here | {"examples/custom_proposer/repeat_proposer.py"}
    assert all(len((ROOT / name).read_text().splitlines()) < 60 for name in files)


@pytest.mark.parametrize("name", OFFLINE_EXAMPLES)
def test_offline_example(name: str) -> None:
    (found,) = python_runs()[name]
    assert found["error"] is None
    assert found["out"]


def test_generate_example_copies() -> None:
    (found,) = python_runs()["examples/offline_generate.py"]
    assert "24 oak chairs" in str(found["out"])


def lines_of(name: str) -> list[str]:
    """What an example prints that is run by itself."""
    done = run_forked([str(ROOT / name), model_folder()], environment(), timeout=400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", OWN_DRAFTS)
def test_examples_accept_what_the_model_drafts_for_itself(name: str) -> None:
    lines = lines_of(name)
    (line,) = [line for line in lines if line.endswith("tokens were accepted")]
    words = line.split()  # vLLM's log may come behind it
    num_tokens, num_accepted, num_drafted = int(words[0]), int(words[2]), int(words[4])
    assert 0.5 * num_tokens < num_accepted <= num_drafted


def test_block_example() -> None:
    (line,) = [line for line in lines_of(BLOCKS) if line.endswith(" drafts")]
    num_tokens, num_accepted, num_drafts = (int(word) for word in line.split() if word.isdecimal())
    assert num_tokens > num_accepted > 0.3 * num_tokens
    assert num_drafts < num_tokens


def test_online_example() -> None:
    (line,) = [line for line in lines_of(ONLINE) if line.startswith("versions ")]
    assert line.startswith("versions v00000000, v00000001")
    assert line.endswith("the same text: True")


def test_streaming_example() -> None:
    done = server_runs()["examples/serve_and_stream.py"]
    assert done.returncode == 0, done.stderr
    words = done.stdout.strip().splitlines()[-1].split()
    assert words[1:3] == ["tokens", "in"]
    assert 0 < int(words[3]) < int(words[0])  # steps gave several tokens


def test_questions_example() -> None:
    done = server_runs()["examples/long_document_questions.py"]
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^\[(\d+) tokens, \d+ a second\]$", done.stdout, re.MULTILINE)
    assert len(found) == len(QUESTIONS)
    assert all(int(number) > 0 for number in found)
    assert all(question in done.stdout for question in QUESTIONS)


def test_custom_proposer_is_installed_and_drafts(tmp_path: Path) -> None:
    # A copy, so that building leaves nothing in the repository.
    package = shutil.copytree(ROOT / "examples/custom_proposer", tmp_path / "package")
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--target", str(target), str(package)], check=True, timeout=120)
    paths = ":".join([str(target), *filter(None, [environment().get("PYTHONPATH")])])
    variables = environment(PYTHONPATH=paths, **ONE_PROCESS)
    explain = [sys.executable, "-m", "vllm_spec_ext.cli.main", "explain", "repeat"]
    shown = subprocess.run(
        explain, capture_output=True, text=True, env=variables, check=True, timeout=120
    )
    assert "period: integer >= 1; default 8" in shown.stdout
    script, result = tmp_path / "engine.py", tmp_path / "result.json"
    script.write_text(ENGINE_WITH_REPEAT)
    done = subprocess.run(
        [sys.executable, str(script), model_folder(), str(result)],
        capture_output=True,
        text=True,
        env=variables,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    num_tokens, num_drafted, num_accepted = json.loads(result.read_text())
    assert num_tokens == 24
    assert num_drafted > num_accepted > 0
