# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 checkpoints in the layout that vLLM reads: how they are known, and what they say.

(vLLM 0.32 ``model_executor/models/llama_eagle3.py`` and ``SpeculativeConfig.__post_init__``.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config.model import ModelConfig

_KEYS = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids")


@dataclass(frozen=True)
class Eagle3Facts:
    """What a checkpoint says of its sizes and of the target's states that it reads."""

    num_states: int  # layers of the target; 0 = its final hidden state alone
    layers: tuple[int, ...] | None  # 0 = the embeddings, i = behind layer i; None = as the target
    # says
    hidden_size: int
    target_hidden_size: int
    draft_vocab_size: int

    @classmethod
    def of(cls, config: object) -> "Eagle3Facts":
        """Read them off vLLM's configuration of a checkpoint."""
        own: Mapping[str, Any] = getattr(config, "eagle_config", None) or {}
        layers = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
        layers = layers or own.get("eagle_aux_hidden_state_layer_ids")
        number = getattr(config, "num_aux_hidden_states", None)
        if not own.get("use_aux_hidden_state", True):
            number, layers = 0, None
        elif number is None:
            number = len(layers) if layers else 3
        hidden_size = int(getattr(config, "hidden_size", 0))
        vocab_size = int(getattr(config, "vocab_size", 0))
        return cls(
            num_states=number,
            layers=tuple(layers) if layers else None,
            hidden_size=hidden_size,
            target_hidden_size=getattr(config, "target_hidden_size", None) or hidden_size,
            draft_vocab_size=getattr(config, "draft_vocab_size", None) or vocab_size,
        )


def read_config(model: str) -> Mapping[str, Any]:
    """config.json of a folder or Hub name, as it is.

    Raises:
        OSError: There is none.
    """
    from transformers import PretrainedConfig

    found, _ = PretrainedConfig.get_config_dict(model)
    config: Mapping[str, Any] = found
    return config


def is_eagle3(config: Mapping[str, Any], model: str) -> bool:
    """Whether a checkpoint is an EAGLE-3 head.

    By its architecture (``LlamaForCausalLMEagle3``, ``Eagle3LlamaForCausalLM``), by what only such
    heads have, or, as vLLM does it, by its name.
    """
    if config.get("speculators_model_type") == "eagle3":
        return True
    names: Sequence[str] = config.get("architectures") or ()
    if any(name.startswith("Eagle3") or name.endswith("Eagle3") for name in names):
        return True
    return any(key in config for key in _KEYS) or "eagle3" in Path(model).name.lower()


def drafts_in_parallel(architectures: Sequence[str] | None) -> bool:
    """Whether a checkpoint is a P-EAGLE one, which drafts all tokens in one pass."""
    return any(name.lower().startswith("peagle") for name in architectures or ())


def make_head(
    model_config: "ModelConfig", method: Literal["eagle3", "dflash"], max_model_len: int
) -> None:
    """Give a checkpoint's configuration the form that vLLM's classes of heads read.

    Positions go as far as the target's, whatever its file says (vLLM 0.32
    ``SpeculativeConfig._maybe_override_draft_max_position_embeddings``).

    Args:
        model_config: Changed.
        method: What vLLM calls such heads.
        max_model_len: The target's.
    """
    from vllm.config.speculative import SpeculativeConfig
    from vllm.transformers_utils.configs.eagle import EAGLEConfig
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    config: PretrainedConfig = model_config.hf_config
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and longest < max_model_len:
        setattr(config, "max_position_embeddings", max_model_len)  # noqa: B010, not of every config
    in_parallel = drafts_in_parallel(model_config.architectures)
    if in_parallel or isinstance(config, EAGLEConfig | SpeculatorsConfig):
        return
    model_config.hf_config = EAGLEConfig(config, method=method, model_type="eagle")
    holder: Any = SimpleNamespace(draft_model_config=model_config)
    SpeculativeConfig.update_arch_(holder)  # reads nothing else of it
