# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of prompts, where requests may have more rows than their prompt has tokens."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_spec_ext.engine.v2.runner import SpecRunnerV2Mixin


def leave_out_short_prompts(
    runner: "SpecRunnerV2Mixin", scheduler_output: "SchedulerOutput"
) -> None:
    """The last token of a prompt, if it is all that is left to read, has no log-probabilities.

    vLLM's scheduler may fill such a request up to the length of the others, and its worker would
    take these rows for more of the prompt (0.32 ``compute_prompt_logprobs``).

    Args:
        runner: That has added the requests.
        scheduler_output: With those that are new.
    """
    worker = runner.prompt_logprobs_worker
    for new in scheduler_output.scheduled_new_reqs:
        if worker is not None and new.num_computed_tokens >= new.prompt_len - 1:
            place = runner.req_states.req_id_to_index[new.req_id]
            worker.uses_prompt_logprobs[place] = False
