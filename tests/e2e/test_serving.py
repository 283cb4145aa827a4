# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` with input_copy: 64 streams at once, the same text as plain decoding, metrics."""

import asyncio
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from forked_programs import run_forked
from published_runs import environment, model_folder, vllm_spec

from vllm_spec_ext.cli import vllm_metadata
from vllm_spec_ext.cli.plugin_visibility import invisible_because

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="needs openai"),
    pytest.mark.skipif(
        invisible_because() is not None, reason=f"vLLM sees no plugin: {invisible_because()}"
    ),
]

NUM_REQUESTS = 64
START_S = 240
NAME = "small"
GENERATED = "vllm:generation_tokens_total"
SPECULATIVE = '{"method": "input_copy", "num_speculative_tokens": 6}'
# Without the draft budget: on a busy machine its clock may hold all drafts of a short test back.
ALWAYS_DRAFTS = '{"method": "input_copy", "num_speculative_tokens": 6, "adaptive_length": false}'
TWO = ("--api-server-count", "2")
SERVER_ARGUMENTS = [
    *("--served-model-name", NAME, "--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", "384", "--max-num-seqs", str(NUM_REQUESTS)),
    *("--max-num-batched-tokens", "2048", "--block-size", "32", "--seed", "0"),
]
SENTENCES = [
    "She go to school every days and like it very much.",
    "The list holds apples, pears, plums and one very old banana.",
    "def area(width, height): return width * height",
    "We was waiting on the station when the train have arrived.",
]


@pytest.fixture(scope="module")
def model() -> str:
    """Folder of the small model."""
    return model_folder()


@contextmanager
def serving(model: str, log: Path, *extra: str) -> Iterator[str]:
    """A server in a session of its own; yields its base URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = vllm_metadata.environment()
    variables.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += ["--host", "127.0.0.1", "--port", str(port), *SERVER_ARGUMENTS, *extra]
    with log.open("w") as file:
        server = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(url, server, log)
            yield url
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait(10)


def _wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    import httpx

    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert server.poll() is None, f"the server ended: {log.read_text()[-3000:]}"
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    pytest.fail(f"the server did not start in {START_S} s: {log.read_text()[-3000:]}")


PLAIN = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, found = sys.argv[1:]
    prompts, lengths = json.load(sys.stdin)
    sizes = {"max_model_len": 384, "max_num_seqs": len(prompts)}
    llm = LLM(model, dtype="float32", enforce_eager=True, **sizes)
    params = [SamplingParams(temperature=0.0, max_tokens=most) for most in lengths]
    results = llm.generate(prompts, params, use_tqdm=False)
    answers = [(r.outputs[0].text, len(r.outputs[0].token_ids)) for r in results]
    json.dump(answers, open(found, "w"))
"""


@dataclass
class Answers:
    """What was said to all requests, and what a server counted."""

    texts: list[str]
    num_tokens: list[int]
    counters: dict[str, float] = field(default_factory=dict)


def most_tokens(i: int) -> int:
    return 16 + i % 9


def question(i: int) -> tuple[str, bool]:
    """What request ``i`` asks, and whether that is a message of a chat."""
    sentence = f"{i}. {SENTENCES[i % len(SENTENCES)]}"
    if i % 2:
        return f"{sentence}\nThe same text again:\n{sentence[:9]}", False
    return f"Repeat this text exactly, and say nothing else:\n{sentence}", True


