# SPDX-License-Identifier: Apache-2.0
"""vLLM's placeholders for drafts of a request that comes with one token left to read.

That is one that was preempted, or whose prompt is cached. vLLM 0.32 (``Scheduler.schedule``, "pad
new decode requests") fills it up with as many placeholders (-1) as a draft may have, so that all
requests of a step have one length and a full CUDA graph may run. Adaptive drafts differ in length
anyway, so that gains nothing and costs the verification of tokens that nobody drafted: on a CPU
32 of them make a step of eight requests twice as long, and the ledger takes them for drafts that
failed.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def without_placeholders(scheduler_output: "SchedulerOutput") -> "SchedulerOutput":
    """The step without them, in a copy: the scheduler takes them back as it does rejected drafts.

    With a grammar in the batch they stay, as the scheduler's bit mask has rows for them.

    Args:
        scheduler_output: Of the step to come, which is not prepared yet.
    """
    scheduled = scheduler_output.scheduled_spec_decode_tokens
    padded = {name: len(draft) for name, draft in scheduled.items() if draft and draft[0] < 0}
    if not padded or scheduler_output.has_structured_output_requests:
        return scheduler_output
    return replace(
        scheduler_output,
        scheduled_spec_decode_tokens={
            name: draft for name, draft in scheduled.items() if name not in padded
        },
        num_scheduled_tokens={
            name: number - padded.get(name, 0)
            for name, number in scheduler_output.num_scheduled_tokens.items()
        },
        total_num_scheduled_tokens=(
            scheduler_output.total_num_scheduled_tokens - sum(padded.values())
        ),
    )
