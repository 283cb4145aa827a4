# SPDX-License-Identifier: Apache-2.0
"""How many tokens may be drafted for a request, by its own options; the same for every method."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_spec_ext.engine.drafting.step_drafts import StepDrafts
from vllm_spec_ext.engine.requests.state import KnownRequest
from vllm_spec_ext.options import RequestOptions


@pytest.mark.parametrize(
    ("options", "room"),
    [
        ({}, 4),
        ({"max_draft_tokens": 2}, 2),
        ({"max_draft_tokens": 9}, 4),
        ({"enabled": False}, 0),
        ({"enabled": False, "max_draft_tokens": 9}, 0),
    ],
)
def test_what_a_request_says_holds_whatever_the_method_reads(
    options: dict[str, Any], room: int
) -> None:
    params: Any = SimpleNamespace(max_tokens=50, temperature=0.0, top_k=0, top_p=1.0, seed=None)
    known = KnownRequest(np.arange(9, dtype=np.int32), 5, params)
    state: Any = SimpleNamespace(options=RequestOptions(**options), share_group=None)
    runner = SimpleNamespace(known=lambda name: known, max_model_len=100)
    drafts: Any = SimpleNamespace(_runner=runner, _unread=SimpleNamespace(pop=lambda name: []))
    assert StepDrafts.request_step(drafts, "a", state, [8], 4).room == room
