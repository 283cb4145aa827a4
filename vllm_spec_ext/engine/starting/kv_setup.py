# SPDX-License-Identifier: Apache-2.0
"""Who uses the KV cache beside the target's own step: draft models, views, and trees."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_spec_ext.engine.models.kv_binding import KvParts, bind_models
from vllm_spec_ext.engine.trees.attention import TreeAttention, unsupported_reason, with_scratch
from vllm_spec_ext.engine.views.view_binding import bind_views

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_spec_ext.engine.runner import SpecRunnerMixin
    from vllm_spec_ext.engine.v2.runner import SpecRunnerV2Mixin

logger = logging.getLogger("vllm.spec_ext")


def add_scratch(
    runner: "SpecRunnerMixin | SpecRunnerV2Mixin",
    initialize: Callable[..., None],
    kv_cache_config: "KVCacheConfig",
    *args: Any,
    **kwargs: Any,
) -> range:
    """Have the KV cache made with scratch blocks behind those of the requests.

    Args:
        runner: Whose drafts need them.
        initialize: vLLM's own ``initialize_kv_cache`` of the runner.
        kv_cache_config: The blocks that the scheduler knows.
        args: Further ones of `initialize`, the first of which is ``is_profiling``.
        kwargs: Likewise.

    Returns:
        Ids of the scratch blocks; none while vLLM profiles.
    """
    is_profiling = bool(args and args[0]) or kwargs.get("is_profiling", False)
    first = kv_cache_config.num_blocks
    num_scratch = 0 if is_profiling else runner.drafter.scratch_need.behind(first)
    initialize(with_scratch(kv_cache_config, num_scratch), *args, **kwargs)
    return range(first, first + num_scratch)


def use_scratch(
    runner: "SpecRunnerMixin | SpecRunnerV2Mixin",
    kv: KvParts,
    scratch: range,
    no_trees: str | None = None,
) -> TreeAttention | None:
    """Give draft models their KV, views and trees their scratch blocks.

    All use the same scratch blocks: models in the tensors of other layers, views between the steps
    in which trees do. The models come first: views and trees are the target's, and it has one
    attention group once their layers are taken out.

    Args:
        runner: Its KV cache initialised.
        kv: What it is made of.
        scratch: Ids of its last blocks.
        no_trees: Why this runner verifies no branches, beside what is true of both.

    Returns:
        What lays out trees; None if the method drafts none, or the target cannot verify them.
    """
    if runner.drafter.models:
        bind_models(runner.drafter.models, runner, scratch, kv)
    if runner.drafter.views:
        bind_views(runner.drafter.views, runner, scratch, kv)
    if not runner.drafter.drafts_trees:
        return None
    reason = unsupported_reason(runner) or no_trees
    if reason is not None:
        logger.warning("vllm-spec-ext: only the first path of each draft is used: %s", reason)
        return None
    caches = [kv.by_layer[name] for name in runner.attn_groups[0][0].layer_names]
    return TreeAttention(runner, scratch, caches, kv.block_sizes[0])
