# SPDX-License-Identifier: Apache-2.0
"""What a target must be for views of its cache; each reason told before weights load."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vllm.platforms import current_platform
from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

from vllm_spec_ext.engine.models.draft_checks import windows_of
from vllm_spec_ext.engine.models.memory_check import PLAIN_DTYPES
from vllm_spec_ext.engine.starting.kv_blocks import expected_block_size
from vllm_spec_ext.errors import UnsupportedError
from vllm_spec_ext.proposers.views import ViewSpec

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig
    from vllm.config.parallel import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs


def wanted_views(specs: Sequence[ViewSpec]) -> tuple[ViewSpec, ...]:
    """Views that will be used on this platform.

    So what is off takes no memory, and refuses no target.

    Args:
        specs: What the method asked for.
    """
    return tuple(spec for spec in specs if spec.on_cpus or not current_platform.is_cpu())


def check_views(
    specs: Sequence[ViewSpec],
    method: str,
    args: "EngineArgs",
    model: "ModelConfig",
    parallel: "ParallelConfig",
) -> None:
    """Refuse a target whose cache cannot be seen in part.

    Args:
        specs: What the method asked for.
        method: Ours, for the message.
        args: ``EngineArgs``.
        model: Target ``ModelConfig``.
        parallel: Target ``ParallelConfig``.

    Raises:
        UnsupportedError: With every reason found.
    """
    if not specs:
        return
    reasons = [*_reasons(args, model, parallel), *_dense_layers(specs, model)]
    if any(spec.kind == "retrieval" for spec in specs):
        reasons += _key_layout(args, model)
    if reasons:
        raise UnsupportedError(
            f"{method} runs the target over a part of its KV cache, and does not work with "
            + "; nor with ".join(reasons)
        )


def _reasons(args: "EngineArgs", model: "ModelConfig", parallel: "ParallelConfig") -> Iterator[str]:
    if model.use_mla:
        yield (
            "latent attention (MLA): found it, expected keys and values by head; use another model"
        )
    found = windows_of(model)
    if found is not None:
        yield (
            f"sliding windows: found {found}, expected full attention in all layers; start the "
            "engine with --disable-sliding-window, or use another model"
        )
    if model.attention_chunk_size:
        yield "chunked attention: expected full attention in all layers; use another model"
    if model.uses_mrope:
        yield (
            "multi-dimensional rotary positions (M-RoPE): expected one position a token; use a "
            "model of text alone"
        )
    if model.is_mm_prefix_lm:
        yield "a model that attends to images in both directions; use a model of text alone"
    if model.rswa_window is not None:
        yield (
            f"different windows for prompt and output: found {model.rswa_window} tokens, expected "
            "full attention; use another model"
        )
    if args.enable_lora:
        yield (
            "LoRA: found --enable-lora, expected none, as adapters are mapped to the rows of the "
            "target's own step; leave it out"
        )
    dtype = str(resolve_kv_cache_dtype_string(args.kv_cache_dtype, model))
    if dtype not in PLAIN_DTYPES:
        yield (
            f"a quantized KV cache: found {dtype}, expected the model's own data type; leave "
            "--kv-cache-dtype out"
        )
    if parallel.data_parallel_size > 1 and model.is_moe:
        yield (
            f"data_parallel_size={parallel.data_parallel_size} and a mixture of experts: its "
            "replicas run their passes together, and drafting does not; set it to 1"
        )


def _dense_layers(specs: Sequence[ViewSpec], model: "ModelConfig") -> Iterator[str]:
    number = model.get_total_num_hidden_layers()
    for spec in specs:
        wrong = [layer for layer in spec.dense_layers if not 0 <= layer < number]
        if wrong:
            yield f"dense_layers: found {wrong}, expected numbers from 0 to {number - 1}"


def _key_layout(args: "EngineArgs", model: "ModelConfig") -> Iterator[str]:
    """Pages are chosen by their keys, which must be readable in the cache."""
    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    block_size = expected_block_size(args)
    isa = _get_attn_isa(model.dtype, block_size, model.get_head_size(), "auto")
    if isa != "vec":
        yield (
            f'view "retrieval" on this CPU: found KV in the layout of "{isa}" (block size '
            f"{block_size}, head size {model.get_head_size()}, {model.dtype}), expected that of "
            '"vec": x86, a block size and a head size that are multiples of 32, and not bfloat16 '
            "where the processor has AMX; start the engine with --dtype float32 there; otherwise "
            'use the view "stream"'
        )
