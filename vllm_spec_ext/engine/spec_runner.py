# SPDX-License-Identifier: Apache-2.0
"""What the parts that draft and verify need of a runner, whichever of vLLM's two it is."""

from typing import TYPE_CHECKING, Protocol

import torch

from vllm_spec_ext.engine.drafting.drafter import Drafter
from vllm_spec_ext.engine.drafting.step_drafts import StepDrafts
from vllm_spec_ext.engine.models.hosted_model import BatchRow
from vllm_spec_ext.engine.requests.state import KnownRequest, RequestState, RequestStates
from vllm_spec_ext.engine.starting.spec_config import SpecExtConfig
from vllm_spec_ext.engine.step import Step
from vllm_spec_ext.engine.trees.attention import TreeAttention
from vllm_spec_ext.engine.watching.step_log import StepLog

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig


class SpecRunner(Protocol):
    """Our mixin of either runner."""

    drafter: Drafter
    device: torch.device
    max_model_len: int
    speculative_config: SpecExtConfig
    vllm_config: "VllmConfig"
    tree_attention: TreeAttention | None
    step_drafts: StepDrafts
    spec_states: RequestStates
    spec_step: Step
    step_log: StepLog | None

    def known(self, request_id: str) -> KnownRequest:
        """A request of the batch; after the bookkeeping with the step's new tokens."""

    def state_of(self, request_id: str) -> RequestState:
        """What we keep of a request."""

    def rows_of(self, step: Step, new_tokens: list[list[int]]) -> list[BatchRow]:
        """The requests of a batch after its step, for draft models and views."""
