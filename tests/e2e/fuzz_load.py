# SPDX-License-Identifier: Apache-2.0
"""Sends fuzzed requests to a real server, many at once, and says what is wrong with the answers.

python tests/e2e/fuzz_load.py --requests 10000 --configuration input_copy
"""

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from published_runs import environment
from request_fuzz import GOOD, MAX_MODEL_LEN, VLLMS_OWN, FuzzRequest, generate, good_body

from vllm_spec_ext.cli import vllm_metadata
from vllm_spec_ext.cli.cache_folder import cache_folder
from vllm_spec_ext.proposers import registry

NAME = "tiny"
AT_ONCE = 64
LIMIT_S = 120.0  # no answer by then is a hang
START_S = 300.0
MAX_GROWTH_BYTES = 300 << 20
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "input_copy": {"method": "input_copy", "num_speculative_tokens": 8},
    "adaptive_ngram": {"method": "adaptive_ngram", "num_speculative_tokens": 12},
    "relaxed": {
        "method": "input_copy",
        "num_speculative_tokens": 8,
        "scorer": {"type": "tolerance", "beta": 3, "tau": 2.0},
        "allow_lossy": True,
    },
}
ARGUMENTS = [
    *("--served-model-name", NAME, "--dtype", "float32", "--enforce-eager", "--seed", "0"),
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(AT_ONCE)),
    *("--max-num-batched-tokens", "1024", "--block-size", "32"),
    *("--num-gpu-blocks-override", "400"),  # so few that some requests are preempted
]


@dataclass
class Report:
    """What became of all requests."""

    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    memory_bytes: list[int] = field(default_factory=list)  # after each tenth of the requests

    def fail(self, request: FuzzRequest, why: str) -> None:
        """Note a failure with the body that led to it."""
        body = (
            request.body if len(request.body) < 1500 else request.body[:750] + request.body[-750:]
        )
        self.failures.append(f"{why}\n  {request.route} {body!r}")

    def text(self) -> str:
        """For people."""
        memory = ", ".join(str(value >> 20) for value in self.memory_bytes)
        lines = [f"{sum(self.statuses.values())} requests in {self.seconds:.0f} s"]
        lines += [f"  {status}: {count}" for status, count in sorted(self.statuses.items())]
        lines += [f"memory of the server's processes, MiB: {memory}"]
        return "\n".join([*lines, f"failures: {len(self.failures)}", *self.failures[:20]])


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def is_alive(self) -> bool:
        """Whether its process runs and answers."""
        try:
            urllib.request.urlopen(f"{self.url}/health", timeout=60).close()
        except (urllib.error.URLError, OSError):
            return False
        return self.process.poll() is None

    def memory_bytes(self) -> int:
        """Resident memory of all its processes."""
        import psutil

        first = psutil.Process(self.process.pid)
        return sum(one.memory_info().rss for one in [first, *first.children(recursive=True)])


