# SPDX-License-Identifier: Apache-2.0
"""Whether target, draft models and their KV can fit at all; what can be known before they load."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from vllm.platforms import current_platform
from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

from vllm_spec_ext.engine.models.draft_config import DraftConfig
from vllm_spec_ext.engine.models.weight_files import weight_bytes
from vllm_spec_ext.engine.starting.kv_blocks import expected_block_size
from vllm_spec_ext.engine.starting.scratch import ScratchNeed
from vllm_spec_ext.errors import SpecExtError

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig
    from vllm.config.parallel import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

_GIB = 1 << 30


PLAIN_DTYPES = ("auto", "float32", "float16", "bfloat16")
"""Of KV that is not quantized."""


def block_bytes(
    config: "ModelConfig", parallel: "ParallelConfig", block_size: int, kv_cache_dtype: str = "auto"
) -> int:
    """A KV block of all layers of a model, on one rank; of quantized KV a lower bound.

    Args:
        config: Of the model.
        parallel: Of the engine.
        block_size: Tokens of a block.
        kv_cache_dtype: Of the engine's KV, as the target's checkpoint settles it.
    """
    bits = _kv_bits(config, kv_cache_dtype)
    heads = config.get_num_kv_heads(parallel)
    numbers = 2 * config.get_num_layers(parallel) * heads * int(config.get_head_size())
    return numbers * block_size * bits // 8


def _kv_bits(config: "ModelConfig", kv_cache_dtype: str) -> int:
    """Of one number; of those that share bytes the fewest that any kind has."""
    if kv_cache_dtype not in PLAIN_DTYPES:
        return 8 if kv_cache_dtype.startswith(("fp8", "int8")) else 2
    is_auto = kv_cache_dtype == "auto"
    dtype: torch.dtype = config.dtype if is_auto else getattr(torch, kv_cache_dtype)
    return 8 * dtype.itemsize


def known_weight_bytes(config: "ModelConfig") -> int:
    """What a model's weights take at least; 0 where its files do not say it.

    Those of a name on the Hub are not there yet, and others are quantized while they load.
    """
    is_smaller = config.quantization is not None and not hasattr(
        config.hf_config, "quantization_config"
    )
    dtype: torch.dtype = config.dtype
    return 0 if is_smaller else weight_bytes(Path(config.model), dtype.itemsize)


def check_memory(
    args: "EngineArgs",
    target: "ModelConfig",
    parallel: "ParallelConfig",
    drafts: Sequence[DraftConfig],
    tree: bool,
    num_draft_tokens: int,
) -> None:
    """Refuse what cannot fit, before weights load.

    Only lower bounds are known here; vLLM measures the rest when it starts.

    Args:
        args: ``EngineArgs``.
        target: Its ``ModelConfig``.
        parallel: Its ``ParallelConfig``.
        drafts: The models beside it.
        tree: Drafts may have branches.
        num_draft_tokens: Most draft tokens of a request.

    Raises:
        SpecExtError: Weights, or the KV of one request and the scratch blocks, take more.
    """
    if not drafts:
        return
    block_size = expected_block_size(args)
    configs = [target, *(draft.model_config for draft in drafts)]
    # As vLLM settles it for the whole engine (0.32 ``EngineArgs.create_engine_config``).
    kv_dtype = str(resolve_kv_cache_dtype_string(args.kv_cache_dtype, target))
    each = sum(block_bytes(config, parallel, block_size, kv_dtype) for config in configs)
    scratch = ScratchNeed.of_drafts(tree, num_draft_tokens, args.max_num_seqs or 1, block_size)
    of_request = -(-target.max_model_len // block_size) + 1  # one is vLLM's null block
    needed = scratch.with_requests(of_request)
    given = args.kv_cache_memory_bytes
    if given is not None and needed * each > given:
        own = block_bytes(target, parallel, block_size, kv_dtype)
        raise SpecExtError(
            f"too little KV cache for {len(drafts)} draft model(s): found kv_cache_memory_bytes="
            f"{given}, expected at least {needed * each}: a block takes {each} bytes ({own} of the "
            f"target), and {needed} blocks of {block_size} tokens are needed, "
            f"{needed - of_request} for branches and the others for one request of "
            f"{target.max_model_len} tokens. Raise --kv-cache-memory-bytes, lower --max-model-len "
            "or --max-num-seqs, or use fewer or smaller draft models"
        )
    if args.cpu_offload_gb or args.offload_group_size:
        return  # some of the weights are elsewhere
    weights = sum(map(known_weight_bytes, configs)) // parallel.tensor_parallel_size
    total = int(current_platform.get_device_total_memory())
    if weights + needed * each > total:
        raise SpecExtError(
            f"too little memory for {len(drafts)} draft model(s): found {total / _GIB:.1f} GiB, "
            f"expected at least {(weights + needed * each) / _GIB:.1f} GiB a rank: "
            f"{weights / _GIB:.1f} GiB of weights, of target and drafts, and "
            f"{needed * each / _GIB:.1f} GiB of KV for one request. Use fewer or smaller draft "
            "models, more tensor parallelism, or lower --max-model-len"
        )
