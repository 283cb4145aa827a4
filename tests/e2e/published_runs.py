# SPDX-License-Identifier: Apache-2.0
"""Runs what the README, the docs and the examples tell users to run, on as few engines as possible.

One engine for all Python, one server for all requests; each runs once a test session and ends
before its results are looked at.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO

from fenced_blocks import ROOT, blocks, commands
from forked_programs import run_forked

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the name that the docs use
START_S = 300.0
OFFLINE_EXAMPLES = ("examples/offline_generate.py", "examples/offline_chat_batch.py")
PAGE = "docs/quickstart.md"  # a document that is not so long
QUESTIONS = ("What is installed first?", "Which command shows a demo?")
BAD_REQUEST = {
    "model": MODEL,
    "prompt": "A short prompt.",
    "vllm_xargs": {"spec_ext.source_span": [0, 9999]},
}


# vLLM starts a process for the scheduler and one for the worker beside the user's; each imports
# everything, which takes ten seconds and half a GiB. Where a test is about something else, the
# user's process does it all.
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@cache
def model_folder() -> str:
    """The small model: ``VLLM_SPEC_TEST_MODEL``, or the demo's own."""
    given = os.environ.get("VLLM_SPEC_TEST_MODEL")
    if given:
        return given
    from vllm_spec_ext.cli.demo_model import ensure_demo_model

    return str(ensure_demo_model())


def environment(**more: str) -> dict[str, str]:
    """Variables of engine processes: a small cache, no downloads, few log lines."""
    small = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return {**os.environ, **small, **more}


def vllm_spec(
    *arguments: str, variables: Mapping[str, str] | None = None, forked: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run our command line in a process of its own.

    Args:
        arguments: Of it.
        variables: Beside our own.
        forked: With vLLM imported, for tests that do not ask how processes start.
    """
    if forked:
        words = ["-m", "vllm_spec_ext.cli.main", *arguments]
        return run_forked(words, {**os.environ, **(variables or {})}, timeout=600)
    return subprocess.run(
        [sys.executable, "-m", "vllm_spec_ext.cli.main", *arguments],
        env={**os.environ, **(variables or {})},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@cache
def python_runs() -> dict[str, list[dict[str, str | None]]]:
    """What every Python block and offline example prints, by page or file, in one engine."""
    snippets = [(block.page, block.text) for block in blocks("python")]
    snippets += [(name, (ROOT / name).read_text(encoding="utf-8")) for name in OFFLINE_EXAMPLES]
    with tempfile.TemporaryDirectory(prefix="spec-ext-docs-") as folder:
        results = Path(folder) / "results.json"
        given = {"model": model_folder(), "results": str(results), "snippets": snippets}
        done = run_forked(
            [str(Path(__file__).parent / "snippet_runner.py")],
            environment(),
            given=json.dumps(given),
            timeout=START_S + 200,
            cwd=folder,
        )
        assert results.is_file(), (done.stdout + done.stderr)[-8000:]  # vLLM logs to both
        return json.loads(results.read_text(encoding="utf-8"))


@cache
def server_runs() -> dict[str, subprocess.CompletedProcess[str]]:
    """Outputs of all curl commands and of the streaming example, against one real server.

    The server is the README's own ``vllm serve`` line, its model replaced by the local copy and the
    draft budget switched off: its clock may hold all drafts of so few requests back.
    """
    line = next(text for page, text in commands() if text.startswith("vllm serve"))
    results = {}
    with served(_always_drafting(line)) as port:
        for _, command in commands():
            if command.startswith("curl"):
                here = command.replace("localhost:8000", f"localhost:{port}")
                results[command] = _shell(here.replace("curl ", "curl -sS --fail-with-body ", 1))
        url = f"http://localhost:{port}/v1"
        example = f"{sys.executable} {ROOT}/examples/serve_and_stream.py {url}"
        results["examples/serve_and_stream.py"] = _shell(example)
        name = "examples/long_document_questions.py"
        asked = shlex.join([sys.executable, str(ROOT / name), str(ROOT / PAGE), *QUESTIONS])
        results[name] = _shell(asked, {**os.environ, "OPENAI_BASE_URL": url})
        body = json.dumps(BAD_REQUEST)
        results["bad request"] = _shell(
            f"curl -sS -w '%{{http_code}}' {url}/completions -H 'Content-Type: application/json' "
            f"-d '{body}'"
        )
        results["metrics"] = _shell(f"curl -sS http://localhost:{port}/metrics")
        results["top"] = _shell(
            f"{sys.executable} -m vllm_spec_ext.cli.main top "
            f"--url http://localhost:{port}/metrics --once"
        )
    return results


def _always_drafting(line: str) -> str:
    words = shlex.split(line)
    at = words.index("--speculative-config") + 1
    words[at] = json.dumps({**json.loads(words[at]), "adaptive_length": False})
    return shlex.join(words)


@contextmanager
def served(command: str) -> Iterator[int]:
    """Run a ``vllm serve`` line of the docs on the small model; gives its port."""
    words = shlex.split(command.replace(MODEL, model_folder()))
    words[0] = shutil.which("vllm", path=str(Path(sys.executable).parent)) or "vllm"
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    words += ["--served-model-name", MODEL, "--port", str(port), "--enforce-eager"]
    words += ["--max-model-len", "1024", "--max-num-seqs", "8"]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            words, stdout=log, stderr=log, env=environment(), start_new_session=True
        )
        try:
            _wait_until_healthy(server, port, log)
            yield port
        finally:
            _end(server)


def _wait_until_healthy(server: subprocess.Popen[bytes], port: int, log: IO[str]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    log.seek(0)
    raise AssertionError(f"the server did not come up:\n{log.read()[-4000:]}")


def _end(server: subprocess.Popen[bytes]) -> None:
    """Ask first; then make sure that nothing of its group is left."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
            server.wait(30)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _shell(command: str, variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=120,
        env=variables,
        check=False,
    )
