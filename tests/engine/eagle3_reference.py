# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 head computed densely, by its definition: no cache, no engine, no vLLM."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import silu


class DenseHead:
    """Greedy drafts of a head in a public layout, from the target in Hugging Face's code."""

    def __init__(self, target: Path, head: Path, default_layers: Sequence[int]) -> None:
        """Read both.

        Args:
            target: Folder of the target.
            head: Folder of the head.
            default_layers: Of the target, where the head names none; 0 = the embeddings, i = behind
                layer i.
        """
        from transformers import LlamaForCausalLM

        self.target = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.config = _flat(json.loads((head / "config.json").read_text()))
        self.weights = {
            name.replace("midlayer.", "layers.0."): tensor for name, tensor in _tensors(head)
        }
        own = self.config.get("eagle_config", {})
        named = self.config.get("eagle_aux_hidden_state_layer_ids")
        self.layers = sorted(named or own.get("eagle_aux_hidden_state_layer_ids", default_layers))
        self.reads_final_state = not own.get("use_aux_hidden_state", True)
        embeddings, lm_head = (
            self.target.get_input_embeddings(),
            self.target.get_output_embeddings(),
        )
        self.embeddings = self.weights.get("embed_tokens.weight", embeddings.weight)
        self.lm_head = self.weights.get("lm_head.weight", lm_head.weight)
        size = self.config["head_dim"]
        self.waves = 1.0 / 10000.0 ** (torch.arange(0, size, 2).float() / size)

    @torch.no_grad()
    def draft(self, text: Sequence[int], number: int) -> tuple[list[int], float]:
        """So many tokens behind a text, and the least gap between the best two logits."""
        states = self._target_states(text[:-1])
        tokens, made, gap = list(text), [], float("inf")
        for _ in range(number):
            hidden = self._layers(torch.tensor(tokens[1:]), states)[-1]
            normed = self._norm(hidden, "norm")
            best = (self.lm_head @ normed).topk(2)
            gap = min(gap, float(best.values[0] - best.values[1]))
            token = int(best.indices[0])
            if "d2t" in self.weights:
                token += int(self.weights["d2t"][token])
            made.append(token)
            tokens.append(token)
            state = normed if self.config.get("norm_output") else hidden
            states = torch.cat([states, state[None]])
        return made, gap

    def _target_states(self, text: Sequence[int]) -> torch.Tensor:
        """[len(text), hidden] what the head reads with the token behind each one."""
        before_norm: list[torch.Tensor] = []
        hook = self.target.model.norm.register_forward_pre_hook(
            lambda _, inputs: before_norm.append(inputs[0][0])
        )
        found = self.target(torch.tensor([list(text)]), output_hidden_states=True).hidden_states
        hook.remove()
        if self.reads_final_state:
            final: torch.Tensor = found[-1][0]
            return final
        # Hugging Face's last state is behind the final norm, the head's is not.
        by_layer = [state[0] for state in found[:-1]] + before_norm
        chosen = [by_layer[layer] for layer in self.layers]
        if self.config.get("fc_norm"):
            chosen = [self._norm(state, f"fc_norm.{i}") for i, state in enumerate(chosen)]
        states = torch.cat(chosen, dim=-1)
        if self.config.get("norm_before_fc"):
            states = self._norm(states, "input_norm")
        return states @ self.weights["fc.weight"].T

    def _layers(self, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """[len(ids), hidden] behind the last layer, before the norm."""
        for number in range(self.config["num_hidden_layers"]):
            name = f"layers.{number}"
            if number:
                read = self._norm(states, f"{name}.input_layernorm")
            else:
                normed = self._norm(states, f"{name}.hidden_norm")
                embeds = self._norm(self.embeddings[ids], f"{name}.input_layernorm")
                read = torch.cat([embeds, normed], dim=-1)
                if self.config.get("norm_before_residual"):
                    states = normed
            states = states + self._attended(read, f"{name}.self_attn")
            inner = self._norm(states, f"{name}.post_attention_layernorm")
            gate = silu(self._linear(inner, f"{name}.mlp.gate_proj"))
            up = self._linear(inner, f"{name}.mlp.up_proj")
            states = states + self._linear(gate * up, f"{name}.mlp.down_proj")
        return states

    def _attended(self, read: torch.Tensor, name: str) -> torch.Tensor:
        size, length = self.config["head_dim"], len(read)
        query, key, value = (
            self._linear(read, f"{name}.{part}_proj").view(length, -1, size).transpose(0, 1)
            for part in "qkv"
        )
        if f"{name}.q_norm.weight" in self.weights:  # Qwen3
            query, key = self._norm(query, f"{name}.q_norm"), self._norm(key, f"{name}.k_norm")
        groups = len(query) // len(key)
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
        query, key = self._rotated(query), self._rotated(key)
        mask = torch.full((length, length), float("-inf")).triu(1)
        weights = (query @ key.transpose(1, 2) / size**0.5 + mask).softmax(-1)
        mixed = (weights @ value).transpose(0, 1).reshape(length, -1)
        return self._linear(mixed, f"{name}.o_proj")

    def _linear(self, values: torch.Tensor, name: str) -> torch.Tensor:
        found = values @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return found if bias is None else found + bias

    def _norm(self, values: torch.Tensor, name: str) -> torch.Tensor:
        scale = values.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]
        return values * scale.rsqrt() * self.weights[f"{name}.weight"]

    def _rotated(self, values: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(values.shape[1])[:, None] * self.waves
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        first, second = values.chunk(2, dim=-1)
        return values * cos + torch.cat([-second, first], dim=-1) * sin


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """The ``speculators`` layout keeps the layer's sizes apart, and norms before the residual."""
    if "transformer_layer_config" not in config:
        return config
    return {"norm_before_residual": True, **config["transformer_layer_config"], **config}


def _tensors(folder: Path) -> list[tuple[str, torch.Tensor]]:
    as_bin = folder / "pytorch_model.bin"
    if as_bin.exists():
        return list(torch.load(as_bin, weights_only=True).items())
    return list(load_file(folder / "model.safetensors").items())
