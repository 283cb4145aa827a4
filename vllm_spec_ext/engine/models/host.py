# SPDX-License-Identifier: Apache-2.0
"""The draft models of one engine."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from vllm_spec_ext.engine.drafting.ranks import Ranks
from vllm_spec_ext.engine.drafting.unread_tokens import UnreadSteps
from vllm_spec_ext.engine.models.batch_events import BlockEvents
from vllm_spec_ext.engine.models.block_model import BlockModel, BlockSettings
from vllm_spec_ext.engine.models.dflash_checkpoint import DFlashFacts
from vllm_spec_ext.engine.models.dflash_loading import load_dflash
from vllm_spec_ext.engine.models.draft_config import DraftConfig
from vllm_spec_ext.engine.models.draft_graphs import Recorder, wants_graphs
from vllm_spec_ext.engine.models.eagle_loading import load_eagle3
from vllm_spec_ext.engine.models.eagle_model import EagleModel
from vllm_spec_ext.engine.models.hosted_model import BatchRow, HostedModel
from vllm_spec_ext.engine.models.loading import load
from vllm_spec_ext.engine.models.paged_blocks import PagedBlocks
from vllm_spec_ext.engine.models.paged_eagle import PagedEagle
from vllm_spec_ext.engine.models.paged_model import PagedModel
from vllm_spec_ext.engine.models.replay import SharedModel
from vllm_spec_ext.engine.models.target_states import default_layers, layers_by_model, pick
from vllm_spec_ext.engine.models.unread_states import with_unread
from vllm_spec_ext.engine.watching.counts import WorkerCounts

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig

logger = logging.getLogger("vllm.spec_ext")


class ModelHost:
    """Owned by the drafter. All ranks run the models; rank 0 alone keeps books and decides."""

    def __init__(self, configs: Sequence[DraftConfig]) -> None:
        """Without models; :meth:`load` brings them."""
        self._configs = configs
        self.group = 0
        """KV group that the models share with the target."""
        self.paged: list[PagedModel] = []
        self.models: list[HostedModel] = []
        self.block_models: list[BlockModel] = []
        self._counts = WorkerCounts()
        self._layers: tuple[int, ...] = ()
        self._record_graphs = False

    def __bool__(self) -> bool:
        return bool(self._configs)

    @property
    def layer_names(self) -> set[str]:
        """Attention layers of all models."""
        return {name for model in self.paged for name in model.layer_names}

    @property
    def heads(self) -> list[DraftConfig]:
        """Those that read the target's hidden states."""
        return [config for config in self._configs if config.reads is not None]

    @property
    def reads_layers(self) -> bool:
        """Whether any model reads hidden states of the target's layers, not the final one alone."""
        return any(config.reads and config.reads.num_states for config in self._configs)

    def state_layers(self, default: tuple[int, ...]) -> tuple[int, ...]:
        """Layers of the target whose output the models read, ascending.

        Args:
            default: For checkpoints that name none.
        """
        by_model = layers_by_model(self.heads, default)
        return tuple(sorted({layer for layers in by_model for layer in layers}))

    def load(
        self,
        vllm_config: "VllmConfig",
        ranks: Ranks,
        target: torch.nn.Module,
        device: torch.device,
        counts: WorkerCounts,
        *,
        weights_change: bool,
    ) -> None:
        """Load the models, on every rank, once in the life of an engine.

        Has to come before vLLM reads the KV specs of the layers.

        Args:
            vllm_config: The engine's.
            ranks: The workers that run the models together.
            target: With its weights.
            device: Of the target.
            counts: Of this worker.
            weights_change: The drafter learns while it serves.
        """
        self._counts = counts
        self._record_graphs = wants_graphs(vllm_config, device, weights_change=weights_change)
        scheduler = vllm_config.scheduler_config
        default = default_layers(target) if self.heads else ()
        layers = iter(layers_by_model(self.heads, default))
        self._layers = self.state_layers(default)
        for index, config in enumerate(self._configs):
            own = config.model_config
            if config.dflash is not None:
                blocks = load_dflash(
                    vllm_config, own, config.dflash, index, target, device, next(layers)
                )
                self.paged.append(blocks)
                block_runner: Any = blocks if ranks.is_alone else SharedModel(ranks, index, blocks)
                self.block_models.append(
                    _block_model(config, config.dflash, block_runner, may_wait=ranks.is_alone)
                )
            else:
                paged = (
                    load(vllm_config, own, index, device)
                    if config.eagle3 is None
                    else load_eagle3(vllm_config, own, index, target, device, next(layers))
                )
                self.paged.append(paged)
                runner: Any = paged if ranks.is_alone else SharedModel(ranks, index, paged)
                kind = HostedModel if config.eagle3 is None else EagleModel
                hosted = kind(
                    config.name,
                    runner,
                    num_ids=own.get_vocab_size(),
                    vocab_size=vllm_config.model_config.get_vocab_size(),
                    max_model_len=config.max_model_len,
                    max_rows=scheduler.max_num_batched_tokens + scheduler.max_num_seqs,
                    view=config.view,
                )
                self.models.append(hosted)
        ranks.share_models(self.paged)

    @property
    def _all(self) -> list[HostedModel | BlockModel]:
        """In the order in which the method asked for them; it has models of one kind."""
        return [*self.models, *self.block_models]

    def bind(self, num_blocks: int, block_size: int, scratch: range) -> None:
        """Start with empty KV, in the blocks of the requests and these scratch blocks."""
        for model in self._all:
            model.bind(num_blocks, block_size, scratch)

    def warm_up(self, ranks: Ranks, target_states: torch.Tensor) -> None:
        """Run block drafters once, on all ranks.

        Others run with a prompt, behind which nobody notices what is compiled for them.

        Args:
            ranks: The workers that run the models together.
            target_states: [1, hidden] any, like the target's.
        """
        if self.paged and self._record_graphs:
            recorder = Recorder()
            for model, config in zip(self.paged, self._configs, strict=True):
                try:
                    model.record_graphs(recorder)
                except Exception as error:  # they save time, and that is all
                    logger.warning(
                        "vllm-spec-ext: %s runs without CUDA graphs, which could not be recorded: "
                        "%s: %s",
                        config.name,
                        type(error).__name__,
                        error,
                    )
        for model in self.paged:
            if isinstance(model, PagedBlocks):
                model.begin_step([target_states] * len(model.layers), target_states)

        def run() -> tuple[None, list[torch.Tensor]]:
            for model in self.block_models:
                model.warm_up()
            return None, []

        if self.block_models:
            ranks.lead(run)

    def settle(self) -> None:
        """Blocks are about to change hands: make the KV of all states that wait."""
        with ExitStack() as stack:
            for model in self.block_models:
                stack.callback(model.settle)

    def update(self, events: BlockEvents) -> None:
        """Blocks change hands, before a step runs; behind :meth:`settle`."""
        for model in self._all:
            model.forget(events.gone)
            model.blocks.copied(events.copied)
            for blocks in events.allocated:
                model.blocks.allocate(blocks)
            for blocks, num_computed in events.entered:
                model.blocks.enter(blocks, num_computed)

    def see(
        self, hidden_states: torch.Tensor, aux_hidden_states: Sequence[torch.Tensor] | None
    ) -> None:
        """The hidden states of a step; on every rank, before any drafts.

        Args:
            hidden_states: [rows, hidden] of the final layer.
            aux_hidden_states: [rows, hidden] of each layer that :meth:`state_layers` named.
        """
        for model in self.paged:
            if not isinstance(model, PagedEagle | PagedBlocks):
                continue
            states = pick(hidden_states, aux_hidden_states, self._layers, model.layers)
            if isinstance(model, PagedBlocks):
                model.begin_step(states, hidden_states)
            else:
                model.begin_step(states)

    @property
    def can_rest(self) -> bool:
        """Whether the states of some steps may be read later, on one rank; before :meth:`load`."""
        return all(config.dflash is not None for config in self._configs)

    def rest(self, num_requests: int) -> None:
        """The step that :meth:`see` was told of is not read; each request got one token in it."""
        for model in self.paged:
            if isinstance(model, PagedBlocks):
                model.rest(num_requests)

    def begin_step(self, rows: Sequence[BatchRow], unread: UnreadSteps) -> None:
        """The target ran these rows, and drafting begins.

        Args:
            rows: Of the step that is read.
            unread: Those that went by before.
        """
        if unread.num_steps:
            rows = with_unread(rows, unread.places, unread.num_requests, unread.num_steps)
            for paged in self.paged:
                if isinstance(paged, PagedBlocks):
                    paged.join_unread()
        for model in self._all:
            model.begin_step(rows)

    def end_step(self, could_draft: bool) -> float:
        """Drafting is over; see :meth:`HostedModel.end_step`.

        Returns:
            Seconds of the step that went into unfinished prompts, which are no cost of drafts.
        """
        with ExitStack() as stack:  # what one cannot read for want of memory is the others' as ever
            for model in self._all:
                stack.callback(model.end_step, could_draft)
        for model in self._all:
            counts = model.counts
            self._counts.model(model.name, counts.forwards, counts.rows, counts.seconds)
        return sum(model.prompt_seconds for model in self._all)


def _block_model(
    config: DraftConfig, facts: DFlashFacts, runner: Any, *, may_wait: bool
) -> BlockModel:
    assert facts.mask_token_id is not None  # dflash_checks.py
    settings = BlockSettings(facts.block_facts, facts.mask_token_id, facts.causal, facts.vocab_size)
    return BlockModel(config.name, runner, settings, config.max_model_len, may_wait=may_wait)
