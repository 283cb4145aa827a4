# SPDX-License-Identifier: Apache-2.0
"""A small Ray cluster of one node, a tiny model for it, and what that answers without Ray."""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from fenced_blocks import ROOT

START_S = 60
END_S = 5
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    # Replicas share the cores: one thread each, which vLLM does not bind.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's workers let everybody else go first
    "RAY_metrics_report_interval_ms": "2000",
}

SOURCE = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all."
QUESTIONS = tuple(f"{number}: {SOURCE[number % 20 :]}" for number in range(64))
MOST_TOKENS = (64, 128)
"""Lengths of answers that the tests compare, so that one engine gives them all."""

PLAIN = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, given, found = sys.argv[1:]
    questions, lengths = json.load(open(given))
    llm = LLM(model, dtype="float32", max_model_len=256, enforce_eager=True)
    chats = [[{"role": "user", "content": text}] for text in questions]
    answers = []
    for most in lengths:
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        answers.append([result.outputs[0].text for result in llm.chat(chats, params)])
    json.dump(answers, open(found, "w"))
"""


@dataclass(frozen=True)
class Cluster:
    """Where it is."""

    address: str
    metrics_url: str
    pid: int

    @property
    def environment(self) -> dict[str, str]:
        """Variables of programs that use it."""
        return {**os.environ, **VARIABLES, "RAY_ADDRESS": self.address}

    def actors(self, title: str) -> list[int]:
        """Ids of processes with this title, which Ray gives to an actor once it is ready."""
        import psutil

        found = []
        for process in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, IndexError):
                if process.cmdline()[0] == title:
                    found.append(process.pid)
        return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def ray_cluster(num_cpus: int = 8, *more: str, **variables: str) -> Iterator[Cluster]:
    """Run a head node, and end its processes afterwards.

    Args:
        num_cpus: CPUs that Ray counts, whatever the machine has.
        more: Further arguments of ``ray start``.
        variables: Of its workers' environment.
    """
    port, metrics_port = free_port(), free_port()
    program = Path(sys.executable).parent / "ray"
    words = [program, "start", "--head", "--block", "--node-ip-address", "127.0.0.1"]
    words += ["--port", port, "--metrics-export-port", metrics_port, "--num-cpus", num_cpus]
    words += ["--object-store-memory", 200 << 20, "--include-dashboard", "false", *more]
    head = subprocess.Popen(
        list(map(str, words)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **VARIABLES, **variables},
        start_new_session=True,
    )
    try:
        address = f"127.0.0.1:{port}"
        _wait_until_up(head, address)
        yield Cluster(address, f"http://127.0.0.1:{metrics_port}/metrics", head.pid)
    finally:
        _end(head)


@cache
def shared_cluster() -> Cluster:
    """One for all tests of a process that can share it; ends with the process."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(ray_cluster())


@contextmanager
def ray_node(cluster: Cluster, ip: str, **variables: str) -> Iterator[None]:
    """Another node of it, without CPUs, at another address of this machine; it joins in seconds.

    Args:
        cluster: A running one.
        ip: 127.0.0.2 or another one that leads here.
        variables: Of its workers' environment.
    """
    program = Path(sys.executable).parent / "ray"
    words = [program, "start", "--address", cluster.address, "--block", "--node-ip-address", ip]
    words += ["--num-cpus", 0, "--object-store-memory", 80 << 20]
    node = subprocess.Popen(
        list(map(str, words)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **VARIABLES, **variables},
        start_new_session=True,
    )
    try:
        yield
    finally:
        _end(node)


def _wait_until_up(head: subprocess.Popen[bytes], address: str) -> None:
    program, end = str(Path(sys.executable).parent / "ray"), time.monotonic() + START_S
    while time.monotonic() < end and head.poll() is None:
        asked = [program, "health-check", "--address", address]
        if subprocess.run(asked, capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.5)
    output = head.stdout.read().decode() if head.poll() is not None and head.stdout else "no end"
    pytest.fail(f"the cluster did not come up: {output[-3000:]}")


def _end(head: subprocess.Popen[bytes]) -> None:
    """`ray start --block` ends what it started when it is told to, but takes half a minute."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(head.pid).children(recursive=True)
        head.send_signal(signal.SIGTERM)
        for process in psutil.wait_procs(started, timeout=END_S)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    head.kill()
    head.wait(10)


@cache
def tiny_model() -> Path:
    """A random model of a few layers, whose answers say nothing."""
    sys.path.insert(0, str(ROOT / "tests/engine"))
    try:
        from tiny_model import build_tiny_model
    finally:
        sys.path.pop(0)
    folder: Path = build_tiny_model(Path(tempfile.mkdtemp(prefix="tiny-model-")))
    return folder


def plain_answers(most_tokens: int) -> dict[str, str]:
    """What the tiny model answers without drafts or Ray to :data:`QUESTIONS`, each in a chat.

    Args:
        most_tokens: Of each answer, which are as long; one of :data:`MOST_TOKENS`.
    """
    return dict(zip(QUESTIONS, _plain_answers()[MOST_TOKENS.index(most_tokens)], strict=True))


@cache
def _plain_answers() -> list[list[str]]:
    with tempfile.TemporaryDirectory() as name:
        script, given, found = (Path(name) / file for file in ("plain.py", "in.json", "out.json"))
        script.write_text(PLAIN)
        given.write_text(json.dumps([QUESTIONS, MOST_TOKENS]))
        subprocess.run(
            [sys.executable, str(script), str(tiny_model()), str(given), str(found)],
            env={**os.environ, **VARIABLES, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            capture_output=True,
            timeout=200,
            check=True,
        )
        answers: list[list[str]] = json.loads(found.read_text())
    return answers
