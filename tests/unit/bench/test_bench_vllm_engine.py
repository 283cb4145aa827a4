# SPDX-License-Identifier: Apache-2.0
"""What the benchmark's engine does with the answers of vLLM's reset calls."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_spec_ext.bench.methods import parse_method
from vllm_spec_ext.bench.vllm_engine import VllmEngine


class FakeLLM:
    """Answers worker calls by name; an exception is raised, as vLLM's engine core hands it on."""

    def __init__(self, answers: dict[str, object], cache_is_reset: bool = True) -> None:
        self.answers = answers
        self.cache_is_reset = cache_is_reset
        self.asked: list[str] = []

    def reset_prefix_cache(self) -> bool:
        return self.cache_is_reset

    def collective_rpc(self, name: str) -> list[object]:
        self.asked.append(name)
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return [answer]


def _engine(method: str, llm: FakeLLM) -> VllmEngine:
    engine = VllmEngine.__new__(VllmEngine)
    engine.method, engine.llm = parse_method(method), llm
    return engine


def _failure(text: str) -> Exception:
    return Exception(f"Call to collective_rpc method failed: {text}")


def test_forgetting_asks_the_worker_that_learns() -> None:
    asked = {
        "plain": [],
        "ngram": ["spec_bench_propose_us"],
        "input_copy": ["spec_ext_reset", "spec_ext_stats"],
        "suffix": ["spec_bench_forget", "spec_bench_propose_us"],
    }
    for method, names in asked.items():
        answers: dict[str, Any] = {"spec_ext_reset": None, "spec_ext_stats": {}}
        answers |= {"spec_bench_forget": True, "spec_bench_propose_us": []}
        llm = FakeLLM(answers)
        _engine(method, llm).forget()
        assert llm.asked == names


@pytest.mark.parametrize(
    ("method", "answers", "message"),
    [
        (
            "input_copy",
            {"spec_ext_reset": _failure("spec_ext_reset: out of memory")},
            "'input_copy' failed to forget .*out of memory",
        ),
        (
            "input_copy",
            {"spec_ext_reset": _failure("Method 'spec_ext_reset' is not implemented.")},
            "'input_copy' failed to forget",
        ),
        ("suffix", {"spec_bench_forget": False}, "'suffix' found nothing to forget"),
        ("suffix", {"spec_bench_forget": _failure("no")}, "'suffix' failed to forget"),
    ],
)
def test_a_pass_never_starts_warm(method: str, answers: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        _engine(method, FakeLLM(answers)).forget()


def test_a_prefix_cache_in_use_is_no_clean_start() -> None:
    with pytest.raises(RuntimeError, match="did not reset its prefix cache"):
        _engine("plain", FakeLLM({}, cache_is_reset=False)).forget()


def test_only_a_worker_without_drafter_times_has_none() -> None:
    missing = _failure("Method 'spec_ext_stats' is not implemented.")
    assert _engine("input_copy", FakeLLM({"spec_ext_stats": missing})).propose_us() is None
    for broken in (_failure("spec_ext_stats: out of memory"), AttributeError("propose_us")):
        with pytest.raises(type(broken)):
            _engine("input_copy", FakeLLM({"spec_ext_stats": broken})).propose_us()


def test_times_of_vllms_drafters_come_from_its_worker() -> None:
    answers: dict[str, object] = {"spec_bench_propose_us": [1.0, 2.0]}
    assert _engine("ngram", FakeLLM(answers)).propose_us() == (1.0, 2.0)
    assert _engine("ngram", FakeLLM({"spec_bench_propose_us": None})).propose_us() is None
    assert _engine("plain", FakeLLM({})).propose_us() is None


class ScoringLLM:
    """Gives token ``i`` of a text the log-probability ``-i``; refuses as vLLM does."""

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len

    def generate(self, prompt: Any, params: Any, use_tqdm: bool) -> list[Any]:
        ids = prompt["prompt_token_ids"]
        if len(ids) + params.max_tokens > self.max_model_len:
            raise ValueError("requested output tokens (at least 1) is longer than the maximum")
        rows = [{token: SimpleNamespace(logprob=-float(i))} for i, token in enumerate(ids)]
        new = SimpleNamespace(token_ids=[9], logprobs=None)
        if params.allowed_token_ids:
            new.token_ids = params.allowed_token_ids
        if params.logprobs is not None:
            new.logprobs = [{new.token_ids[0]: SimpleNamespace(logprob=-float(len(ids)))}]
        return [SimpleNamespace(prompt_logprobs=[None, *rows[1:]], outputs=[new])]


@pytest.mark.parametrize("max_model_len", [7, 8, 100])
def test_an_answer_that_fills_the_model_is_scored_to_its_end(max_model_len: int) -> None:
    pytest.importorskip("vllm")
    engine: Any = VllmEngine.__new__(VllmEngine)
    engine.llm, engine.max_model_len = ScoringLLM(max_model_len), max_model_len
    assert engine.log_prob([5, 6, 7, 8], [1, 2, 3]) == -(4 + 5 + 6)
