# SPDX-License-Identifier: Apache-2.0
"""With temperature, drafted requests follow the distribution of plain sampling; known bugs do not.

Two-sample chi-square tests on the joint distribution of the first tokens, with fixed seeds. The
first token comes from the prefill; the ones behind it are verified drafts.
"""

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest
import torch
from generation import ALWAYS_DRAFT, sampling_params
from homogeneity import same_distribution_p_value
from sampling_distributions import (
    DIFFERENT,
    DISTRIBUTIONS,
    NUM_SAMPLES,
    NUM_TOKENS,
    SAME,
    Chances,
    Sample,
    first_tokens,
    of_plain_engine,
)
from test_greedy_identity import runner_of
from vllm.v1.outputs import SamplerOutput

from vllm_spec_ext.engine.starting import platform_bugs
from vllm_spec_ext.engine.verifying import verifier as verifier_module
from vllm_spec_ext.engine.verifying.node_sampling import expand_metadata
from vllm_spec_ext.scorers.walk.tree import Walk


@pytest.fixture(scope="module")
def engines(make_engine: Any) -> dict[str, Any]:
    common = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
    fixed = {"method": "fixed", "num_speculative_tokens": 16}
    copy = {"method": "input_copy", "num_speculative_tokens": 8, **ALWAYS_DRAFT}
    ngrams = {"method": "adaptive_ngram", "overlay": "both", "min_confidence": 0.0, **ALWAYS_DRAFT}
    tree = {**ngrams, "num_speculative_tokens": 5}
    chain = {**ngrams, "num_speculative_tokens": 3, "tree": False}
    auto = {"method": "auto", "num_speculative_tokens": 6, **ALWAYS_DRAFT}
    return {
        "plain": make_engine(**common),
        "fixed": make_engine(**common, speculative_config=fixed),
        "input_copy": make_engine(**common, speculative_config=copy),
        "adaptive_ngram_tree": make_engine(**common, speculative_config=tree),
        "adaptive_ngram_chain": make_engine(**common, speculative_config=chain),
        "auto": make_engine(**common, speculative_config=auto),
    }


@pytest.fixture(scope="module")
def chances(engines: dict[str, Any]) -> Chances:
    return Chances(engines["plain"])


@pytest.fixture(scope="module")
def sample(engines: dict[str, Any], chances: Chances) -> Sample:
    def draw(
        engine: str, distribution: str, extra: dict[str, Any] | None = None, seed: int = 0
    ) -> list[Hashable]:
        given = chances.params(distribution)
        own = given.pop("seed", None)
        if engine == "plain":
            given["max_tokens"] = NUM_TOKENS
        params = [
            sampling_params(
                given if own is None else {**given, "seed": own + i + 10_000 * seed}, extra
            )
            for i in range(NUM_SAMPLES)
        ]
        return first_tokens(engines[engine], params, seed)

    return draw


@pytest.fixture(scope="module")
def plain_samples(sample: Sample) -> Callable[[str], list[Hashable]]:
    return of_plain_engine(sample)


def draft_of(kind: str, chances: Chances, distribution: str) -> dict[str, Any]:
    """Request options that make the fixed drafter draft a tree or a chain."""
    allowed = chances.params(distribution).get("allowed_token_ids")
    likely = [t for t in chances.tokens if allowed is None or t in allowed]
    if kind == "unlikely_chain":
        worst = likely[-1]
        return {"tokens": [worst, worst, likely[0], worst]}
    first, second = likely[:2]
    # Two children at the root and below, the likelier one not always first.
    return {"tokens": [second, first, first, second, first], "parents": [-1, 0, -1, 2, 2]}


def accepted_by(engines: dict[str, Any]) -> tuple[int, int]:
    outcomes = runner_of(engines["fixed"]).drafter._proposer.outcomes
    result = sum(o.num_accepted for o in outcomes), sum(o.num_drafted for o in outcomes)
    outcomes.clear()
    return result


@pytest.mark.parametrize("distribution", ["temperature_0.7", "top_p"])
def test_plain_sampling_agrees_with_itself(
    distribution: str, sample: Sample, plain_samples: Any
) -> None:
    """The yardstick: other seeds, the same distribution; and there is more than one outcome."""
    assert len(set(plain_samples(distribution))) > 10
    assert (
        same_distribution_p_value(
            plain_samples(distribution), sample("plain", distribution, seed=1)
        )
        > SAME
    )


@pytest.mark.parametrize(
    ("kind", "distribution"),
    [
        *(("tree", distribution) for distribution in DISTRIBUTIONS),
        ("unlikely_chain", "temperature_1"),
        ("unlikely_chain", "top_k"),
    ],
)
def test_drafts_do_not_change_the_distribution(
    kind: str,
    distribution: str,
    engines: dict[str, Any],
    chances: Chances,
    sample: Sample,
    plain_samples: Any,
) -> None:
    accepted_by(engines)
    found = sample("fixed", distribution, draft_of(kind, chances, distribution))
    accepted, drafted = accepted_by(engines)
    assert drafted > NUM_SAMPLES
    assert accepted > (0.3 * NUM_SAMPLES if kind == "tree" else 50)
    assert same_distribution_p_value(plain_samples(distribution), found) > SAME


@pytest.mark.parametrize("distribution", ["temperature_1", "top_k", "top_p"])
def test_input_copy_does_not_change_the_distribution(
    distribution: str, chances: Chances, sample: Sample, plain_samples: Any
) -> None:
    allowed = chances.params(distribution).get("allowed_token_ids") or chances.tokens[:3]
    source = [allowed[i % len(allowed)] for i in (0, 1, 2, 0, 0, 1, 1, 2, 2, 0, 2, 1)]
    found = sample("input_copy", distribution, {"source_token_ids": source})
    assert same_distribution_p_value(plain_samples(distribution), found) > SAME


