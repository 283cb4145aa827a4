# SPDX-License-Identifier: Apache-2.0
"""Drawn drafts are verified with what they were drawn from; the output's distribution stays.

Two-sample chi-square tests with fixed seeds, as in test_sampled_distribution.py.
"""

from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from generation import sampling_params
from homogeneity import same_distribution_p_value
from sampling_distributions import (
    DIFFERENT,
    DISTRIBUTIONS,
    MAX_TOKENS,
    NUM_SAMPLES,
    NUM_TOKENS,
    PROMPT,
    SAME,
    Chances,
    Sample,
    first_tokens,
    of_plain_engine,
)
from test_greedy_identity import runner_of

from vllm_spec_ext.engine.drafting.scheduled_draft import ScheduledDraft
from vllm_spec_ext.engine.requests.state import RequestState
from vllm_spec_ext.engine.runner import SpecRunnerMixin
from vllm_spec_ext.engine.step import Step
from vllm_spec_ext.engine.verifying import drawn_drafts
from vllm_spec_ext.engine.verifying.verifier import Verifier
from vllm_spec_ext.options import RequestOptions

CHAIN = [-1, 0, 1]
TREE = [-1, -1, 0, 0, 1, 2]
ETA = {"eta_cutoff": 0.2}


@pytest.fixture(scope="module")
def engines(make_engine: Any) -> dict[str, Any]:
    common = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
    drawn = {"method": "drawn", "num_speculative_tokens": 8}
    eta = {"method": "fixed", "num_speculative_tokens": 16}  # eta needs the plugin; drafts nothing
    return {
        "plain": make_engine(**common),
        "eta": make_engine(**common, speculative_config=eta),
        "drawn": make_engine(**common, speculative_config=drawn),
    }


@pytest.fixture(scope="module")
def chances(engines: dict[str, Any]) -> Chances:
    return Chances(engines["plain"])


def drafting(chances: Chances, distribution: str, **options: Any) -> dict[str, Any]:
    """A draft distribution far from the target's: of the allowed tokens, the last is likeliest."""
    allowed = chances.params(distribution)["allowed_token_ids"]
    likely = [token for token in chances.tokens if token in allowed]
    weights = range(1, len(likely) + 1)
    distribution_of_draft = {
        token: w / sum(weights) for token, w in zip(likely, weights, strict=True)
    }
    return {"distribution": distribution_of_draft, "parents": TREE, **options}


@pytest.fixture(scope="module")
def sample(engines: dict[str, Any], chances: Chances) -> Sample:
    def draw(
        engine: str,
        distribution: str,
        extra: dict[str, Any] | None = None,
        num_samples: int = NUM_SAMPLES,
        **sampling: float,
    ) -> list[Hashable]:
        given = chances.params(distribution)
        given["max_tokens"] = NUM_TOKENS if engine == "plain" else MAX_TOKENS
        params = sampling_params(given, extra)
        if sampling:
            params.extra_args = {**(params.extra_args or {}), **sampling}
        return first_tokens(engines[engine], [params] * num_samples)

    return draw


@pytest.fixture(scope="module")
def plain_samples(sample: Sample) -> Callable[[str], list[Hashable]]:
    return of_plain_engine(sample)


def acceptance(engines: dict[str, Any]) -> float:
    """Accepted tokens for each draft since the last call."""
    outcomes = runner_of(engines["drawn"]).drafter._proposer.outcomes
    accepted, steps = sum(o.num_accepted for o in outcomes), len(outcomes)
    outcomes.clear()
    return accepted / max(steps, 1)


