# SPDX-License-Identifier: Apache-2.0
"""Whether token ids mean the same to a draft model and to its target."""

from typing import TYPE_CHECKING, cast

from vllm_spec_ext.engine.starting.target_tokenizer import load_tokenizer
from vllm_spec_ext.errors import shown
from vllm_spec_ext.fingerprint import PROBE, Tokenizer, tokenizer_fingerprint

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig


def why_ids_differ(draft: "ModelConfig", target: "ModelConfig") -> str | None:
    """Why a draft model's token ids are not the target's; None if they are.

    Either vocabulary may go on where the other one ends: the draft then never proposes the
    target's last ids, or what it says of its own last ones is dropped.
    """
    ours = load_tokenizer(target)
    if ours is None:
        return None  # an engine that works on ids alone; nobody can tell
    own = _draft_tokenizer(draft)
    if own is None:
        return (
            f"found no tokenizer in {shown(draft.model)}, expected the target's; if it was trained "
            "with that one, copy the target's tokenizer files there; EAGLE heads that are none of "
            'EAGLE-3 have none either: vLLM\'s own method "eagle" runs those'
        )
    if tokenizer_fingerprint(own) == tokenizer_fingerprint(ours):
        return None
    return difference(cast(Tokenizer, own), cast(Tokenizer, ours))


def difference(own: Tokenizer, ours: Tokenizer) -> str | None:
    """How two tokenizers differ where both have a token; None if they do not.

    Args:
        own: The draft's Hugging Face tokenizer.
        ours: The target's.
    """
    mine = {index: token for token, index in own.get_vocab().items()}
    theirs = {index: token for token, index in ours.get_vocab().items()}
    both = mine.keys() & theirs.keys()
    wrong = sorted(index for index in both if mine[index] != theirs[index])
    advice = "use a draft model with the target's tokenizer"
    if wrong:
        first = wrong[0]
        return (
            f"found another tokenizer: {len(wrong)} of {len(both)} ids mean something else (id "
            f"{first} is {mine[first]!r} to the draft, {theirs[first]!r} to the target); {advice}"
        )
    texts = [tool.encode(PROBE, add_special_tokens=False) for tool in (own, ours)]
    if texts[0] != texts[1] and set(texts[0]) | set(texts[1]) <= both:
        return f"found another tokenizer, which splits text in other places; {advice}"
    return None


def _draft_tokenizer(draft: "ModelConfig") -> object | None:
    from vllm.tokenizers.registry import get_tokenizer

    try:
        tokenizer: object = get_tokenizer(draft.model, trust_remote_code=draft.trust_remote_code)
    except (OSError, ValueError, KeyError):
        return None
    return tokenizer
