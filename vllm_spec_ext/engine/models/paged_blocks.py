# SPDX-License-Identifier: Apache-2.0
"""Passes of a DFlash drafter over vLLM's KV cache; one on every tensor-parallel rank.

vLLM's module makes the context's keys and values of all layers at once and writes them
(``precompute_and_store_context_kv``); its layers run the blocks. Around these stand the extras of
:mod:`vllm_spec_ext.proposers.nar.extras`.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm_spec_ext.engine.models.block_layers import layers_of, put_layers
from vllm_spec_ext.engine.models.block_model import BlockOutput
from vllm_spec_ext.engine.models.block_pass import BlockPass, ContextRows
from vllm_spec_ext.engine.models.draft_graphs import Inputs
from vllm_spec_ext.engine.models.forward_pass import ForwardPass
from vllm_spec_ext.engine.models.paged_model import PagedModel
from vllm_spec_ext.engine.models.unread_states import UnreadStates
from vllm_spec_ext.engine.packed_projection import packed_projection
from vllm_spec_ext.proposers.blockwise.draft_logits import DraftLogits
from vllm_spec_ext.proposers.models import BlockWeights
from vllm_spec_ext.proposers.nar.extras import Copies, SlotExtras, conditional_log_probs
from vllm_spec_ext.proposers.records import Projection
from vllm_spec_ext.top_columns import top_log_probs

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig

_TABLE_CHUNK = 8192  # embeddings that are looked up at a time
_MOST_LOADED = 3  # weights that are laid out: in use, on trial, and of the start


class _Loaded(NamedTuple):
    """The weights of a version as this rank uses them."""

    layers: Mapping[str, torch.nn.Module]
    mask: torch.nn.Parameter | None
    extras: SlotExtras
    tables: tuple[torch.Tensor, torch.Tensor] | None


class PagedBlocks(PagedModel):
    """A drafter on one rank, with the hidden states of the current step."""

    def __init__(
        self,
        module: torch.nn.Module,
        vllm_config: "VllmConfig",
        layer_names: Sequence[str],
        device: torch.device,
        layers: tuple[int, ...],
        extras: SlotExtras,
        target: torch.nn.Module,
        vocab_size: int,
    ) -> None:
        """Without caches.

        Args:
            module: vLLM's model.
            vllm_config: The engine's, with the model as its drafter.
            layer_names: Its attention layers.
            device: Of its weights.
            layers: Of the target, whose states it reads, ascending.
            extras: What it has beyond DFlash.
            target: Whose projection it uses for a vocabulary of its own.
            vocab_size: The target's.
        """
        super().__init__(module, vllm_config, layer_names, device)
        if device.type == "cpu":
            _norm_each_layer(module)
        self.layers = layers
        self._extras = extras
        if extras.guesses is not None:
            extras.guesses.heads.to(dtype=next(module.parameters()).dtype)
        self._finals: torch.Tensor | None = None
        self._guesses: torch.Tensor | None = None  # [num_rows, hidden] of the current pass
        self._vocab_size = vocab_size
        self._states: Sequence[torch.Tensor] = ()
        self._unread = UnreadStates()
        self._waiting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._current: BlockPass | None = None
        self._logits = DraftLogits(target, extras.draft_vocab, vocab_size, packed_projection)
        self._tables = self._make_tables(extras) if extras.config.selector_rank else None
        self._loaded: dict[int, _Loaded] = {}  # by number, the one in use last

    def begin_step(self, states: Sequence[torch.Tensor], finals: torch.Tensor) -> None:
        """The target ran a step.

        Args:
            states: Of each of :attr:`layers`: [rows of the step, hidden].
            finals: [rows of the step, hidden] behind the last norm.
        """
        self._states = states
        self._finals = finals

    def rest(self, num_requests: int) -> None:
        """The step is not read now; see :class:`.unread_states.UnreadStates`."""
        assert self._finals is not None
        self._unread.keep([*self._states, self._finals], num_requests)

    def join_unread(self) -> None:
        """The step is read, and those before it: their states come first."""
        assert self._finals is not None
        *self._states, self._finals = self._unread.join([*self._states, self._finals])

    @torch.inference_mode()
    def write_context(self, plan: ContextRows, wait: bool = False) -> None:
        """Make KV of the target's states, or keep them until the next ones that do not wait."""
        waiting, self._waiting = self._waiting, []  # where this fails none of it is there
        if len(plan.states):
            rows = self._on_device(plan.states)
            states = torch.cat([state[rows] for state in self._states], dim=-1)  # copies
            places = self._on_device(plan.positions), self._on_device(plan.slots)
            waiting.append((states, *places))
        if wait:
            self._waiting = waiting
            return
        states, positions, slots = map(torch.cat, zip(*waiting, strict=True))
        self.module.precompute_and_store_context_kv(
            self.module.combine_hidden_states(states), positions, slots
        )

    def has(self, number: int) -> bool:
        """Whether these weights are laid out here."""
        return number in self._loaded

    @torch.no_grad()
    def exchange(self, number: int, weights: BlockWeights | None) -> None:
        """Run blocks with other weights; those that make the context stay.

        Args:
            number: Of the weights.
            weights: Whole ones; None if they are here.
        """
        loaded = self._loaded.pop(number, None)
        if loaded is None:
            assert weights is not None
            loaded = self._load(weights)
        self._loaded[number] = loaded
        while len(self._loaded) > _MOST_LOADED:
            del self._loaded[next(iter(self._loaded))]
        put_layers(self.module, loaded.layers)
        if loaded.mask is not None:
            self.module.model.mask_embedding = loaded.mask
        self._extras, self._tables = loaded.extras, loaded.tables

    def _load(self, weights: BlockWeights) -> "_Loaded":
        extras = copy.deepcopy(self._extras)
        extras.load_state_dict(dict(weights.extras))
        mask = None
        if weights.mask is not None:
            own = self.module.model.mask_embedding
            mask = torch.nn.Parameter(weights.mask.to(own), requires_grad=False)
        tables = self._make_tables(extras) if extras.config.selector_rank else None
        return _Loaded(layers_of(self.module, weights.layers), mask, extras, tables)

    @torch.inference_mode()
    def run_blocks(self, plan: BlockPass) -> BlockOutput:
        """Candidates of each wanted row."""
        self._current = plan
        self._guesses = self._guess(plan)
        wanted = self._on_device(plan.rows.wanted)
        hidden = self._hidden_of(plan.rows)[wanted]
        if self._guesses is not None:
            slots = self._on_device(plan.slot_numbers)[wanted]
            hidden = self._extras.settle(hidden, slots, self._guesses[wanted])
        shown = self._shown(plan)
        logits = self._slot_logits(hidden, shown)
        if logits is None:  # vLLM gives them to the first rank alone, which decides
            return BlockOutput(hidden.new_empty(0, 0).long(), hidden.new_empty(0, 0, 0))
        if shown is not None:
            logits = self._preferring_copies(hidden, logits, plan, shown)
        base, places = top_log_probs(logits, min(plan.num_candidates, self._logits.num_listed))
        tokens = self._logits.tokens(places, shown)
        if self._tables is None:
            return BlockOutput(tokens, base.unsqueeze(1))
        table_a, table_b = self._tables
        before = torch.cat([tokens[:1], tokens[:-1]])  # rows of a block follow one another
        is_first = self._on_device(plan.slot_numbers[plan.rows.wanted] == 0)
        lasts = self._on_device(plan.last_tokens)
        before = torch.where(is_first[:, None], lasts[:, None], before)
        edges = self._extras.edges(hidden, table_a[before], table_b[tokens])
        return BlockOutput(tokens, conditional_log_probs(base, edges))

    def _find_projection(self) -> Projection:
        """Of the whole vocabulary; with a part of it there is one of these rows."""
        if self._extras.draft_vocab is not None:
            return self.module.compute_logits
        return super()._find_projection()

    def _inputs(self, plan: ForwardPass) -> Inputs:
        """Masks are filled as the extras say."""
        assert self._current is not None
        ids = self._on_device(plan.ids)
        embeds = self.module.embed_input_ids(ids)
        config = self._extras.config
        if config.slot_queries or config.copy_match or config.heads:
            numbers = self._on_device(self._current.slot_numbers)
            copies = None
            if config.copy_match and self._current.kinds.any():
                copies = Copies(
                    self._on_device(self._current.shown), self._on_device(self._current.kinds)
                )
            filled = self._extras.fill(
                embeds, numbers.clamp(min=0), copies, self._embed, self._guesses
            )
            embeds = torch.where((numbers >= 0)[:, None], filled, embeds)
        return {
            "input_ids": ids,
            "positions": self._on_device(plan.positions),
            "inputs_embeds": embeds,
        }

    def _blank_inputs(self, numbers: torch.Tensor) -> Inputs:
        embeds = self.module.embed_input_ids(numbers)
        return {"input_ids": numbers, "positions": numbers, "inputs_embeds": embeds}

    def _guess(self, plan: BlockPass) -> torch.Tensor | None:
        """[num_rows, hidden] states of the heads, of the rows' slots; None without heads."""
        guesses = self._extras.guesses
        if guesses is None:
            return None
        assert self._finals is not None
        copied, kinds = plan.first_hints(guesses.heads.config.num_heads)
        states = guesses(
            self._finals[self._on_device(plan.states)],
            self._on_device(plan.tokens),
            self._on_device(copied),
            self._on_device(kinds),
            self._embed,
        )
        numbers = self._on_device(plan.slot_numbers)
        found: torch.Tensor = states[self._on_device(plan.blocks), numbers.clamp(min=0)]
        return found

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.module.model.embed_tokens(ids)
        return found

    def _shown(self, plan: BlockPass) -> torch.Tensor | None:
        """[n] int64 token that each wanted slot is shown, -1 = none; None if there are none."""
        wanted = plan.rows.wanted
        kinds = plan.kinds[wanted]
        if not self._extras.config.copy_match or not kinds.any():
            return None
        return self._on_device(np.where(kinds > 0, plan.shown[wanted], -1))

    def _slot_logits(self, hidden: torch.Tensor, shown: torch.Tensor | None) -> torch.Tensor | None:
        """[n, vocabulary or columns of the draft vocabulary]."""
        if self._extras.draft_vocab is not None:
            return self._logits(hidden, shown)
        logits = self._project(hidden)
        assert logits is not None  # vLLM gathers them on every rank
        return logits[:, : self._vocab_size]

    def _preferring_copies(
        self, hidden: torch.Tensor, logits: torch.Tensor, plan: BlockPass, shown: torch.Tensor
    ) -> torch.Tensor:
        """Logits in which the tokens that slots were shown have got their bonus."""
        wanted = plan.rows.wanted
        kinds = self._on_device(plan.kinds[wanted])
        numbers = self._on_device(plan.slot_numbers[wanted])
        bonus = self._extras.copy_bonus(hidden, numbers, kinds)  # 0 where nothing is shown
        columns = self._logits.places(shown).clamp(min=0)
        return logits.float().scatter_add(1, columns[:, None], bonus[:, None])

    def _make_tables(self, extras: SlotExtras) -> tuple[torch.Tensor, torch.Tensor]:
        """The selector's tables A and B: [vocab, rank] each, made of the embeddings."""
        first, second = [], []
        for start in range(0, self._vocab_size, _TABLE_CHUNK):
            end = min(start + _TABLE_CHUNK, self._vocab_size)
            embeddings = self._embed(torch.arange(start, end, device=self._device))
            dtype = embeddings.dtype
            first.append(extras.table_a(embeddings).to(dtype))
            second.append(extras.table_b(embeddings).to(dtype))
        return torch.cat(first), torch.cat(second)


def _norm_each_layer(module: torch.nn.Module) -> None:
    """Give the context's keys of each layer the norm of that layer.

    vLLM 0.32 asks one kernel for the norms of all layers, with weights [layers, head_dim]; the one
    for CPUs takes the first row for all of them.
    """
    norms = [layer.self_attn.k_norm for layer in module.model.layers]

    def normalise(keys: torch.Tensor) -> torch.Tensor:  # [layers, n, kv_heads, head_dim]
        return torch.stack([norm(own) for norm, own in zip(norms, keys, strict=True)])

    module.model._normalize_context_k = normalise
