# SPDX-License-Identifier: Apache-2.0
"""A block drafter computed densely, from the target in Hugging Face's code: no cache, no engine."""

from collections.abc import Sequence
from pathlib import Path

import torch

from vllm_spec_ext.proposers.models import SlotHint
from vllm_spec_ext.proposers.nar.extras import Copies, conditional_log_probs
from vllm_spec_ext.training.nar.model import NarDrafter


class DenseDrafter:
    """What the slots of a block predict."""

    def __init__(self, target: Path, drafter: Path) -> None:
        """Read both folders."""
        from transformers import LlamaForCausalLM

        self.target = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.drafter = NarDrafter.load(drafter)
        self._states: list[torch.Tensor] = []
        for layer in self.drafter.config.target_layer_ids:
            self.target.model.layers[layer].register_forward_hook(
                lambda module, given, made: self._states.append(
                    made[0] if isinstance(made, tuple) else made
                )
            )

    @torch.no_grad()
    def log_probs(
        self, text: Sequence[int], num_slots: int, hint: SlotHint | None = None
    ) -> torch.Tensor:
        """[num_slots, vocab] by each slot alone; tokens that it cannot draft have -inf."""
        return self._predict(text, num_slots, hint)[1]

    @torch.no_grad()
    def conditional(
        self, text: Sequence[int], tokens: torch.Tensor, hint: SlotHint | None = None
    ) -> torch.Tensor:
        """[num_slots, p, m] of candidates [num_slots, m], as the engine gives them."""
        hidden, alone = self._predict(text, len(tokens), hint)
        base = alone.gather(1, tokens)
        extras, embed = self.drafter.extras, self.target.get_input_embeddings()
        if not self.drafter.config.nar.selector_rank:
            return base.unsqueeze(1)
        first = torch.full_like(tokens[:1], int(text[-1]))
        before = torch.cat([first, tokens[:-1]])
        edges = extras.edges(hidden, extras.table_a(embed(before)), extras.table_b(embed(tokens)))
        return conditional_log_probs(base, edges)

    def _predict(
        self, text: Sequence[int], num_slots: int, hint: SlotHint | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        drafter, config = self.drafter, self.drafter.config
        self._states.clear()
        final = self.target.model(torch.tensor([list(text)])).last_hidden_state
        states = torch.cat(self._states, dim=-1)[:, : len(text) - 1]
        ids = torch.full((1, 1, 1 + num_slots), config.mask_token_id)
        ids[0, 0, 0] = int(text[-1])
        copies, kinds = None, torch.zeros(num_slots, dtype=torch.long)
        shown = torch.zeros(num_slots, dtype=torch.long)
        if hint is not None:
            given = torch.from_numpy(hint.tokens[:num_slots]).long()
            shown[: len(given)], kinds[: len(given)] = given, hint.kind
            copies = Copies(shown[None, None], kinds[None, None])
        anchors = torch.tensor([[len(text) - 1]])
        embed = self.target.get_input_embeddings()
        before = final[:, len(text) - 2 : len(text) - 1]
        hidden = drafter(states, anchors, ids, embed, copies, before)[0, 0]
        logits = hidden @ self.target.lm_head.weight.T
        if copies is not None:
            bonus = drafter.extras.copy_bonus(hidden, torch.arange(num_slots), kinds)
            logits[torch.arange(num_slots), shown] += bonus
        listed = drafter.extras.draft_vocab
        if listed is not None:
            allowed = torch.full_like(logits, float("-inf"))
            allowed[:, listed.long()] = 0.0
            allowed[kinds.nonzero().flatten(), shown[kinds > 0]] = 0.0
            logits = logits + allowed
        return hidden, logits.log_softmax(-1)
