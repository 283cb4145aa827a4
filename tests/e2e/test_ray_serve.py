# SPDX-License-Identifier: Apache-2.0
"""Two replicas behind Ray Serve, by the example: streams, sessions, a killed replica, metrics."""

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fenced_blocks import ROOT
from published_runs import vllm_spec
from ray_cluster import (
    VARIABLES,
    Cluster,
    free_port,
    plain_answers,
    ray_cluster,
    tiny_model,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="needs openai"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[data,serve]"),
]

NUM_STREAMS = 64
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SOURCE = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all."


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster() as started:
        yield started


@pytest.fixture(scope="module")
def served(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, subprocess.CompletedProcess[str]]:
    """The address of the app, and what the example said."""
    folder, port = tmp_path_factory.mktemp("serve"), free_port()
    for name in ("ray_serve.py", "serve_config.yaml"):
        text = (ROOT / "examples" / name).read_text()
        text = text.replace("8000", str(port))
        # Exact comparisons, and no clock that may hold drafts back on a busy machine.
        small = ["max_model_len: 256", "dtype: float32"]
        text = text.replace("max_model_len: 1024", f"\n{' ' * 12}".join(small))
        text = text.replace("{method: input_copy", "{adaptive_length: false, method: input_copy")
        (folder / name).write_text(text)
    words = [sys.executable, str(folder / "ray_serve.py"), str(tiny_model())]
    done = subprocess.run(
        words,
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    return f"http://localhost:{port}", done


def test_the_file_is_one_for_serve_run() -> None:
    import yaml
    from ray.serve.schema import ServeDeploySchema

    given = yaml.safe_load((ROOT / "examples/serve_config.yaml").read_text())
    (app,) = ServeDeploySchema.model_validate(given).applications
    assert app.import_path == "ray.serve.llm:build_openai_app"


@dataclass
class Outcome:
    """What a client saw."""

    text: str = ""
    finish: str | None = None
    status: int = 200


def question(number: int) -> str:
    return f"{number}: {SOURCE[number % 20 :]}"


async def ask_all(
    url: str, most_tokens: int, at_first: Callable[[], None] = lambda: None
) -> list[Outcome]:
    """All streams at once, each a session of its own.

    Args:
        url: Of the app.
        most_tokens: Of each answer, which are as long.
        at_first: Called once, when the first piece of text comes.
    """
    import openai

    begun: list[int] = []

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=200, max_retries=0)

    async def ask(number: int) -> Outcome:
        outcome = Outcome()
        try:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": question(number)}],
                temperature=0,
                max_tokens=most_tokens,
                stream=True,
                extra_headers={"x-session-id": f"user {number}"},
                extra_body={"ignore_eos": True, "vllm_xargs": {"spec_ext.source_text": SOURCE}},
            )
            async for chunk in stream:
                for choice in chunk.choices:
                    outcome.text += choice.delta.content or ""
                    outcome.finish = choice.finish_reason or outcome.finish
                if outcome.text and not begun:
                    begun.append(number)
                    at_first()
        except openai.APIStatusError as error:
            outcome.status = error.status_code
        return outcome

    async with client:
        return await asyncio.gather(*(ask(number) for number in range(NUM_STREAMS)))


def replicas(cluster: Cluster) -> list[int]:
    return cluster.actors(f"ray::ServeReplica:llm:LLMServer:{MODEL.replace('/', '--')}")


@pytest.mark.timeout(600)
def test_the_example(served: tuple[str, subprocess.CompletedProcess[str]]) -> None:
    _, done = served
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert len(re.findall(r"^\[\d+ characters\]$", done.stdout, re.MULTILINE)) == 2


@pytest.mark.timeout(600)
def test_64_streams_get_the_text_of_plain_decoding(served: tuple[str, Any], tmp_path: Path) -> None:
    found = asyncio.run(ask_all(served[0], 32))
    assert {outcome.finish for outcome in found} == {"length"}
    expected = plain_answers([question(i) for i in range(NUM_STREAMS)], 32, tmp_path)
    assert [outcome.text for outcome in found] == expected


def test_doctor_looks_at_the_nodes(cluster: Cluster) -> None:
    shown = vllm_spec("doctor", "--ray", cluster.address, variables=VARIABLES)
    assert re.search(r"^ok +node [\d.]+: vllm-spec-ext ", shown.stdout, re.MULTILINE), shown


def test_top_shows_each_replica(served: tuple[str, Any], cluster: Cluster) -> None:
    end = time.monotonic() + 60  # Ray collects metrics every ten seconds
    while time.monotonic() < end:
        shown = vllm_spec("top", "--url", cluster.metrics_url, "--once", variables=VARIABLES)
        if shown.stdout.count("input_copy (exact)") == 2:
            break
        time.sleep(2)
    assert shown.stdout.count("input_copy (exact)") == 2, shown.stdout + shown.stderr


@pytest.mark.timeout(600)
def test_a_replica_dies_under_load(served: tuple[str, Any], cluster: Cluster) -> None:
    expected = asyncio.run(ask_all(served[0], 192))
    before = replicas(cluster)
    assert len(before) == 2
    found = asyncio.run(ask_all(served[0], 192, lambda: os.kill(before[0], signal.SIGKILL)))
    # None hangs. A stream that had begun ends early, without a reason; the others get their text
    # or a 5xx.
    for whole, outcome in zip(expected, found, strict=True):
        assert whole.text.startswith(outcome.text)
        assert outcome.status == 200 or outcome.status // 100 == 5
        assert (outcome.finish == "length") == (outcome.text == whole.text)
    complete = [outcome for outcome in found if outcome.finish]
    assert NUM_STREAMS / 4 < len(complete) < NUM_STREAMS
    end = time.monotonic() + 300
    while len(replicas(cluster)) < 2 and time.monotonic() < end:
        time.sleep(0.5)
    assert len(set(replicas(cluster)) - set(before)) == 1
    again = asyncio.run(ask_all(served[0], 16))
    assert {outcome.finish for outcome in again} == {"length"}
