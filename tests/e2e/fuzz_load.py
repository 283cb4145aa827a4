# SPDX-License-Identifier: Apache-2.0
"""Sends fuzzed requests to a real server, many at once, and says what is wrong with the answers.

python tests/e2e/fuzz_load.py --requests 10000 --configuration input_copy
python tests/e2e/fuzz_load.py --minutes 25 --tensor-parallel 2 --compare

With ``--minutes`` a few clients send a mixed load instead, and what the server holds is sampled
every minute; ``--compare`` sends the same to a second server, which has one rank, and compares
the texts.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from published_runs import ONE_PROCESS, environment
from request_fuzz import (
    GOOD,
    MAX_MODEL_LEN,
    RESPONSES,
    VLLMS_OWN,
    FuzzRequest,
    generate,
    good_body,
)

from vllm_spec_ext.cli import vllm_metadata
from vllm_spec_ext.proposers import registry

NAME = "tiny"
AT_ONCE = 64
LIMIT_S = 120.0  # no answer by then is a hang
START_S = 300.0
MAX_GROWTH_BYTES = 150 << 20  # it was 25 to 50 MiB, behind 10,000 requests, too
_LAST_EVENT = "event: response.completed"
SOON_READ = 4096  # characters of options that are looked at before a stream's status is sent
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "input_copy": {"method": "input_copy", "num_speculative_tokens": 8},
    "adaptive_ngram": {"method": "adaptive_ngram", "num_speculative_tokens": 12},
    "auto": {"method": "auto", "num_speculative_tokens": 12},
    "relaxed": {
        "method": "input_copy",
        "num_speculative_tokens": 8,
        "scorer": {"type": "tolerance", "beta": 3, "tau": 2.0},
        "allow_lossy": True,
    },
}
# By hand; the model drafts for itself, so that much is drafted and accepted.
MORE: dict[str, dict[str, Any]] = {
    "small_model": {"method": "small_model", "num_speculative_tokens": 4},
    "plain": {},
}
ARGUMENTS = [
    *("--served-model-name", NAME, "--dtype", "float32", "--enforce-eager", "--seed", "0"),
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(AT_ONCE)),
    *(
        "--block-size",
        "32",
        "--num-gpu-blocks-override",
        "400",
    ),  # so few that some requests are preempted
]
BATCHED_TOKENS = 1024
WHOLE_PROMPTS = 2048  # no prompt of the mixed load is prefilled in pieces
# oneDNN keeps a compiled matrix product for each of the last 1024 shapes, hundreds of MiB before
# they are full; with few of them, what grows is what leaks.
ONEDNN_SHAPES = "64"
RANK_CORES = "0|1"  # one core for each of two ranks


@dataclass
class Report:
    """What became of all requests."""

    statuses: Counter[str] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)  # of answers that came to their end
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
        lines += [f"  {route}: {count}" for route, count in sorted(self.routes.items())]
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
def serving(
    model: Path,
    log: Path,
    speculative: dict[str, Any] | None,
    *,
    ranks: int = 1,
    replicas: int = 1,
    batched_tokens: int = BATCHED_TOKENS,
) -> Iterator[Server]:
    """A server of the tiny model in a session of its own; ``None`` is plain vLLM."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {**vllm_metadata.environment(), **environment()}
    variables["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = ONEDNN_SHAPES
    if ranks == replicas == 1:
        # The scheduler's process is the worker's, too: an import and a start less.
        variables.update(ONE_PROCESS)
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *ARGUMENTS]
    command += ["--max-num-batched-tokens", str(batched_tokens)]
    if ranks > 1:
        command += ["--tensor-parallel-size", str(ranks)]
        variables["VLLM_CPU_OMP_THREADS_BIND"] = RANK_CORES
    if replicas > 1:
        command += ["--data-parallel-size", str(replicas), "--shutdown-timeout", "60"]
        variables.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")
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
                await send(session, server, request, texts, report)
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
        return _texts_of(json.loads(await answer.read()))[0]


def _texts_of(answer: dict[str, Any]) -> list[str]:
    if "output" in answer:
        parts = [part for item in answer["output"] for part in item["content"]]
        return ["".join(part["text"] for part in parts)]
    choices = answer["choices"]
    return [one["text"] if "text" in one else one["message"]["content"] for one in choices]


async def send(
    session: Any, server: Server, request: FuzzRequest, texts: Sequence[str], report: Report
) -> str | None:
    """Send a request and note what is wrong with its answer.

    Args:
        session: Of aiohttp.
        server: Where to.
        request: What to send.
        texts: Of an idle server, for each of GOOD.
        report: Takes the status and the failure.

    Returns:
        All texts of the answer, if it is one that must be ``same`` everywhere.
    """
    import aiohttp

    body = b""
    try:
        async with asyncio.timeout(request.leave_after_s):
            async with session.post(
                f"{server.url}/v1/{request.route}",
                data=request.body,
                headers={"Content-Type": "application/json"},
            ) as answer:
                status = answer.status
                async for part in answer.content.iter_any():
                    body += part
    except TimeoutError:
        if request.leave_after_s is None:
            report.statuses["hung"] += 1
            report.fail(request, f"no answer in {LIMIT_S} s")
        else:
            report.statuses["left early"] += 1
        return None
    except (aiohttp.ClientError, OSError) as error:
        if _is_refused_by_silence(request, body.decode(errors="replace")):
            report.statuses["refused by silence"] += 1
            return None
        report.statuses["broken"] += 1
        report.fail(request, f"the connection broke: {error!r}")
        return None
    sent_first = status
    status, message = _outcome(status, body.decode(errors="replace"))
    report.statuses[str(status)] += 1
    report.routes[request.route] += 1
    wrong = _judge(request, status, message, came_late=status != sent_first)
    if (
        wrong is None
        and request.good is not None
        and _texts_of(json.loads(body))[0] != texts[request.good]
    ):
        wrong = f"the text is not that of an idle server: {body.decode()!r}"
    if wrong is not None:
        report.fail(request, wrong)
    if not request.same or status != 200:
        return None
    return json.dumps(_texts_of(json.loads(body)))


