# SPDX-License-Identifier: Apache-2.0
"""Forward passes of an EAGLE-3 head over vLLM's KV cache; one on every tensor-parallel rank."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm_spec_ext.engine.models.draft_graphs import Inputs
from vllm_spec_ext.engine.models.forward_pass import ForwardPass
from vllm_spec_ext.engine.models.paged_model import PagedModel

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig


class PagedEagle(PagedModel):
    """A head on one rank, with the hidden states of the current step."""

    def __init__(
        self,
        module: torch.nn.Module,
        vllm_config: "VllmConfig",
        layer_names: Sequence[str],
        device: torch.device,
        layers: tuple[int, ...],
    ) -> None:
        """Without caches.

        Args:
            module: vLLM's model.
            vllm_config: The engine's, with the head as its drafter.
            layer_names: Its attention layers.
            device: Of its weights.
            layers: Of the target, whose states it reads, ascending; none = the final state.
        """
        super().__init__(module, vllm_config, layer_names, device)
        self.layers = layers
        self._states: Sequence[torch.Tensor] = ()
        self._outputs: list[torch.Tensor] = []

    def begin_step(self, states: Sequence[torch.Tensor]) -> None:
        """The target ran a step.

        Args:
            states: Of each of :attr:`layers`, or of the final layer: [rows of the step, hidden].
        """
        self._states, self._outputs = states, []

    def _inputs(self, plan: ForwardPass) -> Inputs:
        return {**super()._inputs(plan), "hidden_states": self._states_of(plan)}

    def _blank_inputs(self, numbers: torch.Tensor) -> Inputs:
        width = self.vllm_config.model_config.get_hidden_size() * (len(self.layers) or 1)
        dtype = self.vllm_config.model_config.dtype
        states = torch.zeros(len(numbers), width, dtype=dtype, device=numbers.device)
        blank = super()._blank_inputs(numbers)
        return {**blank, "hidden_states": self.module.combine_hidden_states(states)}

    def _taken(self, plan: ForwardPass, output: Any) -> torch.Tensor:
        """Keeps the outputs that drafted tokens will be read with."""
        hidden: torch.Tensor
        outputs: torch.Tensor
        hidden, outputs = output
        if len(plan.wanted):
            self._outputs.append(outputs[self._on_device(plan.wanted)])
        return hidden

    def _states_of(self, plan: ForwardPass) -> torch.Tensor:
        """[num_rows, hidden]; a pass reads certain tokens or drafted ones, never both."""
        assert plan.states is not None
        if plan.states[0] < 0:
            return torch.cat(self._outputs)[self._on_device(~plan.states)]
        rows = self._on_device(plan.states)
        states = torch.cat([state[rows] for state in self._states], dim=-1)
        combined: torch.Tensor = self.module.combine_hidden_states(states)
        return combined