@pytest.mark.parametrize(
    ("distribution", "options"),
    [
        *((distribution, {"parents": CHAIN}) for distribution in ("temperature_1", "top_k")),
        *((distribution, {}) for distribution in DISTRIBUTIONS),
        *(
            (distribution, {"drawn": "without_replacement"})
            for distribution in ("temperature_1", "top_p")
        ),
    ],
)
def test_output_keeps_the_targets_distribution(
    distribution: str,
    options: dict[str, Any],
    engines: dict[str, Any],
    chances: Chances,
    sample: Sample,
    plain_samples: Any,
) -> None:
    acceptance(engines)
    found = sample("drawn", distribution, drafting(chances, distribution, **options))
    assert acceptance(engines) > 0.2
    assert same_distribution_p_value(plain_samples(distribution), found) > SAME


def test_distributions_raise_acceptance(
    engines: dict[str, Any], chances: Chances, sample: Sample
) -> None:
    distribution, found = "temperature_1", []
    for show_distributions in (False, True):
        acceptance(engines)
        sample(
            "drawn",
            distribution,
            drafting(chances, distribution, parents=CHAIN, show_distributions=show_distributions),
        )
        found.append(acceptance(engines))
    assert found[1] > 1.15 * found[0]


def test_with_eta(chances: Chances, sample: Sample) -> None:
    distribution = "temperature_1"
    plain = sample("eta", distribution, **ETA)
    assert same_distribution_p_value(plain, sample("plain", distribution)) < DIFFERENT
    found = sample("drawn", distribution, drafting(chances, distribution), **ETA)
    assert same_distribution_p_value(plain, found) > SAME


def test_chosen_tokens_with_a_drafters_probabilities_are_caught(
    chances: Chances, sample: Sample, plain_samples: Any
) -> None:
    """Mutation: the bias of reference codes that draft the top-k children with q (METHODS 6)."""
    distribution = "temperature_1"
    found = sample("drawn", distribution, drafting(chances, distribution, chosen=True))
    assert same_distribution_p_value(plain_samples(distribution), found) < DIFFERENT


