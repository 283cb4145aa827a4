# SPDX-License-Identifier: Apache-2.0
"""What an EAGLE-3 checkpoint must be to draft for a target; told before weights load."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_spec_ext.engine.models.eagle_checkpoint import Eagle3Facts, drafts_in_parallel
from vllm_spec_ext.engine.models.weight_files import tensor_shapes

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig

CLASSES = ("Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM")
"""vLLM's classes of EAGLE-3 heads that are known to work here."""


def eagle3_reasons(draft: "ModelConfig", target: "ModelConfig") -> Iterator[str]:
    """Why a checkpoint cannot draft for this target.

    Args:
        draft: vLLM's configuration of the checkpoint.
        target: The target's.
    """
    from vllm.model_executor.models.interfaces import supports_eagle3

    names = ", ".join(draft.architectures)
    kind, _ = draft.registry.resolve_model_cls(draft.architectures, draft)
    if kind.__name__ not in CLASSES or drafts_in_parallel(draft.architectures):
        yield (
            f"found architecture {names}, expected an EAGLE-3 head of {' or '.join(CLASSES)} that "
            "drafts one token after the other; use another checkpoint"
        )
        return
    theirs, architecture = target.registry.resolve_model_cls(target.architectures, target)
    if not supports_eagle3(theirs):
        yield (
            f"the target's class in vLLM, {architecture}, does not give the hidden states of its "
            "layers (SupportsEagle3); use a draft model of its own instead of an EAGLE-3 head"
        )
    facts = Eagle3Facts.of(draft.hf_config)
    yield from _sizes(facts, target)
    folder = Path(draft.model)
    shapes = tensor_shapes(folder) if folder.is_dir() else {}
    if shapes:
        yield from _tensors(facts, target, shapes)


def _sizes(facts: Eagle3Facts, target: "ModelConfig") -> Iterator[str]:
    hidden_size = target.get_hidden_size()
    if facts.target_hidden_size != hidden_size:
        yield (
            f"found a head over hidden states of size {facts.target_hidden_size}, expected the "
            f"target's {hidden_size}; use the checkpoint that was trained for this target"
        )
    if not facts.num_states and facts.hidden_size != hidden_size:
        yield (
            f"found hidden size {facts.hidden_size} and no layer that combines states "
            f"(use_aux_hidden_state is false), expected the target's {hidden_size}"
        )
    num_layers = target.get_total_num_hidden_layers()
    wrong = [layer for layer in facts.layers or () if not 0 <= layer <= num_layers]
    if wrong:
        yield (
            f"found eagle_aux_hidden_state_layer_ids={list(facts.layers or ())}, expected numbers "
            f"from 0 to {num_layers}, as many layers as the target has; use the checkpoint that "
            "was trained for this target"
        )
    elif facts.layers and len(set(facts.layers)) != facts.num_states:
        yield (
            f"found eagle_aux_hidden_state_layer_ids={list(facts.layers)}, expected "
            f"{facts.num_states} different layers"
        )


def _tensors(
    facts: Eagle3Facts,
    target: "ModelConfig",
    shapes: dict[str, tuple[int, ...]],
) -> Iterator[str]:
    advice = "download it again, or use another checkpoint"
    hidden_size, vocab_size = facts.hidden_size, target.get_vocab_size()
    if facts.num_states:
        expected = (hidden_size, facts.num_states * facts.target_hidden_size)
        found = shapes.get("fc.weight")
        if found is None:
            yield (
                "found no tensor fc.weight, expected the layer that combines the target's states "
                f"in an EAGLE-3 checkpoint; {advice}"
            )
        elif found != expected:
            yield (
                f"found fc.weight of shape {list(found)}, expected {list(expected)} for "
                f"{facts.num_states} states of size {facts.target_hidden_size}; {advice}"
            )
    size = facts.draft_vocab_size
    if size != vocab_size and shapes.get("d2t") != (size,):
        found = shapes.get("d2t")
        yield (
            f"found {'no tensor d2t' if found is None else f'd2t of shape {list(found)}'}, "
            f"expected one number for each of the {size} tokens of its own vocabulary (the "
            f"target's has {vocab_size}), from which the target's ids are made; {advice}"
        )
    if "lm_head.weight" not in shapes and size != vocab_size:
        yield (
            f"found no tensor lm_head.weight, expected one of {size} rows, as the target's has "
            f"{vocab_size}; {advice}"
        )
    if "embed_tokens.weight" not in shapes and hidden_size != target.get_hidden_size():
        yield (
            f"found no tensor embed_tokens.weight, expected one, as the target's embeddings are "
            f"of size {target.get_hidden_size()} and the head's of {hidden_size}; {advice}"
        )