@contextmanager
def serving(model: Path, log: Path, speculative: dict[str, Any] | None) -> Iterator[Server]:
    """A server of the tiny model in a session of its own; ``None`` is plain vLLM."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {**vllm_metadata.environment(cache_folder() / "metadata"), **environment()}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *ARGUMENTS]
    if speculative is not None:
        command += ["--speculative-config", json.dumps(speculative)]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
        server = Server(f"http://127.0.0.1:{port}", process, log)
        try:
            _wait_until_alive(server)
            yield server
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


def _wait_until_alive(server: Server) -> None:
    end = time.monotonic() + START_S
    while not server.is_alive():
        if server.process.poll() is not None or time.monotonic() > end:
            raise AssertionError(f"no server came up:\n{server.log.read_text()[-4000:]}")
        time.sleep(0.5)


def fuzz(server: Server, method: str, seed: int, count: int) -> Report:
    """Send requests, 64 at once, and look at every answer."""
    return asyncio.run(_fuzz(server, method, seed, count))


async def _fuzz(server: Server, method: str, seed: int, count: int) -> Report:
    import aiohttp

    report = Report()
    fields = list(registry.info(method).request_options.model_fields)
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        texts = [await _text(session, server, index) for index in range(len(GOOD))]
        requests = generate(seed, count, NAME, fields)
        start, done = time.monotonic(), 0

        async def work() -> None:
            nonlocal done
            for request in requests:
                await _send(session, server, request, texts, report)
                done += 1
                if done % max(count // 10, 1) == 0:
                    report.memory_bytes.append(server.memory_bytes())

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        report.seconds = time.monotonic() - start
        for index, text in enumerate(texts):
            if await _text(session, server, index) != text:
                report.failures.append(f"the text of GOOD[{index}] is another one at the end")
    return report


async def _text(session: Any, server: Server, index: int) -> str:
    url = f"{server.url}/v1/{GOOD[index][0]}"
    async with session.post(url, json=good_body(index, NAME)) as answer:
        return _text_of(json.loads(await answer.read()))


def _text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


async def _send(
    session: Any, server: Server, request: FuzzRequest, texts: Sequence[str], report: Report
) -> None:
    import aiohttp

    try:
        async with asyncio.timeout(request.leave_after_s):
            async with session.post(
                f"{server.url}/v1/{request.route}",
                data=request.body,
                headers={"Content-Type": "application/json"},
            ) as answer:
                status, body = answer.status, await answer.read()
    except TimeoutError:
        if request.leave_after_s is None:
            report.statuses["hung"] += 1
            report.fail(request, f"no answer in {LIMIT_S} s")
        else:
            report.statuses["left early"] += 1
        return
    except (aiohttp.ClientError, OSError) as error:
        report.statuses["broken"] += 1
        report.fail(request, f"the connection broke: {error!r}")
        return
    status, message = _outcome(status, body.decode(errors="replace"))
    report.statuses[str(status)] += 1
    wrong = _judge(request, status, message)
    if (
        wrong is None
        and request.good is not None
        and _text_of(json.loads(body)) != texts[request.good]
    ):
        wrong = f"the text is not that of an idle server: {body.decode()!r}"
    if wrong is not None:
        report.fail(request, wrong)


def _outcome(status: int, text: str) -> tuple[int, str]:
    """Status and error message of an answer; errors of a stream come behind its status."""
    error = re.search(r'^data: (\{"error".*)$', text, re.MULTILINE)
    if error is not None:
        return int(json.loads(error[1])["error"]["code"]), error[1]
    return status, text


def _judge(request: FuzzRequest, status: int, message: str) -> str | None:
    """What is wrong with an answer."""
    if status >= 500:
        return f"HTTP {status}: {message[:1000]}"
    if len(message) > 20_000 and status >= 400 and request.names:
        return f"HTTP {status} with a message of {len(message)} characters"
    if status == 200:
        return "accepted a wrong option" if request.expect == "refused" else None
    if request.expect == "accepted":
        return f"HTTP {status} for a right request: {message[:1000]}"
    plain = message.replace("\\\\", "\\")
    if request.names and not any(name in plain for name in request.names):
        return f"HTTP {status} that names none of {request.names}: {message[:1000]}"
    return None


def replay_vllms_own(server: Server) -> dict[str, int]:
    """Statuses of what is not generated; a plain server's show that they are vLLM's own."""
    statuses = {}
    for shape, body in VLLMS_OWN.items():
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps({"model": NAME, "max_tokens": 2, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                statuses[shape] = answer.status
        except urllib.error.HTTPError as error:
            statuses[shape] = error.code
    return statuses


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exits with 1 if anything failed."""
    parser = argparse.ArgumentParser(description="Fuzz a server of the tiny model.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--configuration", choices=[*CONFIGURATIONS, "plain"], default="input_copy")
    given = parser.parse_args(arguments)
    sys.path.append(str(Path(__file__).parents[1] / "engine"))
    from tiny_model import build_tiny_model

    speculative = CONFIGURATIONS.get(given.configuration)
    method = (speculative or CONFIGURATIONS["input_copy"])["method"]
    with tempfile.TemporaryDirectory(prefix="spec-ext-fuzz-") as folder:
        model = build_tiny_model(Path(folder) / "model")
        with serving(model, Path(folder) / "log", speculative) as server:
            if speculative is None:
                print(f"not generated: {replay_vllms_own(server)}")
            warm = fuzz(server, method, given.seed + 1, 300)
            before = server.memory_bytes()
            report = fuzz(server, method, given.seed, given.requests)
            after, alive = server.memory_bytes(), server.is_alive()
    report.failures += [] if alive else ["the server is dead"]
    print(f"warm-up: {warm.text()}\n{report.text()}")
    print(f"memory before and after, MiB: {before >> 20} {after >> 20}")
    print(f"alive: {alive}")
    return 1 if report.failures or warm.failures else 0


if __name__ == "__main__":
    sys.exit(main())
