# SPDX-License-Identifier: Apache-2.0
"""A toy target over paged KV that runs passes over views, and the same computed without pages."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from paged_toy import LAYERS, VOCAB, WIDTH, Floats, ToyModel
from toy_simulation import BLOCK, BLOCKS, SCRATCH

from vllm_spec_ext.engine.models.hosted_model import BatchRow
from vllm_spec_ext.engine.views.layer_tables import LayerTables
from vllm_spec_ext.engine.views.page_layout import PageBudget
from vllm_spec_ext.engine.views.page_means import PageMeans, rows_of_keys
from vllm_spec_ext.engine.views.view_pass import ViewPass
from vllm_spec_ext.proposers.views import ViewSpec

NAMES = [f"layers.{number}" for number in range(LAYERS)]


class ToyTarget(ToyModel):
    """Runs what views plan. Caches are those of vLLM's FlashAttention, with one head."""

    def __init__(self, seed: int, specs: Sequence[ViewSpec], max_num_seqs: int = 40) -> None:
        super().__init__(seed)
        shape = (BLOCKS + SCRATCH, 1, BLOCK, 2 * WIDTH)
        rng = np.random.default_rng(seed)
        self.caches = {name: torch.from_numpy(rng.normal(size=shape) * 3.0) for name in NAMES}
        self.means = PageMeans(self.caches, rows_of_keys, BLOCK)
        self.views = [
            LayerTables(
                PageBudget.of(spec, BLOCK),
                NAMES,
                [NAMES[number] for number in spec.dense_layers],
                max_num_seqs,
                torch.device("cpu"),
                self.means if spec.kind == "retrieval" else None,
            )
            for spec in specs
        ]
        self.known: dict[tuple[int, ...], list[tuple[Floats, Floats]]] = {}

    def certain_kv(self, tokens: Sequence[int]) -> list[tuple[Floats, Floats]]:
        """Keys and values of each layer, [len(tokens), WIDTH], as the target's own steps make."""
        key = tuple(tokens)
        if key not in self.known:
            state, found = self._embed(np.asarray(tokens), np.arange(len(tokens))), []
            for layer in range(LAYERS):
                keys, values = state @ self.key[layer], state @ self.value[layer]
                found.append((keys, values))
                state = state + self._attend(state, layer, keys, values)
            self.known[key] = found
        return self.known[key]

    def run_step(self, rows: Sequence[BatchRow]) -> None:
        """A step of the target: KV of all that it read, and noise where it read rejected drafts."""
        for row in rows:
            end = len(row.tokens) if row.is_prefill else len(row.tokens) - 1
            made = self.certain_kv(row.tokens[:end].tolist())
            for name, (keys, values) in zip(NAMES, made, strict=True):
                for position in range(row.computed, len(row.blocks) * BLOCK):
                    place = int(row.blocks[position // BLOCK]), 0, position % BLOCK
                    pair = np.full(2 * WIDTH, 7.0)
                    if position < end:
                        pair = np.concatenate([keys[position], values[position]])
                    self.caches[name][place] = torch.from_numpy(pair)

    def run_view(self, index: int, plan: ViewPass) -> torch.Tensor:
        view = self.views[index]
        if plan.begins is not None:
            view.begin(plan.begins)
        view.begin_pass(plan)
        state = self._embed(plan.ids, plan.positions)
        ends = np.cumsum(plan.query_lens)
        for layer, name in enumerate(NAMES):
            both = np.concatenate([state @ self.key[layer], state @ self.value[layer]], axis=1)
            blocks, offsets = np.divmod(plan.slots, BLOCK)
            self.caches[name][blocks, 0, offsets] = torch.from_numpy(both)
            own = view.of(name)
            table = view.shared() if own is None else own
            lengths = plan.view_lens
            if view.is_dense(name):
                table, lengths = view.full(), plan.full_lens
            queries = torch.from_numpy(state @ self.query[layer])[:, None]
            view.choose(name, queries, table)
            added = np.empty_like(state)
            for part, end in enumerate(ends):
                first, seen = end - plan.query_lens[part], np.arange(lengths[part])
                pages = table[part].numpy()[seen // BLOCK]
                rows = self.caches[name][pages, 0, seen % BLOCK].numpy()
                added[first:end] = self._attend(
                    state[first:end], layer, rows[:, :WIDTH], rows[:, WIDTH:]
                )
            state = state + added
        view.end_pass()
        return torch.from_numpy(state @ self.head)


@dataclass
class _Kept:
    """What a request chose last."""

    recent_start: int
    pages: list[list[int]]  # by layer
    age: int = 0


@dataclass
class _Drafted:
    """A request in a round, by definition."""

    certain: list[int]
    kept: _Kept | None  # None: it sees everything, or has nothing to choose
    is_choosing: bool
    recent_start: int
    keys: list[Floats] = field(default_factory=list)  # by layer, of all that was read
    values: list[Floats] = field(default_factory=list)
    count: int = 0  # rows read in the round


class DenseViews:
    """What a view shows, by its definition: sets of positions, and no pages, slots or tables."""

    def __init__(self, target: ToyTarget, spec: ViewSpec) -> None:
        self.target, self.spec, self.budget = target, spec, PageBudget.of(spec, BLOCK)
        self.kept: dict[str, _Kept] = {}
        self.now: dict[str, _Drafted] = {}
        self.num_partial = self.num_stale = 0

    def begin(self, name: str, tokens: Sequence[int]) -> None:
        """A round of a request."""
        num_full = (len(tokens) - 1) // BLOCK
        budget = self.budget
        made = self.target.certain_kv(tokens[:-1])
        recent, kept, is_choosing = 0, None, False
        is_partial = self.spec.kind != "full" and num_full > budget.num_pages
        if is_partial:
            self.num_partial += 1
            recent = num_full - budget.num_recent
            if self.spec.kind == "retrieval":
                kept = self.kept.get(name)
                if kept is not None:
                    kept.age += 1
                is_choosing = (
                    kept is None
                    or kept.age >= self.spec.refresh
                    or recent - kept.recent_start > budget.most_growth
                )
                if is_choosing:
                    kept = _Kept(recent, [[] for _ in range(LAYERS)])
                else:
                    assert kept is not None
                    self.num_stale += 1
                    recent = kept.recent_start
        self.now[name] = _Drafted(
            list(tokens[:-1]),
            kept,
            is_choosing,
            recent if is_partial else -1,
            [keys for keys, _ in made],
            [values for _, values in made],
        )

    def run(self, name: str, tokens: Sequence[int]) -> Floats:
        """[n, VOCAB] logits behind each token."""
        target, it = self.target, self.now[name]
        start = len(it.keys[0])
        state = target._embed(np.asarray(tokens), start + np.arange(len(tokens)))
        for layer in range(LAYERS):
            it.keys[layer] = np.concatenate([it.keys[layer], state @ target.key[layer]])
            it.values[layer] = np.concatenate([it.values[layer], state @ target.value[layer]])
            if it.is_choosing and layer not in self.spec.dense_layers:
                assert it.kept is not None
                query = state[0] @ target.query[layer]
                it.kept.pages[layer] = self._best(query, it.keys[layer], it.recent_start)
            shown = self._shown(it, layer)
            state = state + target._attend(
                state, layer, it.keys[layer][shown], it.values[layer][shown]
            )
        if it.is_choosing:
            assert it.kept is not None
            self.kept[name], it.is_choosing = it.kept, False
        found: Floats = state @ target.head
        return found

    def keep(self, name: str, num_taken_back: int) -> None:
        """Forget the last tokens."""
        it = self.now[name]
        if num_taken_back:
            it.keys = [keys[:-num_taken_back] for keys in it.keys]
            it.values = [values[:-num_taken_back] for values in it.values]

    def forget(self, names: Sequence[str]) -> None:
        for name in names:
            self.kept.pop(name, None)

    def _best(self, query: Floats, keys: Floats, recent_start: int) -> list[int]:
        pages = range(self.budget.num_sink, recent_start)
        means = np.stack([keys[page * BLOCK : (page + 1) * BLOCK].mean(axis=0) for page in pages])
        order = np.argsort(-(means @ query), kind="stable")
        return sorted(pages[i] for i in order[: self.budget.num_chosen])

    def _shown(self, it: _Drafted, layer: int) -> list[int]:
        length = len(it.keys[layer])
        if it.recent_start < 0 or layer in self.spec.dense_layers:
            return list(range(length))
        pages = list(range(self.budget.num_sink))
        if it.kept is not None:
            pages += it.kept.pages[layer]
        shown = [page * BLOCK + i for page in pages for i in range(BLOCK)]
        return [*shown, *range(it.recent_start * BLOCK, length)]


assert VOCAB > 1
