# SPDX-License-Identifier: Apache-2.0
"""Passes of the target between its steps, over vLLM's KV cache; one on every rank.

Reads follow ``attn_metadata[layer].block_table``, writes follow ``slot_mapping[layer]`` (vLLM 0.32
``attention.get_attention_context``, ``unified_kv_cache_update``), so a shorter table changes what
a layer sees and not where it writes. Layers that choose pages do so in the pass itself: the query
of a request's first row meets the page means right before its layer attends.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import set_forward_context

from vllm_spec_ext.engine.models.common_metadata import common_metadata
from vllm_spec_ext.engine.views.layer_tables import LayerTables
from vllm_spec_ext.engine.views.page_layout import PageBudget
from vllm_spec_ext.engine.views.page_means import KeyReader, PageMeans
from vllm_spec_ext.engine.views.view_pass import ViewPass
from vllm_spec_ext.proposers.views import ViewSpec

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata
    from vllm.v1.worker.utils import AttentionGroup


class PagedTarget:
    """The target on one rank; does as it is told."""

    def __init__(
        self, module: torch.nn.Module, vllm_config: "VllmConfig", device: torch.device
    ) -> None:
        """Without caches.

        Args:
            module: vLLM's model.
            vllm_config: The engine's.
            device: Of its weights.
        """
        self.module = module
        self._vllm_config = vllm_config
        self._device = device
        self._views: list[LayerTables] = []
        self.block_size = 1
        self.caches: list[torch.Tensor] = []
        """Of the layers, in their order."""
        self.means: list[torch.Tensor] = []
        """Of the layers that choose pages in some view."""
        self._current: LayerTables | None = None  # whose pass runs

    def bind(
        self,
        specs: Sequence[ViewSpec],
        groups: Sequence["AttentionGroup"],
        caches: Mapping[str, torch.Tensor],
        block_size: int,
        read_keys: KeyReader,
    ) -> None:
        """Use these caches.

        Args:
            specs: The views.
            groups: The target's attention groups, with metadata builders.
            caches: Of its layers in their order, addressed by the scheduler's block ids.
            block_size: Tokens a block.
            read_keys: Finds the keys in a cache.
        """
        self._groups = list(groups)
        self._layers = list(caches)
        self.caches, self.block_size = list(caches.values()), block_size
        dense = [set(spec.dense_layers) for spec in specs if spec.kind == "retrieval"]
        means = None
        if dense:
            never_choose = set.intersection(*dense)
            wanted = {
                name: cache
                for number, (name, cache) in enumerate(caches.items())
                if number not in never_choose
            }
            means = PageMeans(wanted, read_keys, block_size)
            self.means = means.tensors
            layers = self._vllm_config.compilation_config.static_forward_context
            for name in wanted:
                self._wrap_attention(name, layers[name].impl)
        self._views = [
            LayerTables(
                PageBudget.of(spec, block_size),
                self._layers,
                [self._layers[number] for number in spec.dense_layers],
                self._vllm_config.scheduler_config.max_num_seqs,
                self._device,
                means if spec.kind == "retrieval" else None,
            )
            for spec in specs
        ]

    @property
    def choices(self) -> list[torch.Tensor]:
        """Of each view, the pages that were chosen last."""
        return [view.choices for view in self._views]

    @torch.inference_mode()
    def run_view(self, index: int, plan: ViewPass) -> torch.Tensor:
        """Write the KV of all rows; [num_rows, vocab] logits.

        Args:
            index: Of the view.
            plan: The pass.
        """
        view = self._views[index]
        if plan.begins is not None:
            view.begin(plan.begins)
        view.begin_pass(plan)
        slots = self._at(plan.slots)
        metadata = self._metadata(view, plan, slots)
        self._current = view
        try:
            with set_forward_context(
                metadata,
                self._vllm_config,
                num_tokens=plan.num_rows,
                slot_mapping=dict.fromkeys(self._layers, slots),
                skip_compiled=True,
            ):
                output = self.module(
                    input_ids=self._at(plan.ids),
                    positions=self._at(plan.positions),
                    inputs_embeds=None,
                )
        finally:
            self._current = None
            view.end_pass()
        # EAGLE-3 heads beside it make it put out the states of some layers, too.
        hidden = output[0] if isinstance(output, tuple) else output
        logits: torch.Tensor = self.module.compute_logits(hidden)
        if self._device.type != "cpu":
            # Its caller measures the time; what follows needs the tokens on the host anyway.
            torch.accelerator.synchronize(self._device)
        return logits

    def _metadata(
        self, view: LayerTables, plan: ViewPass, slots: torch.Tensor
    ) -> dict[str, "CPUAttentionMetadata"]:
        """Of each layer; the other backends' have a block table, too."""
        shared = common_metadata(plan.query_lens, plan.view_lens, view.shared(), slots)
        full = shared
        if view.differ:
            full = common_metadata(plan.query_lens, plan.full_lens, view.full(), slots)
        metadata = {}
        for group in self._groups:
            built = group.build_metadata_for_drafting(shared, 0)
            dense = built
            if view.differ and any(map(view.is_dense, group.layer_names)):
                dense = group.build_metadata_for_drafting(full, 0)
            for name in group.layer_names:
                own = view.of(name)
                if view.is_dense(name):
                    metadata[name] = dense
                elif own is None:
                    metadata[name] = built
                else:
                    # Layers show as many pages, so only the table differs.
                    metadata[name] = copy(built)
                    metadata[name].block_table = own
        return metadata

    def _wrap_attention(self, layer_name: str, impl: "CPUAttentionBackendImpl") -> None:
        """Before a layer attends in a pass of ours, let it choose its pages."""
        attend = impl.forward

        def forward(
            layer: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            kv_cache: torch.Tensor,
            attn_metadata: "CPUAttentionMetadata",
            *rest: Any,
            **more: Any,
        ) -> torch.Tensor:
            if self._current is not None:
                self._current.choose(layer_name, query, attn_metadata.block_table)
            return attend(layer, query, key, value, kv_cache, attn_metadata, *rest, **more)

        impl.forward = forward

    def _at(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
