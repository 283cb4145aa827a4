# SPDX-License-Identifier: Apache-2.0
"""Draft trees by the seams of vLLM's ``ModelState``: layout before attention, commit after.

(vLLM 0.32 ``v1/worker/gpu/model_states/interface.py``.)
"""

from abc import ABC
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    from vllm_spec_ext.engine.v2.runner import SpecRunnerV2Mixin


class TreeStateMixin(ABC):  # noqa: B024
    """Mixed in front of the target's ``ModelState`` by :func:`add_trees`.

    Abstract like that: Python exchanges an object's class only for one of the same layout.
    """

    def init_trees(self, runner: "SpecRunnerV2Mixin") -> None:
        """State of our own; called once."""
        self.spec_runner = runner

    def prepare_attn(
        self,
        input_batch: "InputBatch",
        cudagraph_mode: Any,
        block_tables: Any,
        slot_mappings: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Positions and slots of the step's trees; :class:`TreeAttention` expands the metadata."""
        trees = self.spec_runner.tree_attention
        if trees is not None and trees.plan is not None:
            trees.begin(input_batch.positions, slot_mappings[0])
        return super().prepare_attn(  # type: ignore[misc]
            input_batch, cudagraph_mode, block_tables, slot_mappings, *args, **kwargs
        )

    def postprocess_state(self, *args: Any, **kwargs: Any) -> None:
        """Commit the accepted branches before anything of the step counts as computed."""
        super().postprocess_state(*args, **kwargs)  # type: ignore[misc]
        self.spec_runner.commit_trees()


def add_trees(model_state: "DefaultModelState", runner: "SpecRunnerV2Mixin") -> None:
    """Give a target's model state our overrides.

    vLLM builds it inside ``load_model`` and offers no factory (0.32 ``init_model_state``), so the
    class is exchanged after construction.
    """
    base = type(model_state)
    model_state.__class__ = type(f"Tree{base.__name__}", (TreeStateMixin, base), {})
    cast(TreeStateMixin, model_state).init_trees(runner)