@pytest.mark.parametrize(
    ("name", "distribution"),
    [
        ("adaptive_ngram_tree", "temperature_1"),
        ("adaptive_ngram_tree", "top_p"),
        ("adaptive_ngram_chain", "temperature_0.7"),
        ("adaptive_ngram_chain", "top_k"),
        ("auto", "temperature_1"),
        ("auto", "top_p"),
    ],
)
def test_methods_that_learn_from_samples_do_not_change_the_distribution(
    name: str,
    distribution: str,
    engines: dict[str, Any],
    sample: Sample,
    plain_samples: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They draft what other samples of the same prompt said, which sampling makes likely."""
    proposer = runner_of(engines[name]).drafter._proposer
    observe, counts = proposer.observe, [0, 0]

    def watched(outcomes: Any) -> None:
        for outcome in outcomes:
            counts[0] += outcome.num_accepted
            counts[1] += outcome.num_drafted
        observe(outcomes)

    monkeypatch.setattr(proposer, "observe", watched)
    found = sample(name, distribution)
    assert counts[1] > counts[0] > 0.2 * NUM_SAMPLES
    assert same_distribution_p_value(plain_samples(distribution), found) > SAME


def resample_after_mismatch(
    batch: Any,
    logits: Any,
    metadata: Any,
    sampler: Any,
    rule: Any = None,
    distributions: Any = None,
) -> Any:
    """The bug of reference codes: the draw that matched no child is thrown away."""
    expanded = expand_metadata(metadata, batch)
    draws = [_draw(sampler, logits, expanded) for _ in range(2)]
    return _walk(batch, logits, lambda row, _: int(draws[0][row]), draws[1])


def draw_once_per_path(
    batch: Any,
    logits: Any,
    metadata: Any,
    sampler: Any,
    rule: Any = None,
    distributions: Any = None,
) -> Any:
    """The other bug: every branch is tried with a draw of its own."""
    expanded = expand_metadata(metadata, batch)
    draws = [_draw(sampler, logits, expanded) for _ in range(4)]
    return _walk(batch, logits, lambda row, attempt: int(draws[attempt][row]), draws[3])


def _draw(sampler: Any, logits: Any, metadata: Any) -> np.ndarray:
    sampled = sampler(logits=logits.clone(), sampling_metadata=metadata)
    return sampled.sampled_token_ids.squeeze(-1).numpy()


def _walk(batch: Any, logits: Any, drawn: Callable[[int, int], int], last: np.ndarray) -> Any:
    """Walk with a draw for each attempt; the emitted token at the end is drawn anew."""
    width = max(np.diff(batch.node_starts), default=0) + 1
    emitted = np.full((batch.num_requests, width), -1, np.int64)
    accepted = np.full((batch.num_requests, width), -1, np.int64)
    num_accepted = np.zeros(batch.num_requests, np.int64)
    for request, root in enumerate(batch.root_rows.tolist()):
        first, end = batch.node_starts[request : request + 2].tolist()
        node = -1
        while True:
            row = root + 1 + node
            children = [i - first for i in range(first, end) if batch.parents[i] == node]
            for attempt, child in enumerate(children):
                if drawn(row, attempt) == batch.tokens[first + child]:
                    break
            else:
                emitted[request, num_accepted[request]] = int(last[row])
                break
            emitted[request, num_accepted[request]] = batch.tokens[first + child]
            accepted[request, num_accepted[request]] = child
            num_accepted[request] += 1
            node = child
    output = SamplerOutput(torch.from_numpy(emitted.astype(np.int32)), None)
    return output, Walk(accepted, emitted, num_accepted)


@pytest.mark.v1_runner
@pytest.mark.parametrize(
    ("bug", "distribution"),
    [
        (resample_after_mismatch, "temperature_1"),
        (resample_after_mismatch, "top_k"),
        (draw_once_per_path, "temperature_1"),
    ],
)
def test_known_bugs_are_caught(
    bug: Any,
    distribution: str,
    chances: Chances,
    sample: Sample,
    plain_samples: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutation: the tests above are strong enough to reject what must be rejected."""
    monkeypatch.setattr(verifier_module, "verify", bug)
    # Twice as many samples as above: what is drawn here differs with what was drawn before.
    found = []
    for _ in range(2):
        found += sample("fixed", distribution, draft_of("tree", chances, distribution))
    assert same_distribution_p_value(plain_samples(distribution), found) < DIFFERENT


@pytest.mark.v1_runner
def test_probe_tells_a_working_sampler_from_a_broken_one(
    engines: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    broken = platform_bugs.chain_sampling_is_broken(cpu)
    assert runner_of(engines["fixed"]).verifier._walk_sampled_chains is broken
    name = "vllm.v1.sample.rejection_sampler.expand_batch_to_tokens"

    def working(values: torch.Tensor, ends: torch.Tensor, num_tokens: int) -> torch.Tensor:
        return values.repeat_interleave(torch.diff(ends, prepend=torch.zeros(1)).long())

    monkeypatch.setattr(name, working)
    assert not platform_bugs.chain_sampling_is_broken(cpu)
    monkeypatch.setattr(name, lambda values, ends, num_tokens: torch.zeros(num_tokens))
    assert platform_bugs.chain_sampling_is_broken(cpu)
