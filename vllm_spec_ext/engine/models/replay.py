# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: what rank 0 lets its draft models compute, all ranks compute.

The other ranks keep no books. Block ids mean the same on every rank, so the plan of a pass is all
that they need.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from vllm_spec_ext.engine.models.block_pass import BlockPass, ContextRows
from vllm_spec_ext.engine.models.forward_pass import ForwardPass

if TYPE_CHECKING:
    import torch

    from vllm_spec_ext.engine.drafting.ranks import Ranks
    from vllm_spec_ext.engine.models.block_model import BlockOutput
    from vllm_spec_ext.engine.models.paged_blocks import PagedBlocks
    from vllm_spec_ext.engine.models.paged_model import PagedModel
    from vllm_spec_ext.proposers.models import BlockWeights

ResultT_co = TypeVar("ResultT_co", covariant=True)


class Work(Protocol[ResultT_co]):
    """A message to the other ranks."""

    def run(self, models: "Sequence[PagedModel]") -> ResultT_co:
        """Do it on this rank."""


@dataclass(frozen=True)
class RunPass:
    """A forward pass of one model."""

    index: int
    plan: ForwardPass

    def run(self, models: "Sequence[PagedModel]") -> "torch.Tensor":
        """Its logits."""
        return models[self.index].forward(self.plan)


@dataclass(frozen=True)
class WriteContext:
    """The context of a block drafter; each rank has the target's states."""

    index: int
    plan: ContextRows

    def run(self, models: "Sequence[PagedModel]") -> None:
        """Write."""
        cast("PagedBlocks", models[self.index]).write_context(self.plan)


@dataclass(frozen=True)
class RunBlocks:
    """Blocks of a block drafter."""

    index: int
    plan: BlockPass

    def run(self, models: "Sequence[PagedModel]") -> "BlockOutput":
        """Their candidates."""
        return cast("PagedBlocks", models[self.index]).run_blocks(self.plan)


@dataclass(frozen=True)
class ExchangeWeights:
    """Other weights of a block drafter, whole ones: each rank takes its part."""

    index: int
    number: int
    weights: "BlockWeights | None"  # None = all ranks have them

    def run(self, models: "Sequence[PagedModel]") -> None:
        """Load, if need be, and use."""
        cast("PagedBlocks", models[self.index]).exchange(self.number, self.weights)


@dataclass(frozen=True)
class CopyBlocks:
    """Copies of KV blocks of one model."""

    index: int
    pairs: tuple[tuple[int, int], ...]

    def run(self, models: "Sequence[PagedModel]") -> None:
        """Copy."""
        models[self.index].copy_blocks(self.pairs)


@dataclass(frozen=True)
class Reload:
    """Other weights of one model, whole ones: each rank takes its part."""

    index: int
    weights: "tuple[tuple[str, torch.Tensor], ...]"  # on the CPU

    def run(self, models: "Sequence[PagedModel]") -> None:
        """Load."""
        models[self.index].reload(self.weights)


class SharedModel:
    """A model as rank 0 sees it, if there are others."""

    def __init__(self, ranks: "Ranks", index: int, model: "PagedModel") -> None:
        """Wrap this rank's part."""
        self._ranks = ranks
        self._index = index
        self._model = model

    def forward(self, plan: ForwardPass) -> "torch.Tensor":
        """See :meth:`.paged_model.PagedModel.forward`."""
        return self._ranks.work_together(RunPass(self._index, plan))

    def write_context(self, plan: ContextRows, wait: bool = False) -> None:
        """See :meth:`.paged_blocks.PagedBlocks.write_context`; nothing waits here."""
        assert not wait
        self._ranks.work_together(WriteContext(self._index, plan))

    def run_blocks(self, plan: BlockPass) -> "BlockOutput":
        """See :meth:`.paged_blocks.PagedBlocks.run_blocks`."""
        return self._ranks.work_together(RunBlocks(self._index, plan))

    def exchange(self, number: int, weights: "BlockWeights") -> None:
        """See :meth:`.paged_blocks.PagedBlocks.exchange`; all ranks keep the same ones."""
        has_them = cast("PagedBlocks", self._model).has(number)
        work = ExchangeWeights(self._index, number, None if has_them else weights)
        self._ranks.work_together(work)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See :meth:`.paged_model.PagedModel.copy_blocks`."""
        self._ranks.work_together(CopyBlocks(self._index, tuple(pairs)))

    def reload(self, weights: "Iterable[tuple[str, torch.Tensor]]") -> None:
        """See :meth:`.paged_model.PagedModel.reload`."""
        on_cpu = tuple((name, tensor.cpu()) for name, tensor in weights)
        self._ranks.work_together(Reload(self._index, on_cpu))
