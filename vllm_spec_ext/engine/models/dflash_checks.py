# SPDX-License-Identifier: Apache-2.0
"""What a DFlash checkpoint must be to draft for a target; told before weights load."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_spec_ext.engine.models.dflash_checkpoint import DFlashFacts, extras_file
from vllm_spec_ext.engine.models.same_ids import why_ids_differ
from vllm_spec_ext.engine.models.weight_files import tensor_shapes
from vllm_spec_ext.engine.starting.target_tokenizer import load_tokenizer
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.fingerprint import tokenizer_fingerprint
from vllm_spec_ext.proposers.draft_columns import ids_problem, shapes_and_ids
from vllm_spec_ext.proposers.nar.guesses import SlotGuesses
from vllm_spec_ext.proposers.nar.layout import EXTRAS_NAME, NarConfig
from vllm_spec_ext.tensor_files import reading

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig

CLASS = "DFlashQwen3ForCausalLM"
"""vLLM's class of DFlash drafters that is known to work here."""

_ADVICE = "use the checkpoint that was trained for this target"
_AGAIN = "download it again, or use another checkpoint"


def dflash_reasons(draft: "ModelConfig", target: "ModelConfig") -> Iterator[str]:
    """Why a checkpoint cannot draft for this target.

    Args:
        draft: vLLM's configuration of the checkpoint.
        target: The target's.
    """
    from vllm.model_executor.models.interfaces import supports_eagle3

    names = ", ".join(draft.architectures)
    kind, _ = draft.registry.resolve_model_cls(draft.architectures, draft)
    if kind.__name__ != CLASS:
        yield (
            f"found architecture {names}, expected DFlashDraftModel ({CLASS} in vLLM): heads that "
            "other architectures add are not known here; use another checkpoint"
        )
        return
    theirs, architecture = target.registry.resolve_model_cls(target.architectures, target)
    if not supports_eagle3(theirs):
        yield (
            f"the target's class in vLLM, {architecture}, does not give the hidden states of its "
            "layers (SupportsEagle3); use a draft model of its own instead"
        )
    facts = DFlashFacts.of(draft.hf_config, draft.model)
    yield from _sizes(facts, target)
    yield from _heads(facts, target)
    yield from _layers(facts, target)
    yield from _ids(facts, draft, target)
    folder = Path(draft.model)
    shapes = tensor_shapes(folder) if folder.is_dir() else {}
    if shapes:
        yield from _tensors(facts, target, shapes)
    if facts.nar.has_tensors and (shapes or not folder.is_dir()):
        yield from _extras(facts, extras_file(draft.model))


def _sizes(facts: DFlashFacts, target: "ModelConfig") -> Iterator[str]:
    hidden_size = target.get_hidden_size()
    if facts.target_hidden_size != hidden_size:
        yield (
            f"found a drafter over hidden states of size {facts.target_hidden_size}, expected the "
            f"target's {hidden_size}; {_ADVICE}"
        )
    if facts.block_size < 2:
        yield f"found block_size={facts.block_size}, expected 2 or more; {_AGAIN}"
    if facts.samples_anchor:
        yield (
            "found sample_from_anchor, expected rows of masks alone to foresee tokens; use another "
            "checkpoint"
        )
    if facts.has_window:
        yield (
            "found layers with sliding windows (use_swa or layer_types), expected full attention; "
            "use another checkpoint"
        )


def _heads(facts: DFlashFacts, target: "ModelConfig") -> Iterator[str]:
    heads = facts.nar.heads
    if heads is None:
        return
    sizes = (heads.hidden_size, heads.vocab_size)
    expected = (target.get_hidden_size(), target.get_vocab_size())
    if sizes != expected:
        yield (
            f"found heads for a hidden size and a vocabulary of {sizes}, expected the target's "
            f"{expected}; {_ADVICE}"
        )
    elif facts.hidden_size != heads.hidden_size:
        yield (
            f"found heads for a hidden size of {heads.hidden_size}, expected the drafter's "
            f"{facts.hidden_size}, whose states theirs become; {_AGAIN}"
        )
    if heads.num_heads >= facts.block_size:
        yield (
            f"found {heads.num_heads} heads, expected at most one for each of the "
            f"{facts.block_size - 1} slots; {_AGAIN}"
        )


def _layers(facts: DFlashFacts, target: "ModelConfig") -> Iterator[str]:
    num_layers = target.get_total_num_hidden_layers()
    known = facts.num_target_layers
    if known is not None and known != num_layers:
        yield f"found num_target_layers={known}, expected the target's {num_layers}; {_ADVICE}"
    if facts.layers is None:
        yield (
            "found no dflash_config.target_layer_ids, expected the layers of the target whose "
            f"hidden states it reads; {_AGAIN}"
        )
        return
    shown = [layer - 1 for layer in facts.layers]
    if any(not 0 <= layer < num_layers for layer in shown):
        yield (
            f"found target_layer_ids={shown}, expected numbers from 0 to {num_layers - 1}, as the "
            f"target has {num_layers} layers; {_ADVICE}"
        )
    elif len(set(shown)) != len(shown) or sorted(shown) != shown:
        yield f"found target_layer_ids={shown}, expected different ones that ascend; {_AGAIN}"


