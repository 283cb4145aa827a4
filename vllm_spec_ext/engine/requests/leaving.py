# SPDX-License-Identifier: Apache-2.0
"""Requests that leave a runner: finished, preempted, or gone on with other tokens."""

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_spec_ext.engine.spec_runner import SpecRunner


def leaving_requests(
    runner: "SpecRunner", scheduler_output: "SchedulerOutput", known: Container[str]
) -> list[str]:
    """Requests whose state must go before a step; others may sit it out.

    Of these, as a session between two turns, draft models read what they have not read of the last
    steps: nobody would know it later.

    A streaming-input session goes on under its id with other tokens: what it answered becomes
    prompt, the last token is taken back, and options may change. Like vLLM
    (``_update_streaming_request``) we know it by a new request with a known id; for the
    proposer the turn before is finished, and the next one is a request of its own.

    Args:
        runner: Before vLLM's own update.
        scheduler_output: Of the step.
        known: Ids of the runner's requests.
    """
    runner.step_drafts.settle_all_but(scheduler_output.num_scheduled_tokens)
    gone = set(scheduler_output.finished_req_ids)
    gone.update(scheduler_output.preempted_req_ids or ())
    sent = (request.req_id for request in scheduler_output.scheduled_new_reqs)
    gone.update(request_id for request_id in sent if request_id in known)
    return sorted(gone)


def let_go(runner: "SpecRunner", gone: Sequence[str]) -> None:
    """Free what the proposer and we keep of requests that leave."""
    runner.step_drafts.settle(gone)
    runner.drafter.finish(gone)
    runner.step_drafts.forget(gone)
    runner.spec_states.forget(gone)
    if runner.step_log is not None:
        runner.step_log.forget(gone)
