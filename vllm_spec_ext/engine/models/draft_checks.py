# SPDX-License-Identifier: Apache-2.0
"""What a draft model must be to run beside a target; each reason told before weights load."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_spec_ext.engine.models.dflash_checks import dflash_reasons
from vllm_spec_ext.engine.models.eagle_checks import eagle3_reasons
from vllm_spec_ext.engine.models.same_ids import why_ids_differ
from vllm_spec_ext.engine.models.weight_files import missing_files, tensor_shapes, weight_files
from vllm_spec_ext.errors import UnsupportedError, shown
from vllm_spec_ext.proposers.models import ModelSpec

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig
    from vllm.config.parallel import ParallelConfig

SHARED_BLOCKS = "the two share KV blocks and their block table"


def check_draft_model(
    spec: ModelSpec, draft: "ModelConfig", target: "ModelConfig", parallel: "ParallelConfig"
) -> None:
    """Refuse a draft model that cannot work.

    Args:
        spec: What the method asked for.
        draft: vLLM's configuration of it.
        target: The target's.
        parallel: The target's, which the draft shares.

    Raises:
        UnsupportedError: With every reason found.
    """
    if spec.kind == "dflash":  # whose class in vLLM knows nothing of windows that are switched off
        reasons = [*_shared_reasons(draft, target, parallel), *dflash_reasons(draft, target)]
    elif spec.kind == "eagle3":
        reasons = [
            *_shared_reasons(draft, target, parallel),
            *_windows("the draft", draft),
            *eagle3_reasons(draft, target),
        ]
    else:
        reasons = list(_reasons(draft, target, parallel))
    if reasons:
        raise UnsupportedError(
            f"draft model {spec.name} ({shown(spec.model)}) does not work beside "
            f"{shown(target.model)}: " + "; and ".join(reasons)
        )


def _reasons(
    draft: "ModelConfig", target: "ModelConfig", parallel: "ParallelConfig"
) -> Iterator[str]:
    if not draft.registry.is_text_generation_model(draft.architectures, draft):
        yield (
            f"found architecture {', '.join(draft.architectures)}, expected a model that "
            "generates text; give the folder of one"
        )
        return
    folder = Path(draft.model)
    shape = tensor_shapes(folder).get("fc.weight") if folder.is_dir() else None
    if shape is not None:
        yield (
            f"found an EAGLE head that is none of EAGLE-3 (fc.weight of shape {list(shape)}), "
            "expected a model of its own or an EAGLE-3 checkpoint; use one of these, or vLLM's own "
            'method "eagle"'
        )
        return
    yield from _shared_reasons(draft, target, parallel)
    yield from _windows("the draft", draft)
    difference = why_ids_differ(draft, target)
    if difference is not None:
        yield difference


def _shared_reasons(
    draft: "ModelConfig", target: "ModelConfig", parallel: "ParallelConfig"
) -> Iterator[str]:
    """Of any model that lives in the target's KV blocks."""
    yield from _weights(draft)
    yield from _kinds("the draft", draft)
    yield from _kinds("the target", target)
    yield from _windows("the target", target)
    yield from _parallel(draft, target, parallel)


def _weights(draft: "ModelConfig") -> Iterator[str]:
    folder = Path(draft.model)
    if not folder.is_dir():
        return
    missing = missing_files(folder)
    if missing:
        yield (
            f"found no {missing[0]} in {shown(draft.model)}, expected each of the files that its "
            "index lists; download it again"
        )
    elif not weight_files(folder):
        yield f"found no weights in {shown(draft.model)}, expected *.safetensors; copy them there"


def windows_of(config: "ModelConfig") -> str | None:
    """What a model has instead of full attention in all layers, in words; None = nothing."""
    window = config.get_sliding_window()
    if window is not None:
        return f"a window of {window} tokens"
    kinds = set(getattr(config.hf_text_config, "layer_types", None) or ()) - {"full_attention"}
    if config.disable_sliding_window:
        kinds.discard("sliding_attention")  # whose windows are None then
    return ", ".join(sorted(kinds)) or None


def _kinds(whose: str, config: "ModelConfig") -> Iterator[str]:
    """Attention that does not live in one KV group of full attention."""
    if config.is_encoder_decoder:
        yield f"{whose} is an encoder-decoder model, expected a decoder-only one"
    if config.is_multimodal_model and whose == "the draft":
        yield f"{whose} is multi-modal, expected a model of text alone"
    if config.is_hybrid or config.is_attention_free:
        yield f"{whose} has layers without attention (linear or recurrent); {SHARED_BLOCKS}"
    if config.use_mla:
        yield f"{whose} has latent attention (MLA), expected full attention; {SHARED_BLOCKS}"
    if config.attention_chunk_size:
        yield f"{whose} has chunked attention, expected full attention; {SHARED_BLOCKS}"


def _windows(whose: str, config: "ModelConfig") -> Iterator[str]:
    found = windows_of(config)
    if found is not None:
        window = config.get_sliding_window()
        length = "its window" if window is None else f"{window} tokens"
        yield (
            f"{whose} has {found}, expected full attention in all layers; {SHARED_BLOCKS}. Use a "
            "model of full attention, or start the engine with --disable-sliding-window: then it "
            f"reads texts of up to {length}"
        )


def _parallel(
    draft: "ModelConfig", target: "ModelConfig", parallel: "ParallelConfig"
) -> Iterator[str]:
    size = parallel.tensor_parallel_size
    heads = draft.model_arch_config.total_num_attention_heads
    kv_heads = draft.get_total_num_kv_heads()
    width = getattr(draft.hf_text_config, "intermediate_size", 0)
    advice = "use a smaller size that divides them, or another draft model"
    if heads % size:
        yield (
            f"found {heads} attention heads, expected a multiple of tensor_parallel_size={size}; "
            f"{advice}"
        )
    elif kv_heads % size and size % kv_heads:
        yield (
            f"found {kv_heads} KV heads, expected a multiple or a divisor of "
            f"tensor_parallel_size={size}; {advice}"
        )
    if isinstance(width, int) and width % size:
        yield (
            f"found an intermediate size of {width}, expected a multiple of "
            f"tensor_parallel_size={size}; {advice}"
        )
    if parallel.data_parallel_size > 1 and (draft.is_moe or target.is_moe):
        yield (
            f"data_parallel_size={parallel.data_parallel_size} with a mixture of experts: its "
            "replicas run their passes together, and drafting does not; set it to 1"
        )
