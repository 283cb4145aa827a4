# SPDX-License-Identifier: Apache-2.0
"""A step's tokens end with a stop token, in sessions whose input comes in pieces.

What is accepted behind one is no part of the answer, and vLLM's scheduler cuts it off. But it goes
on to count the KV of those tokens as the request's own (0.32 ``_update_request_with_output``, which
leaves ``num_computed_tokens`` as it is), and such a session goes on from there: with too few tokens
to read, which ends the engine, or with the KV of tokens that were cut off.
"""

from collections.abc import Sequence

from vllm_spec_ext.engine.requests.state import RequestState


def end_at_stop_tokens(new_tokens: Sequence[list[int]], states: Sequence[RequestState]) -> None:
    """Cut what a worker tells a scheduler that waits for it; one that runs ahead counts itself.

    Args:
        new_tokens: Of each request of the step; changed.
        states: Of the same requests.
    """
    for tokens, state in zip(new_tokens, states, strict=True):
        if state.is_session:
            del tokens[length_of_answer(tokens, state) :]


def length_of_answer(tokens: Sequence[int], state: RequestState) -> int:
    """How many of a step's tokens a client gets: those up to the first stop token.

    Args:
        tokens: Of a request in a step.
        state: Of that request.
    """
    ends = state.ends
    if not ends or ends.isdisjoint(tokens):
        return len(tokens)
    return next(at for at, token in enumerate(tokens, 1) if token in ends)
