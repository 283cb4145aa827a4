# SPDX-License-Identifier: Apache-2.0
"""The ``nar`` drafter as a plain torch module: trained here, served by vLLM's DFlash layers.

A few layers read a block ``[last token, MASK, MASK, ...]``; each row sees all rows of its block,
and the target's hidden states of all tokens before the block, of which every layer makes keys and
values (DFlash, 2602.06036). The state of slot i, behind the last norm, is projected onto the
vocabulary by the target and gives token i + 1 behind the last one: a slot holds the place of what
it predicts.

The layout of its folder stands in :mod:`vllm_spec_ext.proposers.nar.layout`. Neither vLLM nor
transformers is imported.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from vllm_spec_ext.proposers.nar.extras import Copies, Embed, SlotExtras
from vllm_spec_ext.proposers.nar.layout import (
    CONFIG_NAME,
    EXTRAS_KEY,
    EXTRAS_NAME,
    MASK_NAME,
    WEIGHTS_NAME,
    NarConfig,
    read_nar_config,
)

_BLOCKS_TOGETHER = 8  # in one call of attention


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes of a drafter; names as in DFlash's config.json where it has them."""

    hidden_size: int  # also of the embeddings that it reads, mostly the target's
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # the target's
    block_size: int  # most rows of a block, the last token's included
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # from 0, ascending; i = output of the target's layer i
    num_target_layers: int
    target_hidden_size: int | None = None  # None = hidden_size
    max_position_embeddings: int = 32768
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    causal: bool = False  # rows of a block see those before them only
    own_mask_embedding: bool = False  # else the target's, of mask_token_id
    nar: NarConfig = field(default_factory=NarConfig)

    @property
    def num_slots(self) -> int:
        """Most draft tokens of a block."""
        return self.block_size - 1

    @property
    def num_state_units(self) -> int:
        """Numbers of one token's hidden states that the drafter reads."""
        return len(self.target_layer_ids) * (self.target_hidden_size or self.hidden_size)

    def to_json(self, dtype: str = "float32") -> dict[str, Any]:
        """config.json."""
        own = ("target_layer_ids", "mask_token_id", "causal", "own_mask_embedding", "nar")
        given = {name: value for name, value in asdict(self).items() if name not in own}
        if self.target_hidden_size is None:
            del given["target_hidden_size"]
        extras = self.nar.model_dump(exclude_defaults=True)
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **given,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                **({"causal": True} if self.causal else {}),
            },
            "attention_bias": False,
            "hidden_act": "silu",
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
            "use_sliding_window": False,
            **({EXTRAS_KEY: extras} if extras else {}),
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any], folder: Path) -> "DrafterConfig":
        """Read config.json.

        Args:
            given: Its contents.
            folder: Where it is; tells whether there is a mask embedding.
        """
        names = [name for name in cls.__dataclass_fields__ if name in given and name != EXTRAS_KEY]
        known = {name: given[name] for name in names}
        rope = given.get("rope_parameters") or {}
        if "rope_theta" in rope:
            known["rope_theta"] = rope["rope_theta"]
        return cls(
            **known,
            mask_token_id=given["dflash_config"]["mask_token_id"],
            target_layer_ids=tuple(given["dflash_config"]["target_layer_ids"]),
            causal=bool(given["dflash_config"].get("causal", False)),
            own_mask_embedding=(folder / MASK_NAME).is_file(),
            nar=read_nar_config(dict(given), folder),
        )


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        """Start with weights of 1."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] as `x`."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def _rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary positions, halves paired (NeoX): x [b, n, heads, size], positions [b, n]."""
    size = x.shape[-1]
    waves = 1.0 / theta ** (torch.arange(0, size, 2, device=x.device).float() / size)
    angles = (positions.unsqueeze(-1).float() * waves).unsqueeze(-2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Rows of a block see the context in front of it, and their block (or its rows before)."""

    def __init__(self, config: DrafterConfig) -> None:
        """Qwen3's: a norm for each head's queries and keys, no biases."""
        super().__init__()
        self.config = config
        size, heads = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(size, config.num_attention_heads * heads, bias=False)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * heads, bias=False)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * heads, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * heads, size, bias=False)
        self.q_norm = RMSNorm(heads, config.rms_norm_eps)
        self.k_norm = RMSNorm(heads, config.rms_norm_eps)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[b, n, kv_heads, head_dim] each, of normed rows [b, n, hidden]; keys are rotated."""
        shape = (*x.shape[:2], self.config.num_key_value_heads, self.config.head_dim)
        keys = self.k_norm(self.k_proj(x).view(shape))
        keys = _rotated(keys, positions, self.config.rope_theta)
        return keys, self.v_proj(x).view(shape)

    def forward(
        self,
        x: Tensor,  # [b, m, B, hidden] normed rows of blocks
        positions: Tensor,  # [b, m, B]
        context: Tensor,  # [b, n, hidden] of the tokens, normed
        hidden_places: Tensor,  # [b, m, n] bool: tokens that are not in front of the block
    ) -> Tensor:
        """[b, m, B, hidden]."""
        b, m, rows, _ = x.shape
        n, kv, size = context.shape[1], self.config.num_key_value_heads, self.config.head_dim
        flat, places = x.flatten(1, 2), positions.flatten(1, 2)
        queries = self.q_norm(self.q_proj(flat).view(b, m * rows, -1, size))
        queries = _rotated(queries, places, self.config.rope_theta)
        tokens = torch.arange(n, device=x.device).expand(b, n)
        # A few blocks at a time go through one attention: its keys are the context and these
        # blocks. One block at a time would copy the context often, all would be a large mask.
        together = min(_BLOCKS_TOGETHER, m)
        groups = -(-m // together)
        empty = groups * together - m  # blocks that fill the last group

        def grouped(heads: Tensor) -> Tensor:  # [b, m * rows, heads, size]
            blocks = functional.pad(heads.unflatten(1, (m, rows)), (0, 0) * 3 + (0, empty))
            return blocks.reshape(b * groups, together * rows, -1, size).transpose(1, 2)

        def behind(theirs: Tensor, ours: Tensor) -> Tensor:
            every = theirs.unsqueeze(1).expand(b, groups, n, kv, size).flatten(0, 1)
            return torch.cat([every.transpose(1, 2), grouped(ours)], dim=2)

        far = functional.pad(~hidden_places, (0, 0, 0, empty)).view(b * groups, together, n)
        far = far.repeat_interleave(rows, dim=1)  # [b * groups, together * rows, n]
        block = torch.arange(together * rows, device=x.device) // rows
        near = block.unsqueeze(1) == block
        if self.config.causal:
            near = near.tril()
        near = near.expand(b * groups, -1, -1)
        keys, values = map(
            behind, self.keys_values(context, tokens), self.keys_values(flat, places)
        )
        mixed = functional.scaled_dot_product_attention(
            grouped(queries).to(values.dtype),
            keys.to(values.dtype),
            values,
            attn_mask=torch.cat([far, near], dim=-1).unsqueeze(1),
            enable_gqa=True,
        )
        mixed = mixed.transpose(1, 2).reshape(b, groups * together, rows, -1)[:, :m]
        attended: Tensor = self.o_proj(mixed)
        return attended


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        """Without biases."""
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] as `x`."""
        made: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return made


class Layer(nn.Module):
    """One layer; names of its weights as in Qwen3."""

    def __init__(self, config: DrafterConfig) -> None:
        """Build attention, MLP and norms."""
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, positions: Tensor, context: Tensor, hidden_places: Tensor
    ) -> Tensor:
        """[b, m, B, hidden]; arguments as of :class:`Attention`, `x` before the norm."""
        x = x + self.self_attn(self.input_layernorm(x), positions, context, hidden_places)
        return x + self.mlp(self.post_attention_layernorm(x))


class NarDrafter(nn.Module):
    """All layers, with the extras; embeddings and vocabulary projection are the target's."""

    def __init__(self, config: DrafterConfig) -> None:
        """Build it in float32, with torch's own random weights."""
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.num_state_units, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.own_mask_embedding:
            self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size))
        self.extras = SlotExtras(config.nar, config.num_slots, config.hidden_size)

    def forward(
        self,
        states: Tensor,  # [b, n, num_state_units] of tokens 0 to n - 1, layers side by side
        anchors: Tensor,  # [b, m] int64: index of each block's first token; it sees tokens before
        ids: Tensor,  # [b, m, B] int64: that token, and masks (or tokens that are revealed)
        embed: Embed,
        copies: Copies | None = None,  # [b, m, B - 1] both
        finals: Tensor | None = None,  # [b, m, hidden] the target's, of tokens anchors - 1
    ) -> Tensor:
        """[b, m, B - 1, hidden] states of the slots, to be projected onto the vocabulary.

        The projection's logits, plus :meth:`.extras.SlotExtras.copy_bonus` on the copied token's,
        are what is drafted from; slot i is the token at ``anchors + 1 + i``. B may be smaller than
        the checkpoint's block size. A drafter with heads needs ``finals``.
        """
        positions = anchors.unsqueeze(-1) + torch.arange(ids.shape[-1], device=ids.device)
        context = self.hidden_norm(self.fc(states))
        tokens = torch.arange(states.shape[1], device=states.device)
        hidden_places = tokens >= anchors.unsqueeze(-1)
        guesses = self._guess(ids, embed, copies, finals)
        x = self.embed_block(ids, embed, copies, guesses).to(context.dtype)
        for layer in self.layers:
            x = layer(x, positions, context, hidden_places)
        return self.extras.settle(self.norm(x[:, :, 1:]), self._slots(ids), guesses)

    def _slots(self, ids: Tensor) -> Tensor:
        return torch.arange(ids.shape[-1] - 1, device=ids.device).expand_as(ids[..., 1:])

    def _guess(
        self, ids: Tensor, embed: Embed, copies: Copies | None, finals: Tensor | None
    ) -> Tensor | None:
        """[b, m, B - 1, hidden] states of the heads; None without heads."""
        if self.extras.guesses is None:
            return None
        if finals is None:
            raise ValueError("the final states that this drafter's heads read are missing")
        copied = None if copies is None else copies.tokens.flatten(0, 1)
        lengths = None if copies is None else copies.kinds[..., 0].flatten()
        states = self.extras.guesses(
            finals.flatten(0, 1), ids[..., 0].flatten(), copied, lengths, embed
        )
        found: Tensor = states[:, : ids.shape[-1] - 1].unflatten(0, ids.shape[:2])
        return found

    def embed_block(
        self,
        ids: Tensor,
        embed: Embed,
        copies: Copies | None = None,
        guesses: Tensor | None = None,
    ) -> Tensor:
        """[b, m, B, hidden] what the first layer reads."""
        x = embed(ids)
        is_mask = (ids == self.config.mask_token_id).unsqueeze(-1)
        if self.config.own_mask_embedding:
            x = torch.where(is_mask, self.mask_embedding.to(x.dtype), x)
        first, rest = x[..., :1, :], x[..., 1:, :]
        filled = self.extras.fill(rest, self._slots(ids), copies, embed, guesses)
        return torch.cat([first, torch.where(is_mask[..., 1:, :], filled, rest)], dim=-2)

    def save(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        """Write the checkpoint's folder; config.json comes last.

        Args:
            folder: Made if missing.
            dtype: Of the weights.
        """
        (folder / EXTRAS_NAME).parent.mkdir(parents=True, exist_ok=True)
        weights, extras, mask = {}, {}, None
        for name, value in self.state_dict().items():
            tensor = value.detach().cpu().contiguous()
            tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
            if name == "mask_embedding":
                mask = tensor
            elif name.startswith("extras."):
                extras[name.removeprefix("extras.")] = tensor
            else:
                weights[name] = tensor
        save_file(weights, folder / WEIGHTS_NAME, {"format": "pt"})
        if extras:
            save_file(extras, folder / EXTRAS_NAME, {"format": "pt"})
        else:
            (folder / EXTRAS_NAME).unlink(missing_ok=True)
            (folder / EXTRAS_NAME).parent.rmdir()
        if mask is not None:
            given = {"mask_token_id": self.config.mask_token_id, "embedding": mask}
            torch.save(given, folder / MASK_NAME)
        else:  # of an earlier result in this folder
            (folder / MASK_NAME).unlink(missing_ok=True)
        text = json.dumps(self.config.to_json(str(dtype).removeprefix("torch.")), indent=2)
        (folder / CONFIG_NAME).write_text(text + "\n")

    @classmethod
    def load(cls, folder: Path) -> "NarDrafter":
        """Read a folder that :meth:`save` wrote, or a public DFlash checkpoint without weights of
        its own for embeddings and projection; in float32.
        """
        config = DrafterConfig.from_json(json.loads((folder / CONFIG_NAME).read_text()), folder)
        drafter = cls(config)
        weights = load_file(folder / WEIGHTS_NAME)
        if config.nar.has_tensors:
            extras = load_file(folder / EXTRAS_NAME)
            weights |= {f"extras.{name}": value for name, value in extras.items()}
        if config.own_mask_embedding:
            mask = torch.load(folder / MASK_NAME, weights_only=True)
            weights["mask_embedding"] = mask["embedding"] if isinstance(mask, dict) else mask
        drafter.load_state_dict(weights)
        return drafter.eval()
