# SPDX-License-Identifier: Apache-2.0
"""Starts an engine on a tiny model in this process, small and quick."""

from pathlib import Path
from typing import Any

from one_process import without_collection

ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 160,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 96,
    "block_size": 32,
    "kv_cache_memory_bytes": 32 << 20,  # a module may have dozens of engines
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "seed": 0,
}


def start_engine(model: Path | str, **arguments: Any) -> Any:
    """An ``LLM``; other arguments than the model's win over :data:`ARGUMENTS`."""
    from vllm import LLM

    with without_collection():
        return LLM(**{"model": str(model), **ARGUMENTS, **arguments})
