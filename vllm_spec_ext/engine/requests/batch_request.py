# SPDX-License-Identifier: Apache-2.0
"""A request as the V1 runner's batch has it."""

from typing import TYPE_CHECKING

import numpy as np

from vllm_spec_ext.engine.requests.state import KnownRequest

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch


def known_request(batch: "InputBatch", request: "CachedRequestState") -> KnownRequest:
    """What is verified of a request of the batch.

    In the place of embeddings vLLM leaves what another request said in this row before (0.32
    ``InputBatch.add_request``), or an id that the vocabulary does not have: here it is 0.
    """
    row = batch.req_id_to_index[request.req_id]
    end = batch.num_tokens_no_spec[row]
    tokens = batch.token_ids_cpu[row, :end]
    if request.prompt_embeds is not None:
        tokens = np.where(batch.is_token_ids[row, :end], tokens, 0)
    params = request.sampling_params
    assert params is not None
    return KnownRequest(tokens, int(batch.num_prompt_tokens[row]), params)
