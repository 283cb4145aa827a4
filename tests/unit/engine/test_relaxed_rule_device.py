# SPDX-License-Identifier: Apache-2.0
"""A rule's tensors live where the logits do; torch's meta device refuses to mix, as a GPU would."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm_spec_ext.engine.requests.state import RequestState
from vllm_spec_ext.engine.starting.spec_config import MethodSettings
from vllm_spec_ext.engine.verifying.draft_batch import DraftBatch
from vllm_spec_ext.engine.verifying.relaxed_rule import RelaxedRule
from vllm_spec_ext.options import MethodOptions, RequestOptions
from vllm_spec_ext.scorers.narrow import narrow
from vllm_spec_ext.scorers.parse import parse_rule

RULES: list[dict[str, Any]] = [
    {"type": "top_k", "k": 3},
    {"type": "distance", "epsilon": 2},
    {"type": "min_block", "length": 3},
    {"type": "tolerance", "beta": 3, "tau": 1.0},
    {"type": "any_of", "rules": [{"type": "min_block", "length": 2}, {"type": "top_k", "k": 2}]},
]


@pytest.mark.parametrize("given", RULES, ids=lambda rule: rule["type"])
def test_requests_with_their_own_rule(given: dict[str, Any]) -> None:
    rule = parse_rule(given)
    settings = MethodSettings(method="input_copy", options=MethodOptions(), rule=rule)
    batch = DraftBatch.of([[1, 2, 3], [4], []], [[-1, 0, -1], None, None])
    states = [
        RequestState(RequestOptions(), own, None, np.array([0]))
        for own in (narrow(rule, "exact"), None, None)
    ]
    device = torch.device("meta")
    rule_of_step = RelaxedRule(settings, 50).of_step(batch, states, [False, True, True], device)
    tolerated, logits = rule_of_step(torch.empty(len(batch.request_of_row), 50, device=device))
    assert (tolerated.device, logits.device) == (device, device)
    assert tolerated.shape == logits.shape == (4,)
