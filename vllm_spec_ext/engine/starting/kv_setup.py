# SPDX-License-Identifier: Apache-2.0
"""Who uses the KV cache beside the target's own step: draft models, views, and trees."""

import logging
from typing import TYPE_CHECKING

from vllm_spec_ext.engine.models.kv_binding import bind_models
from vllm_spec_ext.engine.trees.attention import TreeAttention, unsupported_reason
from vllm_spec_ext.engine.views.view_binding import bind_views

if TYPE_CHECKING:
    from vllm_spec_ext.engine.runner import SpecRunnerMixin

logger = logging.getLogger("vllm.spec_ext")


def use_scratch(runner: "SpecRunnerMixin", scratch: range) -> TreeAttention | None:
    """Give draft models their KV, views and trees their scratch blocks.

    All use the same scratch blocks: models in the tensors of other layers, views between the steps
    in which trees do. The models come first: views and trees are the target's, and it has one
    attention group once their layers are taken out.

    Returns:
        What lays out trees; None if the method drafts none, or the target cannot verify them.
    """
    if runner.drafter.models:
        bind_models(runner.drafter.models, runner, scratch, runner.kv_by_layer)
    if runner.drafter.views:
        bind_views(runner.drafter.views, runner, scratch, runner.kv_by_layer)
    if not runner.drafter.info.tree:
        return None
    reason = unsupported_reason(runner)
    if reason is not None:
        logger.warning("vllm-spec-ext: only the first path of each draft is used: %s", reason)
        return None
    return TreeAttention(runner, scratch, runner.kv_by_layer)
