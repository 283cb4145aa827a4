# SPDX-License-Identifier: Apache-2.0
"""Replay of recorded outputs through a proposer: which settings draft well, without an engine.

Teacher forcing: at each step the proposer sees the recorded tokens so far, and its tree is accepted
along the path that equals the recording. For greedy recordings this is what an engine would accept.
Replay ranks settings; it says nothing about speed, which also depends on what verifying costs.

A recording may say what the target foresaw at each row that an engine verified, for methods that
draft from that (``Needs.next_tokens``); a row that it did not verify says nothing. So the settings
that were recorded are replayed exactly, and others a little too low.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import RequestOptions
from vllm_spec_ext.proposers.answer_ends import AnswerEnds
from vllm_spec_ext.proposers.base import (
    EMPTY_DRAFT,
    UNSALTED,
    Draft,
    EngineHandle,
    IntArray,
    NextTokens,
    Proposer,
    RequestStep,
    StepContext,
    StepOutcome,
)
from vllm_spec_ext.proposers.draft_tree import (
    agreeing_path,
    is_branching,
    node_depths,
    parents_of,
    tree_problem,
)

Row = tuple[int, ...]
"""A row of logits: the number of tokens of the recorded text that lead to it, then the tokens of a
draft that lead on from there, the first of which is not what the text goes on with."""


@dataclass(frozen=True)
class Recording:
    """One request and what the target answered."""

    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    category: str = ""
    foreseen: Mapping[Row, tuple[Sequence[int], Sequence[float]]] = field(default_factory=dict)
    """The likeliest next tokens and their probabilities, by row; equally many in each."""
    max_tokens: int | None = None
    """Most tokens that were asked for, which bound the drafts near the end; None = as many as were
    answered."""
    ends: frozenset[int] = frozenset()
    """Stop tokens of the request, behind which nothing is drafted."""


def recording_of(
    prompt: Sequence[int],
    output: Sequence[int],
    steps: Sequence[Mapping[str, Any]],
    max_tokens: int | None = None,
    ends: frozenset[int] = frozenset(),
) -> Recording:
    """A request as an engine answered it.

    Args:
        prompt: Token ids.
        output: Token ids.
        steps: What the worker recorded of it, from its prefill on
            (:class:`vllm_spec_ext.engine.watching.step_log.StepLog`).
        max_tokens, ends: As of :class:`Recording`.
    """
    foreseen: dict[Row, tuple[Sequence[int], Sequence[float]]] = {}
    text, size = [*prompt, *output], len(prompt)
    for step in steps:
        found = step["foreseen"]
        if found is not None:
            # Of a draft whose tokens were exchanged, as of a resumed request, only the root's.
            rows = _rows(text, size, step["tokens"], step["parents"])
            foreseen |= zip(rows, zip(found["tokens"], found["probs"], strict=True), strict=False)
        size += len(step["new_tokens"])
    return Recording(prompt, output, foreseen=foreseen, max_tokens=max_tokens, ends=ends)


def _rows(
    text: Sequence[int] | IntArray, size: int, tokens: Sequence[int], parents: Sequence[int]
) -> list[Row]:
    """The row after so many tokens of a text, and those of a draft that was made there."""
    rows: list[Row] = [(size,)]
    for token, parent in zip(tokens, parents, strict=True):
        at, *path = rows[parent + 1]
        on_text = not path and at < len(text) and text[at] == token
        rows.append((at + 1,) if on_text else (at, *path, token))
    return rows


@dataclass
class ReplayResult:
    """What a proposer achieved on recordings."""

    num_requests: int = 0
    num_steps: int = 0
    """Target steps after the prefill, which itself yields one token without a draft."""
    num_tokens: int = 0
    """Tokens of these steps, bonus tokens included."""
    num_drafted: int = 0
    num_empty: int = 0
    """Steps without a draft."""
    num_branching: int = 0
    """Steps whose draft was a tree."""
    accepted_at_depth: list[int] = field(default_factory=list)
    """Number of steps that accepted more than ``d`` draft tokens, for d = 0, 1, …"""
    drafted_at_depth: list[int] = field(default_factory=list)
    """Number of steps whose draft was deeper than ``d``."""
    propose_us: list[float] = field(default_factory=list, repr=False)
    """Time of each ``propose`` call over the number of its requests, in microseconds."""

    @property
    def tokens_per_step(self) -> float:
        """Micro mean, bonus token included; plain decoding is 1."""
        return self.num_tokens / max(1, self.num_steps)

    @property
    def nodes_per_step(self) -> float:
        """Mean number of draft nodes, steps without a draft included."""
        return self.num_drafted / max(1, self.num_steps)

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Of the steps that drafted to a depth, the share that accepted to it; from depth 1."""
        pairs = zip(self.accepted_at_depth, self.drafted_at_depth, strict=True)
        return [accepted / max(1, drafted) for accepted, drafted in pairs]

    def percentile_us(self, percent: float) -> float:
        """A percentile of the time per request of ``propose``; 0 without any step."""
        return float(np.percentile(self.propose_us, percent)) if self.propose_us else 0.0

    def summary(self) -> dict[str, float | int | list[float]]:
        """All figures, for JSON."""
        return {
            "num_requests": self.num_requests,
            "num_steps": self.num_steps,
            "num_tokens": self.num_tokens,
            "tokens_per_step": self.tokens_per_step,
            "nodes_per_step": self.nodes_per_step,
            "empty_rate": self.num_empty / max(1, self.num_steps),
            "acceptance_by_depth": self.acceptance_by_depth,
            "propose_us_p50": self.percentile_us(50),
            "propose_us_p99": self.percentile_us(99),
        }