def _is_refused_by_silence(request: FuzzRequest, text: str) -> bool:
    """Whether a stream of ``/v1/responses`` was closed before its first token, for a reason.

    What vLLM finds wrong once an answer is streamed has no event there (0.32
    ``responses_stream_generator`` catches ``GenerationError`` alone), and no client sees why.
    """
    events = re.findall(r"^event: (.*)$", text, re.MULTILINE)
    may_be_wrong = request.expect == "any" or (
        request.expect == "refused" and _is_told_late(request)
    )
    begun = ["response.created", "response.in_progress"]
    return request.route == RESPONSES and events == begun and may_be_wrong


def _is_told_late(request: FuzzRequest) -> bool:
    """Whether its options are of a kind that the prompt, or a long look, tells to be wrong."""
    return len(request.body) > SOON_READ or b"source_" in request.body


def _outcome(status: int, text: str) -> tuple[int, str]:
    """Status and error message of an answer; errors of a stream come behind its status."""
    error = re.search(r'^data: (\{"error".*)$', text, re.MULTILINE)
    if error is not None:
        return int(json.loads(error[1])["error"]["code"]), error[1]
    return status, text


def _judge(
    request: FuzzRequest, status: int, message: str, *, came_late: bool = False
) -> str | None:
    """What is wrong with an answer, or with an error that came in a stream, behind its status."""
    if status >= 500:
        return f"HTTP {status}: {message[:1000]}"
    if len(message) > 20_000 and status >= 400 and request.names:
        return f"HTTP {status} with a message of {len(message)} characters"
    if status == 200 and request.expect == "refused":
        return "accepted a wrong option"
    if status == 200:
        is_cut = request.stream and request.route == RESPONSES and _LAST_EVENT not in message
        return "a stream without an end" if is_cut else None
    if request.expect == "accepted":
        return f"HTTP {status} for a right request: {message[:1000]}"
    plain = message.replace("\\\\", "\\")
    if request.names and not any(name in plain for name in request.names):
        return f"HTTP {status} that names none of {request.names}: {message[:1000]}"
    if came_late and request.names and not _may_come_late(request, plain):
        return f"refused in the stream alone, expected HTTP 400: {message[:1000]}"
    return None


def _may_come_late(request: FuzzRequest, message: str) -> bool:
    """Of what the prompt tells, and of options that take long to read."""
    told_by_prompt = (
        "but the prompt has",
        "does not occur in the prompt",
        "no whole token between",
    )
    return len(request.body) > SOON_READ or any(words in message for words in told_by_prompt)


def replay_vllms_own(server: Server) -> dict[str, int]:
    """Statuses of what is not generated; a plain server's show that they are vLLM's own."""
    statuses = {}
    for shape, (route, body) in VLLMS_OWN.items():
        length = "max_output_tokens" if route == RESPONSES else "max_tokens"
        request = urllib.request.Request(
            f"{server.url}/v1/{route}",
            json.dumps({"model": NAME, length: 2, **body}).encode(),
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
    parser.add_argument("--configuration", choices=[*CONFIGURATIONS, *MORE], default="input_copy")
    parser.add_argument("--minutes", type=float, help="a mixed load for so long")
    parser.add_argument("--tensor-parallel", type=int, choices=(1, 2), default=1)
    parser.add_argument("--compare", action="store_true", help="with a second server of one rank")
    given = parser.parse_args(arguments)
    if given.compare and given.minutes is None:
        parser.error("--compare goes with --minutes")
    sys.path.append(str(Path(__file__).parents[1] / "engine"))
    from tiny_model import build_tiny_model

    with tempfile.TemporaryDirectory(prefix="spec-ext-fuzz-") as folder:
        model = build_tiny_model(Path(folder) / "model")
        if given.minutes is not None:
            return _run_mixed_load(given, model, Path(folder))
        return _run_requests(given, model, Path(folder))


def _of(configuration: str, model: Path) -> tuple[dict[str, Any] | None, str]:
    """The options of an engine, and the method whose request options are sent."""
    speculative = {**CONFIGURATIONS, **MORE}[configuration]
    if configuration == "small_model":
        speculative = {**speculative, "model": str(model)}
    return speculative or None, (speculative or CONFIGURATIONS["input_copy"])["method"]


def _run_requests(given: argparse.Namespace, model: Path, folder: Path) -> int:
    speculative, method = _of(given.configuration, model)
    with serving(model, folder / "log", speculative, ranks=given.tensor_parallel) as server:
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


def _run_mixed_load(given: argparse.Namespace, model: Path, folder: Path) -> int:
    from mixed_load import mixed_load

    speculative, method = _of(given.configuration, model)
    ranks = {f"{given.tensor_parallel} rank(s)": given.tensor_parallel}
    if given.compare:
        ranks["compared"] = 1
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                serving(
                    *(model, folder / f"{name}.log", speculative),
                    ranks=count,
                    batched_tokens=WHOLE_PROMPTS,
                )
            )
            for name, count in ranks.items()
        }
        found = mixed_load(
            servers, method, given.seed, given.minutes, lambda line: print(line, flush=True)
        )
        dead = [name for name, server in servers.items() if not server.is_alive()]
    print(found.text())
    print(f"dead: {dead}")
    return 1 if found.failed or dead else 0


if __name__ == "__main__":
    sys.exit(main())
