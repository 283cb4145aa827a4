# SPDX-License-Identifier: Apache-2.0
"""DFlash checkpoints in the layout that vLLM reads: how they are known, and what they say.

(vLLM 0.32 ``model_executor/models/qwen3_dflash.py`` and ``get_eagle3_aux_layers_from_config``; the
extras of our own are in :mod:`vllm_spec_ext.proposers.nar.layout`.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_spec_ext.engine.models.eagle_checkpoint import make_head, read_config
from vllm_spec_ext.proposers.models import BlockFacts
from vllm_spec_ext.proposers.nar.layout import (
    EXTRAS_KEY,
    EXTRAS_NAME,
    NarConfig,
    read_nar_config,
)

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig

_DEFAULT_BLOCK = 16  # of the public checkpoints


@dataclass(frozen=True)
class DFlashFacts:
    """What a checkpoint says of its sizes and of the target's states that it reads."""

    layers: tuple[int, ...] | None  # 0 = the embeddings, i = behind layer i; None = it does not say
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int  # of its own projection, if it has one
    block_size: int
    mask_token_id: int | None
    causal: bool  # rows of a block see those before them only
    has_window: bool
    samples_anchor: bool  # the row of the token that is known foresees one, too
    num_target_layers: int | None = None
    nar: NarConfig = field(default_factory=NarConfig)

    @property
    def num_states(self) -> int:
        """Layers of the target."""
        return len(self.layers or ())

    @property
    def block_facts(self) -> BlockFacts:
        """What its proposer knows of it."""
        return BlockFacts(
            num_slots=self.block_size - 1,
            copy_match=self.nar.copy_match,
            reuse_tail=self.nar.reuse_tail,
            has_selector=bool(self.nar.selector_rank),
        )

    @classmethod
    def of(cls, config: object, model: str) -> "DFlashFacts":
        """Read them off vLLM's configuration of a checkpoint.

        Args:
            config: The configuration.
            model: Where it is from, for messages.

        Raises:
            SpecExtError: The extras in it are damaged.
        """
        own: Mapping[str, Any] = getattr(config, "dflash_config", None) or {}
        layers = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
        layers = layers or [layer + 1 for layer in own.get("target_layer_ids") or ()]
        causal = getattr(config, "is_causal", None)
        hidden_size = int(getattr(config, "hidden_size", 0))
        vocab_size = int(getattr(config, "vocab_size", 0))
        kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
        mask = own.get("mask_token_id", getattr(config, "mask_token_id", None))
        return cls(
            layers=tuple(layers) or None,
            hidden_size=hidden_size,
            target_hidden_size=getattr(config, "target_hidden_size", None) or hidden_size,
            vocab_size=vocab_size,
            draft_vocab_size=getattr(config, "draft_vocab_size", None) or vocab_size,
            block_size=int(
                getattr(config, "block_size", None) or own.get("block_size") or _DEFAULT_BLOCK
            ),
            mask_token_id=mask,
            causal=bool(own.get("causal", False) if causal is None else causal),
            has_window=bool(own.get("use_swa")) or "sliding_attention" in kinds,
            samples_anchor=bool(own.get("sample_from_anchor", False)),
            num_target_layers=getattr(config, "num_target_layers", None),
            nar=read_nar_config({EXTRAS_KEY: getattr(config, EXTRAS_KEY, None)}, model),
        )


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is a DFlash drafter, or one of :func:`other_kind`."""
    kind = str(config.get("speculators_model_type", ""))
    names: Sequence[str] = config.get("architectures") or ()
    return (
        "dflash_config" in config
        or kind.startswith("dflash")
        or any(name.startswith("DFlash") for name in names)
    )


def other_kind(config: Mapping[str, Any]) -> str | None:
    """What a descendant of DFlash that drafts in another way calls itself; None of others."""
    kind = str(config.get("speculators_model_type", ""))
    if kind.startswith(("dspark", "dflash2")):
        return kind
    names: Sequence[str] = config.get("architectures") or ()
    known = ("LiLiCorr", "DFlash2", "DFlashLaguna")
    return next((name for name in names if "DSpark" in name or name.startswith(known)), None)


def make_dflash(model_config: "ModelConfig", max_model_len: int) -> None:
    """As :func:`.eagle_checkpoint.make_head`."""
    config = model_config.hf_config
    if getattr(config, "block_size", None) is None:
        # vLLM 0.32 ``update_dflash``, which reads the layout of ``speculators``, leaves it out.
        block_size = read_config(model_config.model).get("block_size")
        setattr(config, "block_size", block_size)  # noqa: B010, not of every config
    make_head(model_config, "dflash", max_model_len)


def extras_file(model: str) -> Path | None:
    """The file of extras in a folder or on the Hub; None if there is none."""
    folder = Path(model)
    if folder.is_dir():
        file = folder / EXTRAS_NAME
        return file if file.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(model, EXTRAS_NAME))
    except EntryNotFoundError:
        return None