def check_draft(draft: Draft, room: int, vocab_size: int) -> None:
    """Refuse a draft that breaks the contract of proposers.

    Raises:
        SpecExtError: Too long, tokens outside the vocabulary, or parents not before children.
    """
    tokens = draft.tokens
    if len(tokens) > room:
        raise SpecExtError(f"proposer drafted {len(tokens)} nodes, expected at most {room}")
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
        raise SpecExtError(f"proposer drafted tokens outside the vocabulary of {vocab_size}")
    problem = tree_problem(parents_of(draft), len(tokens))
    if problem is not None:
        raise SpecExtError(
            f"proposer drafted a tree whose parents do not precede their children: {problem}"
        )


@dataclass
class _Running:
    request_id: str
    tokens: IntArray  # [prompt + output] int32
    num_prompt: int
    length: int  # tokens known to the target
    most: int  # tokens that were asked for, the prompt's included
    foreseen: Mapping[Row, tuple[Sequence[int], Sequence[float]]]
    ends: frozenset[int]
    new: int = 1
    draft: Draft = EMPTY_DRAFT  # of the last step


def _requests(recordings: Sequence[Recording]) -> Iterator[_Running]:
    for index, recording in enumerate(recordings):
        num_prompt = len(recording.prompt_token_ids)
        if num_prompt < 1 or len(recording.output_token_ids) < 2:
            continue  # nothing is left to draft after the prefill
        tokens = np.array([*recording.prompt_token_ids, *recording.output_token_ids], np.int32)
        yield _Running(
            f"replay-{index}",
            tokens,
            num_prompt,
            length=num_prompt + 1,
            most=num_prompt + (recording.max_tokens or len(recording.output_token_ids)),
            foreseen=recording.foreseen,
            ends=recording.ends,
        )


