# SPDX-License-Identifier: Apache-2.0
"""A step's tokens end with a stop token, as they do without drafts.

What is accepted behind one is no part of the answer, and vLLM's scheduler cuts it off. But it goes
on to count the KV of those tokens as the request's own (0.32 ``_update_request_with_output``, which
leaves ``num_computed_tokens`` as it is), and a session whose input is streamed goes on from there:
with too few tokens to read, which ends the engine, or with the KV of tokens that were cut off.
"""

from collections.abc import Callable

from vllm.v1.outputs import ModelRunnerOutput

from vllm_spec_ext.engine.requests.state import KnownRequest


def end_at_stop_tokens(output: object, known: Callable[[str], KnownRequest]) -> None:
    """Cut what a worker tells a scheduler that waits for it; one that runs ahead counts itself.

    Args:
        output: ``ModelRunnerOutput``; anything else is left as it is.
        known: Gives a request of the batch.
    """
    if not isinstance(output, ModelRunnerOutput):
        return
    for request_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=False):
        if len(tokens) < 2:
            continue
        params = known(request_id).params
        ends = {params.eos_token_id, *(params.stop_token_ids or ())}
        for count, token in enumerate(tokens, 1):
            if token in ends:
                del tokens[count:]
                break