def test_the_residual_matters(
    chances: Chances, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation: after a rejection, the token comes from the target's whole distribution."""
    original = drawn_drafts.multi_step

    def from_whole_distribution(
        p: Any, parents: Any, tokens: Any, starts: Any, q: Any, **rest: Any
    ) -> Any:
        taken = original(p, parents, tokens, starts, q, **rest)
        length = int(taken.num_accepted[0])
        node = int(taken.accepted[0, length - 1]) if length else -1
        taken.emitted[0, length] = int(torch.multinomial(p[node + 1], 1))
        return taken

    monkeypatch.setattr(drawn_drafts, "multi_step", from_whole_distribution)
    distribution = "temperature_1"
    found = sample(
        "drawn", distribution, drafting(chances, distribution, parents=CHAIN), 4 * NUM_SAMPLES
    )
    assert (
        same_distribution_p_value(sample("plain", distribution, None, 4 * NUM_SAMPLES), found)
        < DIFFERENT
    )


@pytest.mark.v1_runner
def test_vllms_own_sampler_gets_the_distributions_where_it_works(
    engines: dict[str, Any],
    chances: Chances,
    sample: Sample,
    plain_samples: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chains on a platform whose rejection sampler is right, as on GPUs."""

    def working(
        values: torch.Tensor,
        ends: torch.Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        values = torch.where(values == replace_from, replace_to, values)
        return values.repeat_interleave(torch.diff(ends, prepend=torch.zeros(1)).long())

    monkeypatch.setattr("vllm.v1.sample.rejection_sampler.expand_batch_to_tokens", working)
    runner = runner_of(engines["drawn"])
    monkeypatch.setattr(runner.verifier, "_walk_sampled_chains", False)
    handed: list[int] = []
    original = runner.rejection_sampler.forward

    def watched(metadata: Any, probs: Any, *rest: Any) -> Any:
        handed.append(0 if probs is None else len(probs))
        return original(metadata, probs, *rest)

    monkeypatch.setattr(runner.rejection_sampler, "forward", watched)
    distribution = "temperature_0.7"
    acceptance(engines)
    found = sample("drawn", distribution, drafting(chances, distribution, parents=CHAIN))
    assert acceptance(engines) > 0.2
    assert max(handed) > 0
    assert same_distribution_p_value(plain_samples(distribution), found) > SAME


def test_distributions_for_vllms_sampler_of_a_mixed_batch() -> None:
    """Drawn, placeholders, none, chosen: a placeholder takes nothing from what is behind it."""
    rows = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]])
    states = {str(i): RequestState(RequestOptions(), None, None, np.array([])) for i in range(4)}
    states["0"].draft, states["0"].probs = ScheduledDraft("0", [3, 1], None, "iid"), rows
    runner: Any = SpecRunnerMixin()
    runner.device = torch.device("cpu")
    runner.vllm_config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 4))
    drafts: list[list[int]] = [[3, 1], [-1], [], [2]]
    runner.spec_step = Step(tuple(states), drafts, states=list(states.values()))
    runner.input_batch = SimpleNamespace(
        req_ids=list(states),
        sampling_metadata=SimpleNamespace(all_greedy=False),
        temperature_cpu=np.ones(4),
    )
    runner.verifier = Verifier.__new__(Verifier)
    runner.verifier._runner = runner
    probs = runner._get_spec_decode_draft_probs(None)
    assert probs is not None
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    assert torch.equal(probs, torch.cat([rows, expected]))
    states["0"].probs = None
    assert runner._get_spec_decode_draft_probs(None) is None


def test_logprobs_are_the_targets(engines: dict[str, Any], chances: Chances) -> None:
    """What the step reports for a token is what the plain engine says of the same text."""
    torch.manual_seed(0)
    given = {**chances.params("temperature_1"), "logprobs": 2}
    params = sampling_params(given, drafting(chances, "temperature_1"))
    outputs = engines["drawn"].generate([PROMPT] * 16, params, use_tqdm=False)
    tokenizer = engines["plain"].get_tokenizer()
    prompt = tokenizer(PROMPT).input_ids
    asked = sampling_params({"max_tokens": 1, "prompt_logprobs": 1})
    for out in outputs:
        completion = out.outputs[0]
        text = {"prompt_token_ids": [*prompt, *completion.token_ids]}
        (judged,) = engines["plain"].generate([text], asked, use_tqdm=False)
        for i, token in enumerate(completion.token_ids):
            expected = judged.prompt_logprobs[len(prompt) + i][token].logprob
            assert completion.logprobs[i][token].logprob == pytest.approx(expected, abs=2e-4)


def test_a_seeded_text_does_not_depend_on_draws(engines: dict[str, Any], chances: Chances) -> None:
    """With a seed of its own a request is given the text of plain decoding."""
    extra = drafting(chances, "temperature_1")
    given = [{**chances.params("temperature_1"), "seed": seed} for seed in range(8)]
    plain = [sampling_params(one) for one in given]
    drawn = [sampling_params(one, extra) for one in given]
    texts = {
        name: [out.outputs[0].token_ids for out in engines[name].generate([PROMPT] * 8, params)]
        for name, params in (("plain", plain), ("drawn", drawn))
    }
    assert texts["drawn"] == texts["plain"]
    assert len(set(map(tuple, texts["plain"]))) > 4


def test_a_grammar_or_temperature_zero_leaves_the_distributions_unused(
    engines: dict[str, Any], chances: Chances
) -> None:
    extra = drafting(chances, "temperature_1")
    greedy = {"max_tokens": 12, "ignore_eos": True}
    plain = engines["plain"].generate([PROMPT], sampling_params(greedy), use_tqdm=False)
    found = engines["drawn"].generate([PROMPT], sampling_params(greedy, extra), use_tqdm=False)
    assert found[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
    choice = {"temperature": 1.0, "max_tokens": 20, "structured_outputs": {"choice": ["yes", "no"]}}
    runner = runner_of(engines["drawn"])
    (out,) = engines["drawn"].generate([PROMPT], sampling_params(choice, extra), use_tqdm=False)
    assert out.outputs[0].text in ("yes", "no")
    assert all(state.probs is None for state in runner.spec_states._states.values())
