# SPDX-License-Identifier: Apache-2.0
"""A request as the V1 runner knows it, of what stands in vLLM's batch."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm_spec_ext.engine.requests.batch_request import known_request


@pytest.mark.parametrize("prompt_embeds", [None, object()])
def test_what_another_request_said_in_the_row_is_not_shown(prompt_embeds: object) -> None:
    """vLLM writes no ids where a prompt is embeddings, and leaves what stood there."""
    is_given = np.array([[False, False, True, True, True]])
    batch: Any = SimpleNamespace(
        req_id_to_index={"b": 0},
        token_ids_cpu=np.array([[71, 72, 5, 6, 99]], np.int32),
        is_token_ids=is_given | (prompt_embeds is None),
        num_tokens_no_spec=np.array([4]),
        num_prompt_tokens=np.array([3]),
    )
    params = object()
    request: Any = SimpleNamespace(req_id="b", prompt_embeds=prompt_embeds, sampling_params=params)
    known = known_request(batch, request)
    expected = [71, 72, 5, 6] if prompt_embeds is None else [0, 0, 5, 6]
    assert known.token_ids.tolist() == expected
    assert (known.num_prompt_tokens, known.params) == (3, params)
