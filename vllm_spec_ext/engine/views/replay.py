# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: passes over views, run by all ranks as rank 0 plans them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from vllm_spec_ext.engine.views.view_pass import ViewPass

if TYPE_CHECKING:
    import torch

    from vllm_spec_ext.engine.drafting.ranks import Ranks
    from vllm_spec_ext.engine.views.paged_target import PagedTarget


@dataclass(frozen=True)
class RunView:
    """A pass of the target; it stands behind the draft models."""

    index: int
    plan: ViewPass

    def run(self, models: Sequence[Any]) -> "torch.Tensor":
        """Its logits."""
        return cast("PagedTarget", models[-1]).run_view(self.index, self.plan)


class SharedTargetPasses:
    """The target's passes as rank 0 sees them, if there are other ranks."""

    def __init__(self, ranks: "Ranks") -> None:
        """Through these ranks."""
        self._ranks = ranks

    def run_view(self, index: int, plan: ViewPass) -> "torch.Tensor":
        """See :meth:`.paged_target.PagedTarget.run_view`."""
        return self._ranks.work_together(RunView(index, plan))
