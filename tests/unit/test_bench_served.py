# SPDX-License-Identifier: Apache-2.0
"""Load tests of servers: the command that is run, the table, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from vllm_spec_ext.bench.served import Load, Pass, command, served_model, table
from vllm_spec_ext.bench.settings import merge, parse_rates, parse_servers
from vllm_spec_ext.errors import SpecExtError


def settings(**changes: Any) -> Any:
    servers = {"plain": "http://a:1/", "ours": "http://b:2"}
    return merge({"model": "m", "servers": servers, **changes}, {})


def result(throughput: float, *texts: str, **more: Any) -> dict[str, Any]:
    times = {"median_ttft_ms": 10.0, "p99_ttft_ms": 20.0, "median_tpot_ms": 5.0, "p99_tpot_ms": 6.0}
    return {
        **times,
        "output_throughput": throughput,
        "request_throughput": throughput / 10,
        "failed": 0,
        "generated_texts": list(texts),
        **more,
    }


def test_command_carries_the_settings() -> None:
    given = settings(max_tokens=9, temperature=0.5, raw=True)
    words = command(given, "plain", Load(8, 0.0), Path("p.jsonl"), 3, Path("d/r.json"))
    assert {
        "--base-url=http://a:1",
        "--num-prompts=3",
        "--custom-output-len=9",
        "--max-concurrency=8",
        "--request-rate=inf",
        "--temperature=0.5",
        "--result-dir=d",
        "--result-filename=r.json",
        "--skip-chat-template",
    } <= set(words)
    later = command(given, "ours", Load(8, 2.5), Path("p"), 3, Path("r"))
    assert {"--base-url=http://b:2", "--request-rate=2.5"} <= set(later)


def test_table_compares_with_the_first_server_in_the_same_repeat() -> None:
    load = Load(4, 2.0)
    passes = [
        Pass("plain", load, 0, result(10.0, "a", "b")),
        Pass("ours", load, 0, result(15.0, "a", "b", spec_decode_acceptance_length=1.7)),
        Pass("ours", load, 1, result(30.0, "a", "x", spec_decode_acceptance_length=1.9)),
        Pass("plain", load, 1, result(15.0, "a", "b")),
    ]
    _, (plain, ours) = table(passes)
    assert plain[:2] == ["plain", "4, 2/s"]
    assert plain[4] == "1.00 [1.00-1.00]x"
    assert ours[4] == "1.75 [1.50-2.00]x"
    assert ours[7:] == ["1.80", "0", "3/4"]


def test_flags() -> None:
    assert parse_rates("0,2.5") == [0.0, 2.5]
    assert parse_servers(["a=http://x:1"]) == {"a": "http://x:1"}
    for wrong in (["http://x"], ["a=x:1"], ["=http://x"]):
        with pytest.raises(SpecExtError, match="expected NAME=http"):
            parse_servers(wrong)
    with pytest.raises(SpecExtError, match="are not numbers"):
        parse_rates("fast")
    with pytest.raises(SpecExtError, match="negative"):
        settings(request_rate=[-1.0])


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(SpecExtError, match="server 'ours' does not answer"):
        served_model("ours", "http://127.0.0.1:9")
