# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 head computed densely, by its definition: no cache, no engine, no vLLM."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import silu


class DenseHead:
    """Greedy drafts of a head in the public layout, from the target in Hugging Face's code."""

    def __init__(self, target: Path, head: Path, layers: Sequence[int]) -> None:
        """Read both.

        Args:
            target: Folder of the target.
            head: Folder of the head, with safetensors and no embeddings of its own.
            layers: Of the target; 0 = the embeddings, i = behind layer i.
        """
        from transformers import LlamaForCausalLM

        self.target = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.weights = load_file(head / "model.safetensors")
        self.config = json.loads((head / "config.json").read_text())
        self.layers = sorted(layers)
        size = self.config["head_dim"]
        self.waves = 1.0 / 10000.0 ** (torch.arange(0, size, 2).float() / size)

    @torch.no_grad()
    def draft(self, text: Sequence[int], number: int) -> tuple[list[int], float]:
        """So many tokens behind a text, and the least gap between the best two logits."""
        found = self.target(torch.tensor([text]), output_hidden_states=True).hidden_states
        states = torch.cat([found[layer][0] for layer in self.layers], dim=-1)
        states = states[:-1] @ self.weights["fc.weight"].T
        tokens, made, gap = list(text), [], float("inf")
        for _ in range(number):
            hidden = self._layer(torch.tensor(tokens[1:]), states)
            logits = self._norm(hidden[-1], "norm.weight") @ self.weights["lm_head.weight"].T
            best = logits.topk(2)
            gap = min(gap, float(best.values[0] - best.values[1]))
            token = int(best.indices[0] + self.weights["d2t"][best.indices[0]])
            made.append(token)
            tokens.append(token)
            states = torch.cat([states, hidden[-1:]])
        return made, gap

    def _layer(self, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        embeds = self.target.get_input_embeddings()(ids)
        read = torch.cat(
            [
                self._norm(embeds, "midlayer.input_layernorm.weight"),
                self._norm(states, "midlayer.hidden_norm.weight"),
            ],
            dim=-1,
        )
        size, length = self.config["head_dim"], len(ids)
        query, key, value = (
            (read @ self.weights[f"midlayer.self_attn.{name}_proj.weight"].T)
            .view(length, -1, size)
            .transpose(0, 1)
            for name in "qkv"
        )
        groups = len(query) // len(key)
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
        query, key = self._rotated(query), self._rotated(key)
        mask = torch.full((length, length), float("-inf")).triu(1)
        weights = (query @ key.transpose(1, 2) / size**0.5 + mask).softmax(-1)
        mixed = (weights @ value).transpose(0, 1).reshape(length, -1)
        states = states + mixed @ self.weights["midlayer.self_attn.o_proj.weight"].T
        inner = self._norm(states, "midlayer.post_attention_layernorm.weight")
        gate = silu(inner @ self.weights["midlayer.mlp.gate_proj.weight"].T)
        up = inner @ self.weights["midlayer.mlp.up_proj.weight"].T
        return states + (gate * up) @ self.weights["midlayer.mlp.down_proj.weight"].T

    def _norm(self, values: torch.Tensor, name: str) -> torch.Tensor:
        scale = values.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]
        return values * scale.rsqrt() * self.weights[name]

    def _rotated(self, values: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(values.shape[1])[:, None] * self.waves
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        first, second = values.chunk(2, dim=-1)
        return values * cos + torch.cat([-second, first], dim=-1) * sin
