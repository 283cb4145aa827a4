# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: what rank 0 lets its draft models compute, all ranks compute.

The other ranks keep no books. Block ids mean the same on every rank, so the plan of a pass is all
that they need.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from vllm_spec_ext.engine.models.block_pass import BlockPass, ContextRows
from vllm_spec_ext.engine.models.forward_pass import ForwardPass

if TYPE_CHECKING:
    import torch

    from vllm_spec_ext.engine.drafting.ranks import Ranks
    from vllm_spec_ext.engine.models.block_model import BlockOutput
    from vllm_spec_ext.engine.models.paged_blocks import PagedBlocks
    from vllm_spec_ext.engine.models.paged_model import PagedModel
    from vllm_spec_ext.engine.views.view_pass import ViewPass
    from vllm_spec_ext.proposers.models import BlockWeights

TARGET = -1
"""Index of the target's passes over views, which stand behind the draft models."""

ResultT_co = TypeVar("ResultT_co", covariant=True)


class Work(Protocol[ResultT_co]):
    """A message to the other ranks."""

    def run(self, models: "Sequence[PagedModel]") -> ResultT_co:
        """Do it on this rank."""


@dataclass(frozen=True)
class ModelCall:
    """A method that each rank calls of its part of a model."""

    index: int
    call: methodcaller

    def run(self, models: Sequence[Any]) -> Any:
        """Call it; returns what it does."""
        return self.call(models[self.index])


class _Shared:
    """What rank 0 sees of something that all ranks have a part of."""

    def __init__(self, ranks: "Ranks", index: int) -> None:
        self._ranks = ranks
        self._index = index

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._ranks.work_together(ModelCall(self._index, methodcaller(method, *arguments)))


class SharedModel(_Shared):
    """A model as rank 0 sees it, if there are others."""

    def __init__(self, ranks: "Ranks", index: int, model: "PagedModel") -> None:
        """Wrap this rank's part."""
        super().__init__(ranks, index)
        self._model = model

    def forward(self, plan: ForwardPass) -> "torch.Tensor":
        """See :meth:`.paged_model.PagedModel.forward`."""
        return cast("torch.Tensor", self._call("forward", plan))

    def write_context(self, plan: ContextRows, wait: bool = False) -> None:
        """See :meth:`.paged_blocks.PagedBlocks.write_context`; nothing waits here."""
        assert not wait
        self._call("write_context", plan)

    def run_blocks(self, plan: BlockPass) -> "BlockOutput":
        """See :meth:`.paged_blocks.PagedBlocks.run_blocks`."""
        return cast("BlockOutput", self._call("run_blocks", plan))

    def exchange(self, number: int, weights: "BlockWeights") -> None:
        """See :meth:`.paged_blocks.PagedBlocks.exchange`; whole weights, of which each rank takes
        its part, and which all of them keep."""
        has_them = cast("PagedBlocks", self._model).has(number)
        self._call("exchange", number, None if has_them else weights)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See :meth:`.paged_model.PagedModel.copy_blocks`."""
        self._call("copy_blocks", tuple(pairs))

    def reload(self, weights: "Iterable[tuple[str, torch.Tensor]]") -> None:
        """See :meth:`.paged_model.PagedModel.reload`; whole weights, as for :meth:`exchange`."""
        self._call("reload", tuple((name, tensor.cpu()) for name, tensor in weights))


class SharedPasses(_Shared):
    """The target's passes over views as rank 0 sees them, if there are other ranks."""

    def __init__(self, ranks: "Ranks") -> None:
        """Through these ranks."""
        super().__init__(ranks, TARGET)

    def run_view(self, index: int, plan: "ViewPass") -> "torch.Tensor":
        """See :meth:`..views.paged_target.PagedTarget.run_view`."""
        return cast("torch.Tensor", self._call("run_view", index, plan))
