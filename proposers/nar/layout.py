# SPDX-License-Identifier: Apache-2.0
"""The folder of a ``nar`` drafter: a public DFlash checkpoint, and what may be added to one.

::

    config.json             DFlash's: architectures ["DFlashDraftModel"], model_type "qwen3", the
                            sizes of the layers, block_size, num_target_layers, and
                            dflash_config {"mask_token_id", "target_layer_ids"}
    model.safetensors       fc.weight, hidden_norm.weight, norm.weight, layers.N.* as in Qwen3:
                            self_attn.{q,k,v,o}_proj, self_attn.{q,k}_norm, input_layernorm,
                            post_attention_layernorm, mlp.{gate,up,down}_proj; embed_tokens.weight
                            and lm_head.weight only where they are not the target's
    mask_embedding.pt       optional: {"mask_token_id": int, "embedding": [hidden]}, in place of
                            the target's embedding of that token
    nar/extras.safetensors  optional, with a key "nar" in config.json (:class:`NarConfig`): the
                            tensors of :class:`.extras.SlotExtras`

``target_layer_ids`` count from 0: i is the output of layer i, in front of the final norm also for
the last one (Hugging Face's last ``hidden_states`` are behind it). vLLM's own method ``dflash``
runs such a folder. It does not look into ``nar/``, and ignores the key, so there a drafter with
extras drafts as it would without them: chains, from masks alone.
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.blockwise.heads import HeadsConfig

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
MASK_NAME = "mask_embedding.pt"
EXTRAS_NAME = "nar/extras.safetensors"
FILES = (CONFIG_NAME, WEIGHTS_NAME, MASK_NAME, EXTRAS_NAME)
EXTRAS_KEY = "nar"


class NarConfig(BaseModel):
    """Key ``nar`` of config.json: what a drafter has beyond DFlash. All of it is optional."""

    # extra="ignore": a newer writer may add facts that an older reader does not need.
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    slot_queries: bool = False
    """A learned vector for each slot, added to the mask's embedding."""
    copy_match: int = Field(default=0, ge=0, le=64)
    """Slots are shown the tokens that followed the latest place where the end of the text occurred
    before, compared over up to this many tokens; 0 = they are not."""
    reuse_tail: bool = False
    """Where nothing is found, slots are shown what is left of the last draft behind the token at
    which it was rejected. Needs ``copy_match``."""
    heads: HeadsConfig | None = None
    """Blockwise heads whose guesses the first slots start from; None = there are none."""
    selector_rank: int = Field(default=0, ge=0, le=4096)
    """Rank of the pairwise selector; 0 = there is none."""
    draft_vocab_size: int | None = Field(default=None, ge=1)
    """Tokens that it can draft, listed as ``draft_vocab``; None = all of the target's."""
    tokenizer_fingerprint: str | None = None
    """See :func:`vllm_spec_ext.fingerprint.tokenizer_fingerprint`; None = not known."""
    training: dict[str, Any] = Field(default_factory=dict)
    """What it was trained on and what it reached; for people."""

    @property
    def has_tensors(self) -> bool:
        """Whether there is a file of extras."""
        return bool(
            self.slot_queries
            or self.copy_match
            or self.heads
            or self.selector_rank
            or self.draft_vocab_size
        )

    @property
    def num_copy_kinds(self) -> int:
        """Kinds of copies that are told apart: 0 = none, i = i tokens agree, the last = the tail of
        the last draft."""
        return self.copy_match + 2


_MAKES_CONTEXT = ("fc", "hidden_norm", "self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm")


def makes_context(name: str) -> bool:
    """Whether a tensor of model.safetensors makes keys and values of the target's hidden states.

    These stay as they are while a drafter learns (``online``): the KV in the cache was made by
    them, for requests that run and for prefixes that others will find, and no version can make it
    anew. All other weights read this KV, or make rows of a block, which are forgotten after it.
    """
    path = name.rpartition(".")[0]  # without "weight"
    return path in _MAKES_CONTEXT or path.endswith(tuple(f".{own}" for own in _MAKES_CONTEXT))


def read_nar_config(config: dict[str, Any], folder: Path | str) -> NarConfig:
    """The key ``nar`` of a checkpoint's config.json; without one, a plain DFlash checkpoint.

    Raises:
        SpecExtError: It is damaged.
    """
    given = config.get(EXTRAS_KEY) or {}
    try:
        return NarConfig.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join([EXTRAS_KEY, *(str(part) for part in first["loc"])])
        raise SpecExtError(
            f"{folder}/{CONFIG_NAME}: {where}: {first['msg']}; found {first['input']!r}. The "
            "drafter was written by another version, or edited; upgrade this package or train it "
            "again"
        ) from error
