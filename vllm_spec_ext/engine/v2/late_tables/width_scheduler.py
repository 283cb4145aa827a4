# SPDX-License-Identifier: Apache-2.0
"""vLLM's asynchronous scheduler, drafting only where that pays.

It is asked for by vLLM's option ``scheduler_cls``. Each request drafts as many tokens as there can
be, or none: there are CUDA graphs for both (:class:`..full_graphs.NearbyGraphs`).
"""

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_spec_ext.engine.starting.scheduling import most_requests
from vllm_spec_ext.engine.starting.spec_config import SpecExtConfig
from vllm_spec_ext.engine.v2.late_tables.width_choice import WidthChoice

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput


class WidthScheduler(AsyncScheduler):
    """See the module docstring."""

    def __new__(cls, vllm_config: "VllmConfig", *args: Any, **kwargs: Any) -> Any:
        """vLLM's own where it is not ours to say: another engine made of the same arguments."""
        is_async = vllm_config.scheduler_config.async_scheduling
        if is_async and isinstance(vllm_config.speculative_config, SpecExtConfig):
            return super().__new__(cls)
        return (AsyncScheduler if is_async else Scheduler)(vllm_config, *args, **kwargs)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Arguments as vLLM's."""
        super().__init__(*args, **kwargs)
        self._width_choice = WidthChoice()

    def _update_after_schedule(self, scheduler_output: "SchedulerOutput") -> None:
        """Before vLLM gives the requests of the next step their places for drafts."""
        num_requests = len(scheduler_output.num_scheduled_tokens)
        if num_requests:
            drafts = scheduler_output.scheduled_spec_decode_tokens.values()
            num_verified = sum(map(len, drafts))
            decodes = num_requests + num_verified == scheduler_output.total_num_scheduled_tokens
            most = self.num_spec_tokens
            fits = num_requests <= most_requests(most)
            if fits:
                choice = self._width_choice
                pays = choice.drafts_next(num_requests, num_verified, only_decodes=decodes)
            else:  # what such steps take says nothing of those that may draft
                pays = False
                self._width_choice.interrupted()
            scheduler_output.num_spec_tokens_to_schedule = most if pays else 0
        super()._update_after_schedule(scheduler_output)

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> Any:
        """How many tokens did steps with drafts give?"""
        verified = scheduler_output.scheduled_spec_decode_tokens
        if verified:
            said = zip(
                model_runner_output.req_ids, model_runner_output.sampled_token_ids, strict=True
            )
            got = [len(tokens) for name, tokens in said if name in verified and len(tokens)]
            num_requests = len(scheduler_output.num_scheduled_tokens)
            self._width_choice.answered(num_requests, len(got), sum(got))
        return super().update_from_output(scheduler_output, model_runner_output)
