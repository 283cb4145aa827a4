# SPDX-License-Identifier: Apache-2.0
"""Steps whose tokens the host reads one step late.

While a step is queued the device still runs it, or the one before. By then the tokens of the one
before are read: the device has enough to do until the look-up is queued behind it. Everything that
counts, records and learns is told of a step as without asynchronous scheduling, one step later.

With tensor parallelism rank 0 drafts, and its device sends what it found to the others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from vllm_spec_ext.engine.step import Step
from vllm_spec_ext.engine.v2.late_tables.told_output import ToldOutputMixin, tell_both
from vllm_spec_ext.proposers.base import DeviceTexts

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_spec_ext.engine.v2.runner import SpecRunnerV2Mixin


@dataclass(frozen=True)
class _QueuedStep:
    step: Step
    numbers: list[int | None]  # of each request, so that none is taken for a later one of its name
    output: ToldOutputMixin
    num_drafted: int  # tokens that the next step verifies of each request


class LateSteps:
    """Of one runner."""

    def __init__(self, runner: "SpecRunnerV2Mixin") -> None:
        """No step is queued."""
        from vllm.utils.torch_utils import async_tensor_h2d  # patched by vLLM's CPU worker

        self._runner = runner
        self._queued: _QueuedStep | None = None
        self._upload = partial(async_tensor_h2d, device=runner.device)
        self._num_drafted = int(runner.speculative_config.num_speculative_tokens)

    def draft(
        self, batch: "InputBatch", hidden_states: torch.Tensor, num_rejected: torch.Tensor
    ) -> torch.Tensor:
        """[num_reqs, k] int64 drafts, on the device; called while the batch's step is queued.

        Args:
            batch: The step's.
            hidden_states: [num_rows, hidden_size] of the target's final layer.
            num_rejected: [num_reqs] draft tokens of each, which are its last rows.
        """
        self.read()
        ranks = self._runner.drafter.ranks
        states = partial(_last_states, batch, hidden_states, num_rejected)
        make = partial(self._draft, batch, states)
        if self._runner.drafter.needs.hidden_states:
            # By layers of the target that all ranks compute together, as rank 0 tells them.
            return ranks.lead(lambda: (None, [make()]))[1][0]
        return ranks.spread(make, (batch.num_reqs, self._num_drafted), torch.int64)

    def _draft(
        self, batch: "InputBatch", hidden_states: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        runner, states = self._runner, self._runner.req_states
        texts = DeviceTexts(
            states.all_token_ids.gpu,
            states.total_len.gpu,
            batch.idx_mapping,
            batch.idx_mapping_np,
            self._upload,
            hidden_states,
        )
        known = [
            runner.step_drafts.request_step(name, runner.state_of(name), [], self._num_drafted)
            for name in batch.req_ids
        ]
        drafts = runner.drafter.draft_late(known, texts)
        if drafts is None:
            # A tensor of its own: vLLM overwrites what is not verified.
            return states.last_sampled_tokens[batch.idx_mapping].repeat(1, self._num_drafted)
        return drafts

    def queue(
        self, output: "AsyncOutput", batch: "InputBatch", num_drafted: int
    ) -> ToldOutputMixin:
        """A step is queued; returns its answer, which vLLM and we may read.

        Args:
            output: Of the step.
            batch: Its requests.
            num_drafted: Tokens that the next step verifies of each.
        """
        runner = self._runner
        told = tell_both(output, runner.drafter.counts.take())
        numbers = [runner.spec_requests.number(name) for name in batch.req_ids]
        self._queued = _QueuedStep(runner.spec_step, numbers, told, num_drafted)
        return told

    def read_if_told(self) -> None:
        """Requests are about to leave: read what they said last, if nobody has to wait for it."""
        if self._queued is not None and self._queued.output.is_told:
            self.read()

    def read(self) -> None:
        """Wait for the tokens of the step that was queued last, and tell of them."""
        queued, self._queued = self._queued, None
        if queued is None:
            return
        runner, step = self._runner, queued.step
        new_tokens = [list(tokens) for tokens in queued.output.get_output().sampled_token_ids]
        drafts = [list(draft) for draft in step.drafts]
        for row, (name, number) in enumerate(zip(step.request_ids, queued.numbers, strict=True)):
            if number is None or runner.spec_requests.number(name) != number:
                new_tokens[row], drafts[row] = [], []  # it left while the step ran
        step.drafts = drafts
        step.find_drafts()
        names = [name for name, tokens in zip(step.request_ids, new_tokens, strict=True) if tokens]
        runner.spec_requests.append(names, filter(None, new_tokens))
        if runner.drafter.ranks.leads:
            nothing = torch.empty(0, 0)  # hidden states: what drafts late has read them
            runner.step_drafts.make(step, new_tokens, nothing, queued.num_drafted)


def _last_states(
    batch: "InputBatch", hidden_states: torch.Tensor, num_rejected: torch.Tensor
) -> torch.Tensor:
    """[num_reqs, hidden_size] by which each request's last token was chosen."""
    ends = batch.query_start_loc[1 : batch.num_reqs + 1]
    return hidden_states[ends - 1 - num_rejected]
