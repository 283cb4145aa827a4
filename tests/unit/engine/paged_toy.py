# SPDX-License-Identifier: Apache-2.0
"""A toy transformer over paged KV, and a toy of vLLM's scheduler and block manager, in numpy."""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_spec_ext.engine.models.batch_events import BlockEvents
from vllm_spec_ext.engine.models.block_model import BlockOutput
from vllm_spec_ext.engine.models.block_pass import BlockPass, ContextRows
from vllm_spec_ext.engine.models.forward_pass import ForwardPass
from vllm_spec_ext.engine.models.hosted_model import BatchRow
from vllm_spec_ext.proposers.models import BlockWeights

VOCAB, WIDTH, LAYERS = 17, 6, 2
Floats = NDArray[np.float64]


class ToyModel:
    """Two layers of attention: wrong KV anywhere shows in all logits behind it."""

    streams = False  # whether whole blocks may be out of sight

    def __init__(self, seed: int, num_blocks: int = 0, block_size: int = 1) -> None:
        rng = np.random.default_rng(seed)
        self.embedding = rng.normal(size=(VOCAB, WIDTH))
        self.query, self.key, self.value = rng.normal(size=(3, LAYERS, WIDTH, WIDTH))
        self.head = rng.normal(size=(WIDTH, VOCAB))
        self.block_size = block_size
        junk = rng.normal(size=(2, LAYERS, num_blocks * block_size, WIDTH))
        self.keys, self.values = junk * 3.0

    def forward(self, plan: ForwardPass) -> torch.Tensor:
        state = self.run(plan, self._embed(plan.ids, plan.positions))
        return torch.from_numpy(state[plan.wanted] @ self.head)

    def run(self, plan: ForwardPass, state: Floats) -> Floats:
        """The layers' output for their input, [rows, WIDTH] each."""
        parts = np.repeat(np.arange(len(plan.query_lens)), plan.query_lens)
        ends = np.cumsum(plan.query_lens)
        computed = plan.seq_lens - plan.query_lens
        expected = np.arange(len(parts)) - (ends - plan.query_lens)[parts] + computed[parts]
        hidden = plan.positions - expected
        assert (hidden % self.block_size == 0).all()
        assert (hidden >= 0).all() if self.streams else not hidden.any()
        for layer in range(LAYERS):
            self.keys[layer, plan.slots] = state @ self.key[layer]
            self.values[layer, plan.slots] = state @ self.value[layer]
            added = np.empty_like(state)
            for part, end in enumerate(ends):
                first, length = end - plan.query_lens[part], int(plan.seq_lens[part])
                seen = np.arange(length)
                blocks = plan.tables[part, seen // self.block_size].astype(np.int64)
                slots = blocks * self.block_size + seen % self.block_size
                assert (slots[computed[part] :] == plan.slots[first:end]).all()
                added[first:end] = self._attend(
                    state[first:end], layer, self.keys[layer, slots], self.values[layer, slots]
                )
            state = state + added
        return state

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        size = self.block_size
        for source, target in pairs:
            for cache in (self.keys, self.values):
                cache[:, target * size : (target + 1) * size] = cache[
                    :, source * size : (source + 1) * size
                ]

    def reload(self, weights: "Iterable[tuple[str, torch.Tensor]]") -> None:
        for name, tensor in weights:
            setattr(self, name, tensor.numpy())

    def dense(self, tokens: Sequence[int]) -> Floats:
        """[len(tokens), VOCAB] logits, without any cache."""
        state = self.run_dense(self._embed(np.asarray(tokens), np.arange(len(tokens))))
        found: Floats = state @ self.head
        return found

    def run_dense(self, state: Floats) -> Floats:
        """The layers' output for their input, without any cache."""
        for layer in range(LAYERS):
            keys, values = state @ self.key[layer], state @ self.value[layer]
            state = state + self._attend(state, layer, keys, values)
        return state

    def _embed(self, ids: Any, positions: Any) -> Floats:
        waves = np.sin(np.asarray(positions)[:, None] / (1.0 + np.arange(WIDTH)))
        found: Floats = self.embedding[ids] + waves
        return found

    def _attend(self, states: Floats, layer: int, keys: Floats, values: Floats) -> Floats:
        """Of the last positions to all positions before them and to themselves."""
        scores = states @ self.query[layer] @ keys.T / WIDTH
        last = len(keys) - len(states) + np.arange(len(states))
        scores[np.arange(len(keys)) > last[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        found: Floats = weights @ values / weights.sum(axis=1, keepdims=True)
        return found


def target_state(tokens: Sequence[int]) -> Floats:
    """[WIDTH] a toy of the target's hidden state behind these tokens: depends on all of them."""
    found: Floats = np.cos(_digest(tuple(tokens)) * (1.0 + np.arange(WIDTH)) + len(tokens))
    return found


@lru_cache(None)
def _digest(tokens: tuple[int, ...]) -> float:
    return math.sin(3.0 * _digest(tokens[:-1]) + tokens[-1]) if tokens else 0.0


class ToyHead(ToyModel):
    """An EAGLE-3 head: reads tokens with states, the target's or its own outputs."""

    def __init__(self, seed: int, num_blocks: int = 0, block_size: int = 1) -> None:
        super().__init__(seed, num_blocks, block_size)
        self.target_rows: dict[int, Floats] = {}
        self.outputs: list[Floats] = []
        self._known: dict[tuple[tuple[int, ...], int], Floats] = {}

    def begin_step(self, step: "ToyStep") -> None:
        self.target_rows = {row: target_state(read) for row, read in step.target_rows.items()}
        self.outputs = []

    def forward(self, plan: ForwardPass) -> torch.Tensor:
        assert plan.states is not None
        read = [
            self.target_rows[int(state)] if state >= 0 else self.outputs[int(~state)]
            for state in plan.states
        ]
        state = self.run(plan, self._embed(plan.ids, plan.positions) + np.stack(read))
        self.outputs += list(state[plan.wanted])
        return torch.from_numpy(state[plan.wanted] @ self.head)

    def dense_with(self, text: Sequence[int], num_certain: int) -> Floats:
        """[n, VOCAB] logits behind the certain tokens and behind each drafted one."""
        ends = range(num_certain, len(text) + 1)
        return np.stack([self._output(tuple(text[:end]), num_certain) for end in ends]) @ self.head

    def _output(self, text: tuple[int, ...], num_certain: int) -> Floats:
        """Behind the last token."""
        key = text, num_certain
        if key not in self._known:
            states = [target_state(text[:end]) for end in range(1, num_certain)]
            states += [
                self._output(text[:end], num_certain) for end in range(num_certain, len(text))
            ]
            inputs = self._embed(np.asarray(text[1:]), np.arange(len(text) - 1))
            self._known[key] = self.run_dense(inputs + np.stack(states))[-1]
        return self._known[key]


class ToyBlocks(ToyModel):
    """A block drafter: KV of the target's states, and rows that see all of their block."""

    def __init__(self, seed: int, num_blocks: int = 0, block_size: int = 1) -> None:
        super().__init__(seed, num_blocks, block_size)
        self.target_rows: dict[int, Floats] = {}
        self.waiting: list[tuple[Floats, Any]] = []  # context of rows, and their slots
        self.num_written = 0  # passes

    def begin_step(self, step: "ToyStep") -> None:
        self.target_rows = {row: target_state(read) for row, read in step.target_rows.items()}

    def write_context(self, plan: ContextRows, wait: bool = False) -> None:
        if len(plan.states):
            states = np.stack([self.target_rows[int(state)] for state in plan.states])
            self.waiting.append((self._context(states, plan.positions), plan.slots))
        if wait:
            return
        self.num_written += 1
        context, slots = map(np.concatenate, zip(*self.waiting, strict=True))
        self.waiting.clear()
        # One pass writes them in any order.
        assert len(set(slots.tolist())) == len(slots), "KV of two tokens in one place"
        for layer in range(LAYERS):
            self.keys[layer, slots] = context @ self.key[layer]
            self.values[layer, slots] = context @ self.value[layer]

    def exchange(self, number: int, weights: BlockWeights) -> None:
        self.head = weights.layers["head"].numpy()

    def run_blocks(self, plan: BlockPass) -> BlockOutput:
        rows = plan.rows
        assert (rows.query_lens == 1).all()
        state = self._block_inputs(rows.ids, rows.positions, plan.shown, plan.kinds)
        # Every row of a block reads what the target saw in front of it.
        state = state + np.stack([self.target_rows[int(plan.states[i])] for i in plan.blocks])
        for layer in range(LAYERS):
            self.keys[layer, rows.slots] = state @ self.key[layer]
            self.values[layer, rows.slots] = state @ self.value[layer]
            added = np.empty_like(state)
            for row, length in enumerate(rows.seq_lens):
                seen = np.arange(length)
                blocks = rows.tables[row, seen // self.block_size].astype(np.int64)
                slots = blocks * self.block_size + seen % self.block_size
                assert slots[rows.positions[row]] == rows.slots[row]
                keys, values = self.keys[layer, slots], self.values[layer, slots]
                added[row] = self._see_all(state[row], layer, keys, values)
            state = state + added
        logits = torch.from_numpy(state[rows.wanted] @ self.head)
        best = logits.log_softmax(-1).topk(plan.num_candidates)
        return BlockOutput(best.indices, best.values[:, None])

    def dense_block(
        self, text: Sequence[int], ids: Sequence[int], shown: Any, kinds: Any
    ) -> Floats:
        """[len(ids), VOCAB] log-probabilities of a block that begins with a text's last token."""
        length = len(text) - 1
        states = np.stack([target_state(text[: end + 1]) for end in range(length)])
        context = self._context(states, np.arange(length))
        positions = length + np.arange(len(ids))
        state = self._block_inputs(np.asarray(ids), positions, shown, kinds)
        state = state + states[-1]
        for layer in range(LAYERS):
            both = np.concatenate([context, state])
            keys, values = both @ self.key[layer], both @ self.value[layer]
            state = state + np.stack([self._see_all(row, layer, keys, values) for row in state])
        found: Floats = torch.from_numpy(state @ self.head).log_softmax(-1).numpy()
        return found

    def _context(self, states: Floats, positions: Any) -> Floats:
        return states + np.sin(np.asarray(positions)[:, None] / (2.0 + np.arange(WIDTH)))

    def _block_inputs(self, ids: Any, positions: Any, shown: Any, kinds: Any) -> Floats:
        hints = self.embedding[shown] * np.asarray(kinds)[:, None] * 0.3
        return self._embed(ids, positions) + hints

    def _see_all(self, state: Floats, layer: int, keys: Floats, values: Floats) -> Floats:
        scores = state @ self.query[layer] @ keys.T / WIDTH
        weights = np.exp(scores - scores.max())
        found: Floats = weights @ values / weights.sum()
        return found


@dataclass
class ToyRequest:
    """As the scheduler knows it."""

    name: str
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    draft: list[int] = field(default_factory=list)
    is_new: bool = True


@dataclass
class ToyStep:
    """What one step ran."""

    events: BlockEvents
    rows: list[BatchRow]
    decoded: list[ToyRequest]
    new_tokens: list[int]
    target_rows: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Of each row of the target: the tokens that it has read up to it."""


class ToyScheduler:
    """Chunked prefill, prefix cache, preemption, unscheduled steps, aborts, sessions.

    Blocks are hashed when their tokens are scheduled, so that a request may hit blocks that another
    one fills in the same step, as in vLLM.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        rng: random.Random,
        ahead: int = 0,
        sessions: float = 0.3,
    ) -> None:
        """Empty.

        Args:
            num_blocks: Of the requests.
            block_size: Tokens a block.
            max_rows: Of a step.
            rng: Decides what happens.
            ahead: Tokens behind a block that it is hashed with.
            sessions: Share of requests that go on when they have ended.
        """
        self.ahead, self.sessions = ahead, sessions
        self.block_size, self.max_rows, self.rng = block_size, max_rows, rng
        self.free = list(range(1, num_blocks))  # the least recently used first
        self.users = [0] * num_blocks
        self.cached: dict[tuple[int, ...], int] = {}
        self.hash_of: dict[int, tuple[int, ...]] = {}
        self.waiting: list[ToyRequest] = []
        self.running: list[ToyRequest] = []
        self.num_hits = self.num_preempted = self.num_sessions = 0

    def step(self, choose: Any) -> ToyStep:
        """Schedule, run and sample.

        Args:
            choose: The target: tokens so far -> next token.
        """
        events, scheduled, budget = BlockEvents(), [], self.max_rows
        before = self.num_preempted
        for request in list(self.running):
            if request not in self.running:  # preempted for one before it
                continue
            if self.rng.random() < 0.05:
                self._leave(request, events)  # aborted
                continue
            if self.rng.random() < 0.1:
                continue  # not scheduled in this step
            number = len(request.tokens) + len(request.draft) - request.computed
            number = min(number, budget)
            given = self._allocate(request, number, events)
            if given is None or not number:
                continue
            if given:
                events.allocated.append(given)
            scheduled.append((request, number))
            budget -= number
        while self.waiting and budget > 0 and self.num_preempted == before:
            request = self.waiting[0]
            self._hit(request)
            number = min(len(request.tokens) - request.computed, budget)
            free = len(self.free)
            needed = -(-(request.computed + number) // self.block_size) - len(request.blocks)
            if needed > free:
                self._release(request)
                break
            self.waiting.pop(0)
            assert self._allocate(request, number, events) is not None
            events.entered.append((list(request.blocks), request.computed))
            self.running.append(request)
            scheduled.append((request, number))
            budget -= number
        return self._run(events, scheduled, choose)

    def _run(self, events: BlockEvents, scheduled: list[Any], choose: Any) -> ToyStep:
        result = ToyStep(events, [], [], [])
        names = list(range(1000))
        self.rng.shuffle(names)  # rows of the target; accepted ones may lie anywhere
        for request, number in scheduled:
            if request not in self.running:
                continue
            before = request.computed
            end = before + number
            is_prefill = end < len(request.tokens)
            if is_prefill:
                certain = request.tokens[:end]
                request.computed = end
            else:
                draft = request.draft[: end - len(request.tokens)]
                request.computed = len(request.tokens)
                new = [choose(request.tokens)]
                for token in draft:
                    if token != new[-1]:
                        break
                    request.tokens.append(new[-1])
                    request.computed += 1
                    new.append(choose(request.tokens))
                request.tokens.append(new[-1])
                certain = request.tokens
                result.decoded.append(request)
                result.new_tokens.append(len(new))
            request.draft = []
            rows = [names.pop() for _ in range(before, request.computed)]
            for position, row in enumerate(rows, before):
                result.target_rows[row] = tuple(request.tokens[: position + 1])
            result.rows.append(
                BatchRow(
                    request.name,
                    np.array(request.blocks, np.int32),
                    np.array(certain, np.int32),
                    is_prefill,
                    computed=before,
                    following=np.array(request.tokens[1 : request.computed + 1], np.int32),
                    state_rows=np.array(rows, np.int64),
                )
            )
        return result

    def end(self, events: BlockEvents) -> None:
        """After drafting: requests that have all their tokens leave, or go on as sessions."""
        for request in list(self.running):
            if len(request.tokens) - request.num_prompt < request.max_tokens:
                continue
            if self.rng.random() < self.sessions:
                self._go_on(request, events)
            else:
                self._leave(request, events)

    def _go_on(self, request: ToyRequest, events: BlockEvents) -> None:
        """A session: keeps what is computed, and gets other tokens behind it."""
        self.num_sessions += 1
        self.running.remove(request)
        del request.tokens[request.computed :]  # the last one has no KV yet
        request.tokens += [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 9))]
        request.num_prompt = len(request.tokens)
        request.draft, request.is_new = [], False
        events.gone.append(request.name)
        self.waiting.append(request)

    def _hit(self, request: ToyRequest) -> None:
        """Blocks of the prefix cache; a session has its own ones."""
        if request.blocks:
            return
        size = self.block_size
        for end in range(size, len(request.tokens), size):
            block = self.cached.get(tuple(request.tokens[: end + self.ahead]))
            if block is None:
                break
            if not self.users[block]:
                self.free.remove(block)
            self.users[block] += 1
            request.blocks.append(block)
            request.computed = end
            self.num_hits += 1

    def _allocate(self, request: ToyRequest, number: int, events: BlockEvents) -> list[int] | None:
        end, size = request.computed + number, self.block_size
        missing = -(-end // size) - len(request.blocks)
        while missing > len(self.free):
            victim = self.running[-1]
            if victim is request or not self.running:
                self._preempt(request, events)
                return None
            self._preempt(victim, events)
        given = []
        for _ in range(missing):
            block = self.free.pop(0)
            old = self.hash_of.pop(block, None)
            if old is not None:
                del self.cached[old]
            self.users[block] = 1
            given.append(block)
        request.blocks += given
        for column in range(min(end, len(request.tokens)) // size):
            key = tuple(request.tokens[: (column + 1) * size + self.ahead])
            block = request.blocks[column]
            if key not in self.cached and block not in self.hash_of:
                self.cached[key], self.hash_of[block] = block, key
        return given

    def _preempt(self, request: ToyRequest, events: BlockEvents) -> None:
        self.num_preempted += 1
        self.running.remove(request)
        events.gone.append(request.name)
        self._release(request)
        request.draft = []
        self.waiting.insert(0, request)

    def _leave(self, request: ToyRequest, events: BlockEvents) -> None:
        self.running.remove(request)
        events.gone.append(request.name)
        self._release(request)

    def _release(self, request: ToyRequest) -> None:
        for block in reversed(request.blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)
        request.blocks, request.computed = [], 0
