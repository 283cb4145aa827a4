# SPDX-License-Identifier: Apache-2.0
"""The script that compares a simulated cluster with real servers, without servers."""

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("httpx")

from vllm_spec_ext.bench.cluster import Arrival, Load, Served
from vllm_spec_ext.bench.prompts import Question

SCRIPT = Path(__file__).parents[3] / "scripts/cluster_check.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cluster_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_arguments_become_flags(script: ModuleType) -> None:
    given = {
        "dtype": "float32",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_num_seqs": 4,
        "speculative_config": {"method": "input_copy"},
    }
    assert script.flags(given) == [
        *("--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--max-num-seqs", "4", "--speculative-config", '{"method": "input_copy"}'),
    ]


def test_a_request_goes_where_the_fewest_are(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, int]] = []
    all_came = asyncio.Event()

    async def answer(client: Any, question: Question, most: int) -> Served:
        sent.append((str(client.base_url), most))
        if len(sent) == 6:
            all_came.set()
        if most == 50:  # until then, however slow the machine is
            await all_came.wait()
        return Served(Arrival(0.0, 3, most))

    monkeypatch.setattr(script, "answer", answer)
    arrivals = [Arrival(0.02 * i, 1, 50 if i == 0 else 5) for i in range(4)]
    questions = [Question(1, "all", ({"role": "user", "content": "Hello"},))]
    served = asyncio.run(script.drive(["http://one", "http://two"], arrivals, questions))
    assert [one.arrival.answer_tokens for one in served] == [50, 5, 5, 5]
    places = [url.split("/")[2] for url, _ in sent]
    assert places == ["one", "two", "one", "two", "two", "two"]  # one request each to begin with


def test_what_is_said(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def load(token_ms: float) -> Load:
        return Load("on", 0.5, 10.0, token_ms, token_ms, 100.0, 200.0)

    predicted, seen = ({"off": load(20.0), "on": load(ms)} for ms in (10.0, 16.0))
    script.show(0.5, predicted, seen)
    assert "gain by drafts: predicted 2.00x, seen 1.25x" in capsys.readouterr().out
