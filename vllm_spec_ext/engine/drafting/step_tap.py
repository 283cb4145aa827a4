# SPDX-License-Identifier: Apache-2.0
"""From a step of the engine to what the tap of online distillation records; on rank 0 only."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from vllm_spec_ext.engine.requests.state import RequestState
from vllm_spec_ext.engine.step import Step
from vllm_spec_ext.online.tap import Seen, Tap
from vllm_spec_ext.proposers.base import RequestStep


def wants_any(tap: Tap, request_ids: Sequence[str], states: Iterable[RequestState]) -> bool:
    """Whether any request of a batch is recorded."""
    return any(
        tap.wants(request_id, state.share_group, state.options.remember)
        for request_id, state in zip(request_ids, states, strict=True)
    )


def record_step(
    tap: Tap,
    step: Step,
    rows: Sequence[int],
    requests: Sequence[RequestStep],
    hidden: torch.Tensor | None,
) -> None:
    """Record the verified path of each request that is wanted.

    Args:
        tap: Where to.
        step: The one that was verified, with the likeliest tokens of its rows.
        rows: Of the batch, of the requests that got new tokens.
        requests: These.
        hidden: [len(rows), hidden_size] of the last verified rows; None if the drafter reads none.
    """
    if step.likeliest is None:
        return
    offsets = np.cumsum([0, *(len(draft) + 1 for draft in step.drafts)])
    chosen: list[tuple[int, list[int], int | None]] = []
    for place, (row, request) in enumerate(zip(rows, requests, strict=True)):
        remember = request.options.remember
        if tap.wants(request.request_id, request.share_group, remember):
            nodes = step.accepted_nodes(row, len(request.new_tokens) - 1)
            first = int(offsets[row])
            path = [first, *(first + 1 + node for node in nodes)]
            failed = failed_at(step.verified[row], step.parents[row], nodes)
            chosen.append((place, path, failed))
    if not chosen:
        return
    flat = torch.tensor([row for _, path, _ in chosen for row in path])
    tokens, probs = step.likeliest.on_host(flat.to(step.likeliest.tokens.device))
    states = torch.empty(len(chosen), 0)
    if hidden is not None:  # of the chosen, in one copy from the device
        states = hidden[[place for place, _, _ in chosen]].to("cpu", torch.bfloat16)
    start = 0
    for number, (place, path, failed) in enumerate(chosen):
        request, end = requests[place], start + len(path)
        tap.record(
            Seen(
                request_id=request.request_id,
                token_ids=request.token_ids,
                num_new=len(path),
                top_tokens=tokens[start:end],
                top_probs=probs[start:end],
                failed_at=failed,
                state=states[number],
                temperature=request.temperature,
                num_prompt_tokens=request.num_prompt_tokens,
            )
        )
        start = end


def failed_at(
    draft: Sequence[int], parents: Sequence[int] | None, accepted: Sequence[int]
) -> int | None:
    """Depth, from 1, at which the target refused a draft.

    Args:
        draft: Scheduled tokens; -1 = a placeholder, which is no draft token.
        parents: Of each; None = a chain.
        accepted: The accepted path.

    Returns:
        0 if the path was accepted to its end: the bonus token behind it is no failure. None if
        there was no draft.
    """
    known = [node for node, token in enumerate(draft) if token >= 0]
    if not known:
        return None
    last = accepted[-1] if accepted else -1
    above = range(-1, len(draft) - 1) if parents is None else parents
    return len(accepted) + 1 if any(above[node] == last for node in known) else 0
