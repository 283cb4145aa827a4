# SPDX-License-Identifier: Apache-2.0
"""`vllm-spec plan cluster` beside real servers: what was predicted, and what was seen.

    export OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind
    taskset -c 0 vllm-spec plan --method 'input_copy={"adaptive_length": false}' \\
        --batch-size 1,2,4 --json plan.json
    python scripts/cluster_check.py plan.json --rate 0.25,0.5,1 --requests 40

As many `vllm serve` as --replicas, each bound to a core of its own, answer the questions of `plan`,
which come by chance; a request goes to the server with the fewest. First without drafts, then with
those that were planned. The simulation gets the same requests, with the prompts and answers as
long as they were. Client and API servers take their part of the cores, which it knows nothing of.
"""

import argparse
import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai

from vllm_spec_ext.bench import cluster
from vllm_spec_ext.bench.cluster import Arrival, Cluster, Costs, Load, Mode, Served
from vllm_spec_ext.bench.prompts import Question
from vllm_spec_ext.bench.settings import merge
from vllm_spec_ext.cli.bench import demo_model

START_S = 300
NAME = "target"


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of ``LLM`` as those of ``vllm serve``."""
    words: list[str] = []
    for key, value in arguments.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


@contextmanager
def servers(model: str, arguments: Mapping[str, Any], number: int) -> Iterator[list[str]]:
    """Their addresses; each has the next of this machine's cores."""
    cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
    started, urls = [], []
    try:
        for _ in range(number):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            words = ["taskset", "-c", str(next(cores)), sys.executable, "-m"]
            words += ["vllm.entrypoints.cli.main", "serve", model, "--port", str(port)]
            words += ["--host", "127.0.0.1", "--served-model-name", NAME, *flags(arguments)]
            quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_KVCACHE_SPACE": "1"}
            started.append(
                subprocess.Popen(words, env={**os.environ, **quiet}, start_new_session=True)
            )
            urls.append(f"http://127.0.0.1:{port}")
        for url, server in zip(urls, started, strict=True):
            _wait(url, server)
        yield urls
    finally:
        for server in started:
            server.send_signal(signal.SIGINT)
        for server in started:
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)


def _wait(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < end:
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"{url} did not come up within {START_S} s")


async def answer(client: openai.AsyncOpenAI, question: Question, most: int) -> Served:
    """One request; times of ``time.perf_counter``."""
    served = Served(Arrival(time.perf_counter(), 1, 1))
    messages: Any = list(question.opening)
    stream = await client.chat.completions.create(
        model=NAME,
        messages=messages,
        temperature=0.0,
        max_tokens=most,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content and not served.first_at:
            served.first_at = time.perf_counter()
        if chunk.usage is not None:
            usage = chunk.usage
            length = (usage.prompt_tokens, max(1, usage.completion_tokens))
            served.arrival = Arrival(served.arrival.at, *length)
    served.done_at = time.perf_counter()
    served.first_at = served.first_at or served.done_at
    return served


async def drive(
    urls: Sequence[str], arrivals: Sequence[Arrival], questions: Sequence[Question]
) -> list[Served]:
    """Send the requests when they come, each to the server that has the fewest."""
    clients = [openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", timeout=600) for url in urls]
    loads = [0] * len(urls)
    for client in clients:  # a first request takes longer
        await answer(client, questions[0], 8)
    start = time.perf_counter()

    async def come(number: int, arrival: Arrival) -> Served:
        await asyncio.sleep(max(0.0, start + arrival.at - time.perf_counter()))
        place = loads.index(min(loads))
        loads[place] += 1
        question = questions[number % len(questions)]
        served = await answer(clients[place], question, arrival.answer_tokens)
        loads[place] -= 1
        return served

    return await asyncio.gather(*(come(*one) for one in enumerate(arrivals)))


def show(rate: float, predicted: Mapping[Mode, Load], seen: Mapping[Mode, Load]) -> None:
    """A line for each mode, and what drafts gain."""
    for mode in predicted:
        for what, load in (("predicted", predicted[mode]), ("seen", seen[mode])):
            print(
                f"{rate:6.2f}/s  drafts {mode:3}  {what:9}  ms a token {load.token_ms:7.1f}"
                f"  first token ms {load.wait_ms:8.0f}  tokens/s {load.tokens_per_s:6.1f}"
            )
    gains = [loads["off"].token_ms / loads["on"].token_ms for loads in (predicted, seen)]
    print(f"{rate:6.2f}/s  gain by drafts: predicted {gains[0]:.2f}x, seen {gains[1]:.2f}x")


def main() -> None:
    """Run the servers twice, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("planned", type=Path, help="what `plan --json` wrote, of one method")
    parser.add_argument("--model", help="default: the demo model, as of `plan`")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rate", default="0.25,0.5,1", help="requests a second")
    parser.add_argument("--requests", type=int, default=40, help="of each rate")
    parser.add_argument("--answer-tokens", type=int, default=96, help="at most, as of `plan`")
    asked = parser.parse_args()
    costs = Costs.read(asked.planned, None, None)
    (config,) = {
        json.dumps(row["config"]) for row in json.loads(asked.planned.read_text())["gains"]
    }
    settings = merge({"limit": 12}, {"model": asked.model or "demo"})
    questions = settings.questions()
    model = asked.model or demo_model()
    shape = Cluster(costs, "off", asked.replicas, costs.most_requests)
    rates = [float(part) for part in asked.rate.split(",")]
    common = {
        "dtype": settings.dtype,
        "enforce_eager": True,
        "max_num_seqs": costs.most_requests,
        "max_num_batched_tokens": shape.max_num_batched_tokens,
        "max_model_len": 2048,
        "enable_prefix_caching": False,
        **settings.engine_args,
    }
    seen: dict[Mode, list[list[Served]]] = {"off": [], "on": []}
    for mode, found in seen.items():
        more = {} if mode == "off" else {"speculative_config": json.loads(config)}
        with servers(model, {**common, **more}, asked.replicas) as urls:
            for rate in rates:
                arrivals = cluster.poisson(rate, asked.requests, 1, 1)
                wanted = [replace(one, answer_tokens=asked.answer_tokens) for one in arrivals]
                found.append(asyncio.run(drive(urls, wanted, questions)))
    for number, rate in enumerate(rates):
        requests = [one.arrival for one in seen["off"][number]]
        first = requests[0].at
        requests = [replace(one, at=one.at - first) for one in requests]
        predicted = {
            mode: cluster.summarise(cluster.serve(requests, replace(shape, mode=mode)), mode)
            for mode in seen
        }
        show(rate, predicted, {mode: cluster.summarise(seen[mode][number], mode) for mode in seen})


if __name__ == "__main__":
    main()