def replay(
    proposer: Proposer,
    recordings: Sequence[Recording],
    engine: EngineHandle,
    *,
    batch_size: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> ReplayResult:
    """Run recordings through a proposer that was started with ``engine``.

    Args:
        proposer: Started proposer; its requests are finished on return.
        recordings: Requests, replayed in order.
        engine: The handle it was started with; ``num_speculative_tokens`` is the budget.
        batch_size: Requests replayed at a time, at most ``engine.max_num_seqs``.
        clock: Seconds.

    Raises:
        SpecExtError: A draft that breaks the contract, or a batch larger than the engine's.
    """
    if not 1 <= batch_size <= engine.max_num_seqs:
        raise SpecExtError(f"batch_size={batch_size}; expected 1 to {engine.max_num_seqs}")
    result = ReplayResult()
    options = proposer.info.request_options()  # those of a request that gave none
    waiting = _requests(recordings)
    running: list[_Running] = []
    outcomes: list[StepOutcome] = []
    ends = AnswerEnds()
    while True:
        running += islice(waiting, batch_size - len(running))
        if not running:
            return result
        step = StepContext([_step_of(request, engine, options) for request in running])
        start = clock()
        if outcomes:
            proposer.observe(ends.restored(outcomes))
        drafts = proposer.propose(step)
        result.propose_us.append((clock() - start) * 1e6 / len(running))
        outcomes = []
        left: list[_Running] = []
        for view, draft in zip(step.requests, drafts, strict=True):
            check_draft(draft, view.room, engine.vocab_size)
        for request, draft in zip(running, ends.cut(step.requests, drafts), strict=True):
            if request.length < len(request.tokens):
                outcomes.append(_advance(request, draft, result))
                left.append(request)
                continue
            # An engine, too, asks once more before it learns that a request is over.
            result.num_requests += 1
            proposer.finish([request.request_id])
        running = left


def _step_of(request: _Running, engine: EngineHandle, options: RequestOptions) -> RequestStep:
    # The bonus token needs a place too, so one less than what is left.
    num_left = min(request.most, engine.max_model_len) - request.length - 1
    return RequestStep(
        request_id=request.request_id,
        token_ids=request.tokens[: request.length],
        num_prompt_tokens=request.num_prompt,
        new_tokens=request.tokens[request.length - request.new : request.length].tolist(),
        room=max(0, min(engine.num_speculative_tokens, num_left)),
        options=options,
        share_group=UNSALTED,
        ends=request.ends,
        next_tokens=_foreseen(request) if request.foreseen else None,
    )


def _foreseen(request: _Running) -> NextTokens | None:
    """What the recording says of the rows of the step before: its root's and its draft's."""
    size = request.length - request.new
    draft = request.draft
    rows = _rows(request.tokens, size, draft.tokens.tolist(), parents_of(draft))
    known = [row for row in rows if row in request.foreseen]
    if not known:
        return None
    tokens, probs = zip(*(request.foreseen[row] for row in known), strict=True)
    return NextTokens(
        np.array([_context(request.tokens, row) for row in known], np.int32),
        np.array(tokens, np.int32),
        np.array(probs, np.float32),
    )


def _context(text: IntArray, row: Row) -> list[int]:
    """The last two tokens before a row; -1 = none."""
    size, *path = row
    return [-1, *text[max(0, size - 2) : size].tolist(), *path][-2:]


def _advance(request: _Running, draft: Draft, result: ReplayResult) -> StepOutcome:
    """Accept what the recording confirms, plus the bonus token, and count."""
    recorded = request.tokens[request.length :]
    parents = parents_of(draft)
    # A path is no longer than the draft, so the rest of a long recording need not be converted.
    nodes = agreeing_path(draft.tokens.tolist(), parents, recorded[: len(draft)].tolist())
    accepted = len(nodes)
    request.draft = draft
    request.new = min(accepted + 1, len(recorded))
    request.length += request.new
    result.num_steps += 1
    result.num_tokens += request.new
    result.num_drafted += len(draft)
    result.num_empty += not len(draft)
    result.num_branching += is_branching(parents)
    deepest = max(node_depths(parents), default=-1) + 1
    while len(result.drafted_at_depth) < deepest:
        result.drafted_at_depth.append(0)
        result.accepted_at_depth.append(0)
    for depth in range(deepest):
        result.drafted_at_depth[depth] += 1
        result.accepted_at_depth[depth] += depth < accepted
    return StepOutcome(request.request_id, len(draft), accepted, nodes)
