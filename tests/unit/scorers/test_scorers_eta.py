# SPDX-License-Identifier: Apache-2.0
"""Eta sampling against its definition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import parse_options
from vllm_spec_ext.scorers.eta import _cut, apply_eta, eta_parameters
from vllm_spec_ext.scorers.options import EtaOptions


def reference(row: list[float], epsilon: float, alpha: float) -> list[bool]:
    """Which tokens stay, in double precision; None of the cases sits on the threshold."""
    best = max(row)
    weights = [math.exp(x - best) for x in row]
    p = [w / sum(weights) for w in weights]
    entropy = -sum(x * math.log(x) for x in p if x > 0)
    eta = min(epsilon, alpha * math.exp(-entropy))
    return [epsilon == 0 or x >= eta or x == max(p) for x in p]


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32), flat=st.sampled_from([0.0, 0.5, 3.0, 40.0]))
def test_eta_equals_reference(seed: int, flat: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 30, generator=generator) * flat
    logits[torch.rand(6, 30, generator=generator) < 0.3] = -torch.inf  # after top-k
    logits[:, 3] = 0.5
    epsilon = torch.tensor([0.0, 0.0009, 0.02, 0.1, 0.5, 0.02])
    alpha = torch.tensor([1.0, 0.0, 0.0, 0.3, 5.0, 1e-3])
    expected = []
    for row, e, a in zip(logits.tolist(), epsilon.tolist(), alpha.tolist(), strict=True):
        expected.append(reference(row, e, a if a > 0 else math.sqrt(e)))
    kept = torch.tensor(expected) & (logits > -torch.inf)
    found = apply_eta(logits.clone(), epsilon, alpha)
    assert torch.equal(found > -torch.inf, kept)
    assert torch.equal(found[kept], logits[kept])
    assert torch.equal(found.argmax(1), logits.argmax(1))
    other = logits.clone()
    _cut(other, epsilon, torch.where(alpha > 0, alpha, epsilon.sqrt()))
    assert torch.equal(other, found)
    default = apply_eta(logits.clone(), epsilon)
    assert torch.equal(default, apply_eta(logits.clone(), epsilon, epsilon.sqrt()))


def test_what_is_left_is_renormalised_by_the_softmax() -> None:
    p = torch.tensor([[0.6, 0.3, 0.09, 0.01]])
    found = apply_eta(p.log(), torch.tensor([0.05]), torch.tensor([10.0])).softmax(1)
    assert found[0].tolist() == pytest.approx([0.6 / 0.99, 0.3 / 0.99, 0.09 / 0.99, 0.0])


def test_parameters_follow_the_rows_and_spare_greedy_requests() -> None:
    some = EtaOptions(epsilon=0.25, alpha=0.5)
    epsilon, alpha = eta_parameters(
        [some, None, some, EtaOptions(epsilon=0.5)], [2, 1, 1, 0], [False, False, True, False]
    )
    assert epsilon.tolist() == [0.25, 0.25, 0.0, 0.0]
    assert alpha.tolist() == [0.5, 0.5, 0.0, 0.5]
    with pytest.raises(SpecExtError, match="epsilon"):
        parse_options(EtaOptions, {"epsilon": 1.5}, "eta")
