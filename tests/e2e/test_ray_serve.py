# SPDX-License-Identifier: Apache-2.0
"""Two replicas by `serve run`, which the example calls: streams, a killed replica, metrics."""

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fenced_blocks import ROOT
from published_runs import vllm_spec
from ray_cluster import (
    QUESTIONS,
    SOURCE,
    VARIABLES,
    Cluster,
    free_port,
    plain_answers,
    ray_node,
    shared_cluster,
    tiny_model,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="needs openai"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[data,serve]"),
]

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
MOST_TOKENS = 128


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return shared_cluster()


def replicas_shown(cluster: Cluster) -> set[str]:
    """The names by which ``top`` tells replicas apart."""
    shown = vllm_spec("top", "--url", cluster.metrics_url, "--once", variables=VARIABLES)
    return set(re.findall(r"^\| input_copy \(exact\) (\w+) \|", shown.stdout, re.MULTILINE))


@pytest.fixture(scope="module")
def shown_before(cluster: Cluster) -> set[str]:
    """Replicas of other tests on this cluster: Ray tells of them for a while when they are gone."""
    return replicas_shown(cluster)


@pytest.fixture(scope="module")
def served(
    cluster: Cluster, shown_before: set[str], tmp_path_factory: pytest.TempPathFactory
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
        source = f"model_id: {MODEL}\n{' ' * 12}model_source: {tiny_model()}"
        text = text.replace(f"model_id: {MODEL}", source)
        (folder / name).write_text(text)
    programs = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"  # `serve`
    done = subprocess.run(
        [sys.executable, str(folder / "ray_serve.py")],
        env={**cluster.environment, "PATH": programs},
        capture_output=True,
        text=True,
        timeout=900,  # two engines start on a core that other tests use, too
        check=False,
    )
    return f"http://localhost:{port}", done


@dataclass
class Outcome:
    """What a client saw."""

    text: str = ""
    finish: str | None = None
    status: int = 200


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
                messages=[{"role": "user", "content": QUESTIONS[number]}],
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
        return await asyncio.gather(*(ask(number) for number in range(len(QUESTIONS))))


def replicas(cluster: Cluster) -> list[int]:
    return cluster.actors(f"ray::ServeReplica:llm:LLMServer:{MODEL.replace('/', '--')}")


@pytest.mark.timeout(1200)
def test_the_example(served: tuple[str, subprocess.CompletedProcess[str]]) -> None:
    _, done = served
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert len(re.findall(r"^\[\d+ characters\]$", done.stdout, re.MULTILINE)) == 2


@pytest.mark.timeout(1200)
def test_64_streams_get_the_text_of_plain_decoding(served: tuple[str, Any]) -> None:
    found = asyncio.run(ask_all(served[0], MOST_TOKENS))
    assert {outcome.finish for outcome in found} == {"length"}
    assert [outcome.text for outcome in found] == list(plain_answers(MOST_TOKENS).values())


@pytest.mark.timeout(200)
def test_doctor_looks_at_every_node(cluster: Cluster) -> None:
    with ray_node(cluster, "127.0.0.2", VLLM_PLUGINS="other"):
        end, stdout = time.monotonic() + 120, ""
        while "node 127.0.0.2" not in stdout and time.monotonic() < end:
            shown = vllm_spec("doctor", "--ray", cluster.address, variables=VARIABLES)
            stdout = shown.stdout
    assert re.search(r"^ok +node [\d.]+: vllm-spec-ext ", stdout, re.MULTILINE), shown
    assert re.search(r"^broken +node 127.0.0.2: .*'other' leaves out", stdout, re.MULTILINE), shown
    assert shown.returncode == 1


@pytest.mark.usefixtures("served")
def test_top_shows_each_replica(cluster: Cluster, shown_before: set[str]) -> None:
    end = time.monotonic() + 60  # Ray collects metrics every ten seconds
    new: set[str] = set()
    while len(new) < 2 and time.monotonic() < end:
        new = replicas_shown(cluster) - shown_before
        time.sleep(2)
    assert len(new) == 2, new


@pytest.mark.timeout(1200)
def test_a_replica_dies_under_load(served: tuple[str, Any], cluster: Cluster) -> None:
    expected = plain_answers(MOST_TOKENS).values()
    before = replicas(cluster)
    assert len(before) == 2
    found = asyncio.run(ask_all(served[0], MOST_TOKENS, lambda: os.kill(before[0], signal.SIGKILL)))
    # None hangs. A stream that had begun ends early, without a reason; the others get their text
    # or a 5xx.
    for whole, outcome in zip(expected, found, strict=True):
        assert whole.startswith(outcome.text)
        assert outcome.status == 200 or outcome.status // 100 == 5
        assert (outcome.finish == "length") == (outcome.text == whole)
    complete = [outcome for outcome in found if outcome.finish]
    assert len(QUESTIONS) / 4 < len(complete) < len(QUESTIONS)
    # The dead process may be listed for a while, so a new one is waited for, not a number of them.
    end = time.monotonic() + 300
    while not set(replicas(cluster)) - set(before) and time.monotonic() < end:
        time.sleep(0.5)
    assert len(set(replicas(cluster)) - set(before)) == 1
    again = asyncio.run(ask_all(served[0], 16))
    assert {outcome.finish for outcome in again} == {"length"}