def _ids(facts: DFlashFacts, draft: "ModelConfig", target: "ModelConfig") -> Iterator[str]:
    vocab_size = target.get_vocab_size()
    if facts.vocab_size != vocab_size:
        yield (
            f"found a vocabulary of {facts.vocab_size} tokens, expected the target's "
            f"{vocab_size}; {_ADVICE}"
        )
    mask = facts.mask_token_id
    if mask is None or not 0 <= mask < facts.vocab_size:
        yield (
            f"found mask_token_id={mask}, expected the id of the token that stands for a mask, "
            f"below {facts.vocab_size}; {_AGAIN}"
        )
    if (Path(draft.model) / "tokenizer.json").is_file():  # mostly there is none: the target's
        difference = why_ids_differ(draft, target)
        if difference is not None:
            yield difference
    known = facts.nar.tokenizer_fingerprint
    tokenizer = load_tokenizer(target) if known is not None else None
    if tokenizer is not None and known != tokenizer_fingerprint(tokenizer):
        yield f"it was trained with another tokenizer than the target's; {_ADVICE}"


def _tensors(
    facts: DFlashFacts, target: "ModelConfig", shapes: dict[str, tuple[int, ...]]
) -> Iterator[str]:
    expected = (facts.hidden_size, facts.num_states * facts.target_hidden_size)
    found = shapes.get("fc.weight")
    if found is None:
        yield (
            "found no tensor fc.weight, expected the layer that combines the target's states; "
            f"{_AGAIN}"
        )
    elif facts.layers is not None and found != expected:
        yield (
            f"found fc.weight of shape {list(found)}, expected {list(expected)} for "
            f"{facts.num_states} states of size {facts.target_hidden_size}; {_AGAIN}"
        )
    size, vocab_size = facts.draft_vocab_size, target.get_vocab_size()
    if size != vocab_size and shapes.get("d2t") != (size,):
        given = shapes.get("d2t")
        what = "no tensor d2t" if given is None else f"d2t of shape {list(given)}"
        yield (
            f"found {what}, expected one number for each of the {size} tokens of its own "
            f"vocabulary; {_AGAIN}"
        )
    has_other_size = facts.hidden_size != target.get_hidden_size()
    if "lm_head.weight" not in shapes and (size != vocab_size or has_other_size):
        yield (
            f"found no tensor lm_head.weight, expected one, as the target's does not fit; {_AGAIN}"
        )
    if "embed_tokens.weight" not in shapes and has_other_size:
        yield (
            "found no tensor embed_tokens.weight, expected one, as the target's embeddings are of "
            f"size {target.get_hidden_size()} and the drafter's of {facts.hidden_size}; {_AGAIN}"
        )


def expected_extras(nar: NarConfig, num_slots: int, size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of :class:`vllm_spec_ext.proposers.nar.extras.SlotExtras`."""
    shapes: dict[str, tuple[int, ...]] = {}
    if nar.slot_queries:
        shapes["slot_queries"] = (num_slots, size)
    if nar.copy_match:
        kinds = (nar.num_copy_kinds, num_slots)
        shapes |= {"copy_gate": kinds, "copy_trust": kinds, "copy_weight": (size,)}
    if nar.heads is not None:
        guesses = SlotGuesses.shapes(nar.heads, num_slots, size)
        shapes |= {f"guesses.{name}": shape for name, shape in guesses.items()}
    if nar.selector_rank:
        rank = nar.selector_rank
        shapes |= {"selector_a": (size, rank), "selector_b": (size, rank)}
        shapes["selector_h"] = (rank, size)
    if nar.draft_vocab_size is not None:
        shapes["draft_vocab"] = (nar.draft_vocab_size,)
    return shapes


def _extras(facts: DFlashFacts, file: Path | None) -> Iterator[str]:
    if file is None:
        yield f"found no {EXTRAS_NAME}, expected what its config.json lists; {_AGAIN}"
        return
    try:
        with reading(file, _AGAIN):
            found, listed = shapes_and_ids(file)
    except SpecExtError as error:
        yield str(error)
        return
    expected = expected_extras(facts.nar, facts.block_size - 1, facts.hidden_size)
    wrong = sorted(name for name in expected | found if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        yield (
            f"{EXTRAS_NAME}: found {name} of shape {found.get(name)}, expected "
            f"{expected.get(name)}; {_AGAIN}"
        )
    problem = None if listed is None else ids_problem(listed, facts.vocab_size)
    if problem is not None:
        yield f"{EXTRAS_NAME}: {problem}; {_AGAIN}"
