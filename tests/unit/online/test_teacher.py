# SPDX-License-Identifier: Apache-2.0
"""What drafts are taught: the distribution that the request draws from, not the model's own."""

from typing import Any

import numpy as np
import pytest
import torch

from vllm_spec_ext.online.divergences import outcomes
from vllm_spec_ext.online.teacher import as_drawn
from vllm_spec_ext.online.trace import Trace, pack, unpack


def trace(temperature: float, **changes: Any) -> Trace:
    given: dict[str, Any] = {
        "token_ids": np.array([7, 3, 5, 2], np.int32),
        "rows": np.array([0, 1, 2], np.int32),
        # The text says the likeliest token, the second one, and one that is not listed.
        "top_tokens": np.array([[3, 1, 4], [1, 5, 4], [6, 1, 4]], np.int32),
        "top_probs": np.array([[0.5, 0.3, 0.1], [0.4, 0.4, 0.1], [0.6, 0.2, 0.1]], np.float32),
        "tails": np.full(3, 0.1, np.float32),
        "starts": np.array([0], np.int32),
        "failed_at": np.array([1], np.int32),
        "chances": np.ones(1, np.float32),
        "states": torch.zeros(1, 0, dtype=torch.bfloat16),
        "temperature": temperature,
    }
    return Trace(**{**given, **changes})


def test_without_a_temperature_the_text_is_right() -> None:
    found = as_drawn(trace(0.0))
    assert found.top_tokens[:, 0].tolist() == [3, 5, 2]
    assert found.top_probs.tolist() == [[1.0, 0.0, 0.0]] * 3
    assert found.tails.tolist() == [0.0] * 3
    # Each token once: what the drafter gives to the others counts once, too.
    assert [sorted(row) for row in found.top_tokens.tolist()] == [[1, 3, 4], [1, 4, 5], [1, 2, 6]]
    log_q = torch.full((3, 8), -np.log(8.0))
    places = torch.from_numpy(found.top_tokens.astype(np.int64))
    teacher = torch.from_numpy(found.top_probs), torch.from_numpy(found.tails)
    _, log_found, _ = outcomes(log_q, places, *teacher)
    torch.testing.assert_close(log_found.exp().sum(1), torch.ones(3))


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_a_temperature_sharpens_or_flattens(temperature: float) -> None:
    before = trace(temperature)
    found = as_drawn(before)
    whole = np.concatenate([found.top_probs, found.tails[:, None]], axis=1)
    np.testing.assert_allclose(whole.sum(1), 1.0, rtol=1e-6)
    ratio = found.top_probs[:, 0] / found.top_probs[:, 2]
    expected = (before.top_probs[:, 0] / before.top_probs[:, 2]) ** (1.0 / temperature)
    np.testing.assert_allclose(ratio, expected, rtol=1e-5)
    assert (found.top_tokens == before.top_tokens).all()


def test_at_a_temperature_of_one_nothing_changes() -> None:
    one = trace(1.0)
    assert as_drawn(one) is one


def test_the_temperature_is_kept_on_disk() -> None:
    found = unpack(pack([trace(0.0), trace(0.7), trace(1.0)]))
    assert [round(one.temperature, 4) for one in found] == [0.0, 0.7, 1.0]
    assert found[0].states.shape == (1, 0)