async def ask_all(url: str) -> Answers:
    """64 streaming requests at once: half chat, half completion, of different lengths."""
    import openai

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=280, max_retries=0)

    async def ask(i: int) -> tuple[str, int]:
        text, is_chat = question(i)
        common: dict[str, Any] = {
            "model": NAME,
            "max_tokens": most_tokens(i),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        pieces, used = [], 0
        if is_chat:
            chat = await client.chat.completions.create(
                messages=[{"role": "user", "content": text}], **common
            )
            async for part in chat:
                pieces += [choice.delta.content or "" for choice in part.choices]
                used = part.usage.completion_tokens if part.usage else used
        else:
            stream = await client.completions.create(prompt=text, **common)
            async for chunk in stream:
                pieces += [choice.text for choice in chunk.choices]
                used = chunk.usage.completion_tokens if chunk.usage else used
        return "".join(pieces), used

    async with client:
        results = await asyncio.gather(*(ask(i) for i in range(NUM_REQUESTS)))
    texts, used = [text for text, _ in results], [used for _, used in results]
    end = time.monotonic() + 10  # several API servers: one may not have written its part yet
    while (found := counters(url)).get(GENERATED) != sum(used) and time.monotonic() < end:
        await asyncio.sleep(0.1)
    return Answers(texts, used, found)


def counters(url: str) -> dict[str, float]:
    """Prometheus counters of vLLM and ours, summed over their labels."""
    import httpx

    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines():
        match = re.match(r"((?:vllm|spec_ext):\w+_total)(?:\{[^}]*\})? ([-+.\deE]+)$", line)
        if match:
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


@pytest.fixture(scope="module")
def plain(model: str, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """By an engine without a server."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    folder, prompts = tmp_path_factory.mktemp("plain"), []
    for text, is_chat in map(question, range(NUM_REQUESTS)):
        message = [{"role": "user", "content": text}]
        prompts.append(
            tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            if is_chat
            else text
        )
    script, found = folder / "plain.py", folder / "answers.json"
    script.write_text(PLAIN)
    lengths = [most_tokens(i) for i in range(NUM_REQUESTS)]
    words = [str(script), model, str(found)]
    done = run_forked(words, environment(), given=json.dumps([prompts, lengths]), timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    texts, num_tokens = zip(*json.loads(found.read_text()), strict=True)
    return Answers(list(texts), list(num_tokens))


@pytest.fixture(scope="module")
def server(plain: Answers, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Started after the plain engine is gone: two would not fit into the memory of small hosts.

    Two processes take its requests, so that what each is told of the engine must add up.
    """
    log = tmp_path_factory.mktemp("ours") / "server.log"
    with serving(model, log, *TWO, "--speculative-config", ALWAYS_DRAFTS) as url:
        yield url
    assert "Traceback" not in log.read_text()


@pytest.mark.timeout(1200)
def test_64_streams_get_the_same_text_and_the_counters_agree(server: str, plain: Answers) -> None:
    ours = asyncio.run(ask_all(server))
    assert ours.texts == plain.texts
    assert ours.num_tokens == plain.num_tokens
    assert all(ours.num_tokens)
    total = sum(ours.num_tokens)
    assert ours.counters[GENERATED] == total
    drafts = ours.counters["vllm:spec_decode_num_drafts_total"]
    drafted = ours.counters["vllm:spec_decode_num_draft_tokens_total"]
    accepted = ours.counters["vllm:spec_decode_num_accepted_tokens_total"]
    per_position = ours.counters["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert NUM_REQUESTS / 2 < drafts <= drafted <= 6 * drafts
    assert 0 < accepted <= drafted
    assert accepted == per_position
    # Counted by the worker, told to one of the two API servers step by step.
    assert ours.counters["spec_ext:accepted_nodes_total"] == accepted
    assert ours.counters["spec_ext:verified_nodes_total"] == drafted
    # Every draft also gives its own token, and the first token of each answer has no draft; only
    # tokens behind a stop token are accepted and not returned.
    assert accepted + drafts <= total - NUM_REQUESTS + 6 * NUM_REQUESTS
    assert accepted > 0.2 * total


@pytest.mark.parametrize(
    ("vllm_xargs", "words"),
    [
        ({"spec_ext.source_span": [0, 4000]}, ["spec_ext.source_span", "but the prompt has"]),
        ({"spec_ext.source_spam": [0, 4]}, ["spec_ext.source_spam", "Did you mean 'source_span'"]),
        ({"spec_ext.max_draft_tokens": "many"}, ["spec_ext.max_draft_tokens", "found 'many'"]),
        ({"spec_ext": "{broken"}, ["spec_ext", "not valid JSON"]),
        ({"spec_ext.source_text": ["a", "b"]}, ["spec_ext.source_text"]),
        ({"spec_ext.source_token_ids": [2**40]}, ["spec_ext.source_token_ids", "found token id"]),
    ],
)
def test_wrong_options_get_400_and_the_server_goes_on(
    vllm_xargs: dict[str, Any], words: list[str], server: str
) -> None:
    import httpx

    for route, body in (
        ("completions", {"prompt": "one two three"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "one two three"}]}),
        ("responses", {"input": "one two three"}),
    ):
        length = "max_output_tokens" if route == "responses" else "max_tokens"
        asked = {"model": NAME, length: 2, "temperature": 0, **body}
        url = f"{server}/v1/{route}"
        answer = httpx.post(url, json={**asked, "vllm_xargs": vllm_xargs}, timeout=60)
        assert answer.status_code == 400, answer.text
        for word in words:
            assert word in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == words[0]
        if "but the prompt has" not in words:  # that comes when the stream has begun
            streamed = {**asked, "vllm_xargs": vllm_xargs, "stream": True}
            answer = httpx.post(url, json=streamed, timeout=60)
            assert answer.status_code == 400, answer.text
            assert words[0] in answer.text
        assert httpx.post(url, json=asked, timeout=60).status_code == 200


def test_source_text_that_is_not_in_the_prompt(server: str) -> None:
    import httpx

    asked = {"model": NAME, "prompt": "one two three four", "max_tokens": 12, "temperature": 0}
    url = f"{server}/v1/completions"
    without = httpx.post(url, json=asked, timeout=60).json()["choices"][0]["text"]
    before = counters(server)["vllm:spec_decode_num_accepted_tokens_total"]
    given = {"spec_ext.source_text": without}
    answer = httpx.post(url, json={**asked, "vllm_xargs": given}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == without
    assert counters(server)["vllm:spec_decode_num_accepted_tokens_total"] > before


def test_bench_loads_a_running_server(server: str, model: str, tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="vllm bench serve needs it")
    out = tmp_path / "served.json"
    done = vllm_spec(
        *("bench", "--model", model, "--serve", f"one={server}", "--serve", f"two={server}/"),
        *("--dataset", "copy_rate:3", "--max-tokens", "12", "--repeats", "1"),
        *("--batch-size", "2", "--json", str(out)),
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "3/3" in line]
    assert len(rows) == 2, done.stdout
    one, two = json.loads(out.read_text())["passes"]
    assert one["result"]["completed"] == 3
    assert one["result"]["generated_texts"] == two["result"]["generated_texts"]
    assert one["result"]["spec_decode_num_drafts"] >= 0


def test_our_serve_command_prints_what_it_would_run(model: str) -> None:
    done = vllm_spec(
        *("serve", model, "--method", "input_copy", "--num-speculative-tokens", "6", "--dry-run"),
        *("--", *SERVER_ARGUMENTS),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"vllm serve {model} --speculative-config ")
    assert SPECULATIVE in done.stdout
