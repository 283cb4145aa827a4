# SPDX-License-Identifier: Apache-2.0
"""In the place of vLLM's speculator: drafts while a step is queued."""

from typing import TYPE_CHECKING, Any

import torch

from vllm_spec_ext.engine.v2.late_tables.late_steps import LateSteps
from vllm_spec_ext.engine.v2.speculator import HostSpeculator

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch


class LateSpeculator(HostSpeculator):
    """vLLM hands on what this one drafts, to the next step and to a grammar."""

    def __init__(self, draft_tokens: torch.Tensor, late_steps: LateSteps) -> None:
        """Stand in for a speculator.

        Args:
            draft_tokens: [max_num_reqs, k] int64 of vLLM's ``RequestState``.
            late_steps: Of the runner.
        """
        super().__init__(draft_tokens)
        self._late_steps = late_steps

    def propose(
        self,
        input_batch: "InputBatch",
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """[num_reqs, k] drafts for the next step, of which it verifies so many tokens."""
        if dummy_run:
            return super().propose(input_batch)
        if num_speculative_tokens == 0:
            self._late_steps.read()
            return super().propose(input_batch)
        return self._late_steps.draft(input_batch, last_hidden_states, num_rejected)
