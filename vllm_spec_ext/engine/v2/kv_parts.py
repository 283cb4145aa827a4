# SPDX-License-Identifier: Apache-2.0
"""The KV cache of a V2 runner, as draft trees, models and views take it."""

from typing import TYPE_CHECKING

from vllm_spec_ext.engine.models.kv_binding import KvParts

if TYPE_CHECKING:
    from vllm_spec_ext.engine.v2.runner import SpecRunnerV2Mixin


def kv_parts(runner: "SpecRunnerV2Mixin") -> KvParts:
    """Of all layers; the cache is there."""
    layers = runner.compilation_config.static_forward_context
    names = [name for group in runner.kv_cache_config.kv_cache_groups for name in group.layer_names]
    caches = {name: layers[name].kv_cache for name in names}
    return KvParts(caches, runner.block_tables.block_sizes, runner.kernel_block_sizes)
