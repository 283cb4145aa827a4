# SPDX-License-Identifier: Apache-2.0
"""Forward passes of a draft model over vLLM's KV cache; one on every tensor-parallel rank.

The model's layers are ordinary attention layers of the engine: vLLM gave them caches in the
target's KV group, and we build their metadata as vLLM does for its own drafters (vLLM 0.32
``SpecDecodeBaseProposer.initialize_attn_backend``). Each part of a pass is a request of its own to
attention, so any backend that is causal over block tables will do.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.vllm import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.utils import AttentionGroup

from vllm_spec_ext.engine.models.common_metadata import common_metadata
from vllm_spec_ext.engine.models.draft_graphs import SIZES, DraftGraphs, Inputs, Recorder
from vllm_spec_ext.engine.models.draft_projection import quick_projection
from vllm_spec_ext.engine.models.forward_pass import ForwardPass
from vllm_spec_ext.engine.trees.block_copies import LayerBlocks
from vllm_spec_ext.proposers.records import Projection

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig


class PagedModel:
    """One draft model on one rank; does as it is told."""

    def __init__(
        self,
        module: torch.nn.Module,
        vllm_config: "VllmConfig",
        layer_names: Sequence[str],
        device: torch.device,
    ) -> None:
        """Without caches.

        Args:
            module: vLLM's model.
            vllm_config: The engine's, with the draft's own model in it.
            layer_names: Its attention layers.
            device: Of its weights.
        """
        self.module = module
        self.layer_names = list(layer_names)
        self.vllm_config = vllm_config
        self._device = device
        self._graphs: DraftGraphs | None = None

    def bind(
        self, groups: Sequence[AttentionGroup], caches: Sequence[torch.Tensor], num_blocks: int
    ) -> None:
        """Use these caches.

        Args:
            groups: Its attention layers, with metadata builders.
            caches: Of its layers, addressed by the scheduler's block ids.
            num_blocks: Blocks of each, scratch included.
        """
        self._groups = list(groups)
        self._blocks = LayerBlocks(caches, num_blocks)
        self._project = self._find_projection()  # now, and not in the first pass that is timed

    @torch.inference_mode()
    def forward(self, plan: ForwardPass) -> torch.Tensor:
        """Write the KV of all rows; logits [len(plan.wanted), own vocabulary]."""
        hidden = self._hidden_of(plan)
        if not len(plan.wanted):
            return torch.empty(0, 0)
        if len(plan.wanted) < plan.num_rows:
            hidden = hidden[self._on_device(plan.wanted)]
        logits: torch.Tensor = self._project(hidden)
        if self._device.type != "cpu":
            # Its caller measures the time; what follows needs the tokens on the host anyway.
            torch.accelerator.synchronize(self._device)
        return logits

    def _hidden_of(self, plan: ForwardPass) -> torch.Tensor:
        """Write the KV of all rows; [num_rows, hidden] what logits are made of."""
        slots, inputs = self._on_device(plan.slots), self._inputs(plan)
        if self._graphs is not None and self._graphs.fits(plan):
            return self._taken(plan, self._graphs.run(plan, inputs, slots))
        tables = self._on_device(plan.tables)
        common = common_metadata(plan.query_lens, plan.seq_lens, tables, slots)
        return self._taken(plan, self._run(self._metadata(common), slots, inputs))

    def _metadata(self, common: CommonAttentionMetadata) -> dict[str, Any]:
        """Of each layer."""
        return {
            name: built
            for group in self._groups
            for built in [group.build_metadata_for_drafting(common, 0)]
            for name in group.layer_names
        }

    def _run(self, metadata: dict[str, Any], slots: torch.Tensor, inputs: Inputs) -> Any:
        """The module's output."""
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=len(slots),
            slot_mapping=dict.fromkeys(self.layer_names, slots),
            skip_compiled=True,
        ):
            return self.module(**inputs)

    @torch.inference_mode()
    def record_graphs(self, recorder: Recorder) -> None:
        """From now on, small passes are played from CUDA graphs.

        Args:
            recorder: Of the device.
        """
        positions = torch.zeros(SIZES[-1], dtype=torch.int64, device=self._device)
        max_model_len = self.vllm_config.model_config.max_model_len
        self._graphs = DraftGraphs(
            self._metadata,
            self._run,
            self._blank_inputs(positions),
            most_blocks=-(-max_model_len // self._groups[0].kv_cache_spec.block_size),
            max_model_len=max_model_len,
            recorder=recorder,
        )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy KV blocks of this model, (from, to); no block is on both sides."""
        self._blocks.copy(pairs)

    def reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Other weights, by their names in the checkpoint; packed again where the platform does.

        Versions are float32. They are converted here, as vLLM would warn of every single weight.
        """
        dtype = self.vllm_config.model_config.dtype
        own = (
            (name, value.to(dtype) if value.is_floating_point() else value)
            for name, value in weights
        )
        with set_current_vllm_config(self.vllm_config):
            reload_weights(self.vllm_config, self.module, own, None, True)
        self._project = self._find_projection()

    def _find_projection(self) -> Projection:
        """Logits of states."""
        return quick_projection(self.module) or self.module.compute_logits

    def _inputs(self, plan: ForwardPass) -> Inputs:
        """Of the module."""
        return {
            "input_ids": self._on_device(plan.ids),
            "positions": self._on_device(plan.positions),
            "inputs_embeds": None,
        }

    def _blank_inputs(self, numbers: torch.Tensor) -> Inputs:
        """Inputs of as many rows as there are numbers, any; these will do as ids and positions."""
        return {"input_ids": numbers, "positions": numbers, "inputs_embeds": None}

    def _taken(self, plan: ForwardPass, output: Any) -> torch.Tensor:
        """[num_rows, hidden] what logits are made of, out of the module's output."""
        hidden: torch.Tensor = output
        return hidden

    def _on_device(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
