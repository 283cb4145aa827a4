# SPDX-License-Identifier: Apache-2.0
"""The views of one engine's target."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from vllm_spec_ext.engine.drafting.ranks import Ranks
from vllm_spec_ext.engine.models.batch_events import BlockEvents
from vllm_spec_ext.engine.models.hosted_model import BatchRow
from vllm_spec_ext.engine.models.memory_check import block_bytes
from vllm_spec_ext.engine.models.replay import SharedPasses
from vllm_spec_ext.engine.models.weight_files import weight_bytes
from vllm_spec_ext.engine.views.page_layout import PageBudget
from vllm_spec_ext.engine.views.paged_target import PagedTarget
from vllm_spec_ext.engine.views.target_view import HostedView
from vllm_spec_ext.engine.views.view_books import ViewBooks
from vllm_spec_ext.engine.watching.counts import WorkerCounts
from vllm_spec_ext.proposers.views import ReadFacts, ViewSpec

if TYPE_CHECKING:
    from vllm.config.cache import CacheConfig
    from vllm.config.vllm import VllmConfig

    from vllm_spec_ext.engine.models.paged_model import PagedModel

logger = logging.getLogger("vllm.spec_ext")


class ViewHost:
    """Owned by the drafter. All ranks run the passes; rank 0 alone keeps books and decides."""

    paged: PagedTarget

    def __init__(self, specs: Sequence[ViewSpec]) -> None:
        """Without a target; :meth:`load` brings it."""
        self.specs = tuple(specs)
        self.views: list[HostedView] = []
        self.books = ViewBooks()
        self._counts = WorkerCounts()
        self._cache_config: CacheConfig | None = None

    def __bool__(self) -> bool:
        return bool(self.specs)

    def load(
        self,
        vllm_config: "VllmConfig",
        ranks: Ranks,
        target: torch.nn.Module,
        device: torch.device,
        models: "Sequence[PagedModel]",
        counts: WorkerCounts,
    ) -> None:
        """Take the target, on every rank, once in the life of an engine.

        Args:
            vllm_config: The engine's.
            ranks: The workers that run the target together.
            target: With its weights.
            device: Of these.
            models: Draft models, which the ranks run together, too.
            counts: Of this worker.
        """
        if not self:
            return
        self.paged = PagedTarget(target, vllm_config, device)
        # Behind the models, as `SharedPasses` has it.
        ranks.share_models([*models, cast("PagedModel", self.paged)])
        runner = self.paged if ranks.is_alone else SharedPasses(ranks)
        max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        reads = read_facts(vllm_config, target)
        warn_of_idle_views(self.specs, vllm_config)
        for index, spec in enumerate(self.specs):
            view = HostedView(spec, index, runner, self.books, max_num_seqs)
            view.reads = reads
            self.views.append(view)
        self._counts = counts
        self._cache_config = vllm_config.cache_config

    def without_means(self, num_bytes: int) -> int:
        """What is left of memory for KV when page means take their part of it."""
        rows = self._rows_of_a_mean
        return num_bytes if rows is None else num_bytes * rows // (rows + 1)

    def with_means(self, num_bytes: int) -> int:
        """The least memory of which so much is left for KV."""
        rows = self._rows_of_a_mean
        return num_bytes if rows is None else -(-num_bytes * (rows + 1) // rows)

    @property
    def _rows_of_a_mean(self) -> int | None:
        """Keys and values of a block, whose mean is one key; None if no view has means."""
        if self._cache_config is None or all(spec.kind != "retrieval" for spec in self.specs):
            return None
        return 2 * self._cache_config.block_size  # which vLLM fixes behind ``load_model``

    def bind(self, num_blocks: int, block_size: int, spill: range, **caches: Any) -> None:
        """Use these KV blocks from now on.

        Args:
            num_blocks: Of the requests.
            block_size: Tokens a block.
            spill: Blocks that belong to no request.
            caches: Of :meth:`.paged_target.PagedTarget.bind`.
        """
        self.books.bind(num_blocks, block_size, spill)
        self.paged.bind(self.specs, block_size=block_size, **caches)

    def update(self, events: BlockEvents) -> None:
        """Blocks change hands, before a step runs."""
        if not self:
            return
        for view in self.views:
            view.forget(events.gone)
        self.books.update(events)

    def begin_step(self, rows: Sequence[BatchRow]) -> None:
        """The target ran these rows, and drafting begins."""
        self.books.begin_step(rows)

    def end_step(self) -> None:
        """Drafting is over; spill blocks are free again."""
        self.books.end_step()
        for view in self.views:
            counts = view.counts
            self._counts.model(view.spec.name, counts.forwards, counts.rows, counts.seconds)


def warn_of_idle_views(specs: Sequence[ViewSpec], vllm_config: "VllmConfig") -> None:
    """Say that a view can never hide anything, as no request is longer than it."""
    longest, block_size = (
        vllm_config.model_config.max_model_len,
        vllm_config.cache_config.block_size,
    )
    for spec in specs:
        if (
            spec.kind == "full"
            or PageBudget.of(spec, block_size).seen(longest, block_size) < longest
        ):
            continue
        logger.warning(
            "vllm-spec-ext: view %s shows %d tokens of a request, found max_model_len %d, expected "
            "more: it never hides anything, so it saves no time; lower its budget, raise "
            "max_model_len, or use another method",
            spec.name,
            spec.budget,
            longest,
        )


def read_facts(vllm_config: "VllmConfig", target: torch.nn.Module) -> ReadFacts:
    """What a pass of the target reads, on one rank."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    # On CPUs weights are packed when they are loaded, and the module's own are empty.
    loaded = sum(weight.numel() * weight.element_size() for weight in target.parameters())
    dtype: torch.dtype = model.dtype
    on_disk = weight_bytes(Path(model.model), dtype.itemsize) // parallel.tensor_parallel_size
    return ReadFacts(max(1, loaded, on_disk), max(1, block_bytes(model, parallel, 1)))
