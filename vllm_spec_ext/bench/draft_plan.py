# SPDX-License-Identifier: Apache-2.0
"""What draft models gain: their acceptance under measured, or supposed, costs.

A chain of k tokens takes k forward passes of the draft, one after the other, and one pass of the
target over k + 1 tokens. With plain decoding's step as the unit of time,

    speed-up(k) = tokens a step / (verify(k) + k * draft),

and requests count alike, as in :mod:`.planner`. Drafts joined by ``+`` draft a chain each, verified
as one tree: their costs add up, and the longest of their accepted chains counts.

An expansion tree (SpecInfer, Miao et al. 2024) of k steps takes k passes, too, and one pass of the
target over its nodes. Its shape does not depend on probabilities. So teacher forcing tells what is
accepted of it: the answer's path, as long as each token is among the draft's best so many.
"""

import itertools
import operator
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.bench.planner import StepTimes
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.training.acceptance import acceptance_per_position, expansion_accepts

Drafted = int | tuple[int, ...]
"""Tokens of a chain, or of an expansion tree the children of each node, step by step."""

MOST_CHILDREN = 8  # ranks beyond are not recorded; token_tree's expansions have no more either


@dataclass(frozen=True)
class DraftModelFacts:
    """What was measured of one draft model."""

    name: str
    num_layers: int
    num_parameters: int
    ranks: tuple[NDArray[np.int64], ...]
    """For each answer of the target, the rank of each of its tokens among the draft's guesses; 0 =
    the greedy guess, -1 = not among the best ``MOST_CHILDREN``."""
    forward_s: dict[int, float]  # batch size -> seconds of a pass that gives each request a token


@dataclass(frozen=True)
class Candidate:
    """One draft model, or several whose chains are merged."""

    models: tuple[DraftModelFacts, ...]

    @property
    def name(self) -> str:
        """As given: names joined by ``+``."""
        return "+".join(model.name for model in self.models)

    @property
    def num_layers(self) -> int:
        """Of all models."""
        return sum(model.num_layers for model in self.models)

    @property
    def num_parameters(self) -> int:
        """Of all models."""
        return sum(model.num_parameters for model in self.models)

    @cached_property
    def coverage(self) -> float:
        """Part of the answers' tokens that some model's greedy guess gets right."""
        answers = zip(*(model.ranks for model in self.models), strict=True)
        right = [np.logical_or.reduce([ranks == 0 for ranks in each]) for each in answers]
        return float(np.concatenate(right).mean())

    def forward_s(self, batch_size: int) -> float:
        """Seconds of one pass of each model, one after the other."""
        return sum(model.forward_s[batch_size] for model in self.models)

    def num_nodes(self, drafted: Drafted) -> int:
        """Tokens to verify, of all models; equal ones are not counted once only."""
        return len(self.models) * sum(itertools.accumulate(children(drafted), operator.mul))

    def accepted(self, drafted: Drafted) -> list[NDArray[np.int64]]:
        """For each answer, the accepted tokens of what is drafted at each of its positions."""
        widths = children(drafted)
        return [
            np.maximum.reduce([expansion_accepts(ranks, widths) for ranks in each])
            for each in zip(*(model.ranks for model in self.models), strict=True)
        ]

    def per_position(self, chain: int) -> list[float]:
        """Share of chains whose first, second, ... token is accepted."""
        accepted = self.accepted(chain)
        starts = np.concatenate([[0], np.cumsum([len(each) for each in accepted])])
        return acceptance_per_position(np.concatenate(accepted), starts, chain)

    def steps(self, drafted: Drafted) -> list[tuple[int, int]]:
        """For each answer, the target's steps that write it and its number of tokens."""
        return [(_num_steps(each), len(each)) for each in self.accepted(drafted)]

    def tokens_per_step(self, drafted: Drafted) -> float:
        """Over all answers, bonus token included."""
        counts = self.steps(drafted)
        return sum(tokens for _, tokens in counts) / sum(steps for steps, _ in counts)


def children(drafted: Drafted) -> tuple[int, ...]:
    """Children of each node, step by step; a chain has one at each."""
    return (1,) * drafted if isinstance(drafted, int) else drafted


def parse_tree(text: str) -> tuple[int, ...]:
    """``4,1,1,1``.

    Raises:
        SpecExtError: Something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= MOST_CHILDREN for part in parts):
        raise SpecExtError(
            f"tree {text!r}: expected the children of each node, step by step, each from 1 to "
            f"{MOST_CHILDREN}, e.g. 4,1,1,1"
        )
    return tuple(int(part) for part in parts)


def _num_steps(accepted: NDArray[np.int64]) -> int:
    steps = position = 0
    while position < len(accepted):
        position += 1 + int(accepted[position])
        steps += 1
    return steps


@dataclass(frozen=True)
class Prediction:
    """A candidate's best chain under some costs."""

    candidate: Candidate
    chain: int
    tokens_per_step: float
    speed_up: float


def speed_up(candidate: Candidate, drafted: Drafted, verify: float, draft: float) -> float:
    """Decoding speed over plain decoding's, prefill left out.

    Args:
        candidate: Which draft.
        drafted: A chain or a tree.
        verify: A target step that verifies it, in plain steps.
        draft: A pass of the draft, in plain steps; a level of a tree takes one.
    """
    shares = [steps / tokens for steps, tokens in candidate.steps(drafted)]
    return 1.0 / (statistics.fmean(shares) * (verify + len(children(drafted)) * draft))


def best_chain(
    candidate: Candidate, longest: int, verify: Callable[[int], float], draft: float
) -> Prediction:
    """The fastest chain of at least one token.

    Args:
        candidate: Which draft.
        longest: Most tokens of a chain.
        verify: Draft tokens of a request -> a target step that verifies them, in plain steps.
        draft: A pass of the draft, in plain steps.
    """
    speeds = {
        chain: speed_up(candidate, chain, verify(candidate.num_nodes(chain)), draft)
        for chain in range(1, longest + 1)
    }
    best = max(speeds, key=lambda chain: speeds[chain])
    return Prediction(candidate, best, candidate.tokens_per_step(best), speeds[best])


def rank(
    candidates: Sequence[Candidate], batch_size: int, longest: int, times: StepTimes
) -> list[Prediction]:
    """Candidates by expected speed under measured times, the fastest first."""
    plain = times.predict(batch_size, 0)
    found = [
        best_chain(
            candidate,
            longest,
            lambda nodes: times.predict(batch_size, nodes) / plain,
            candidate.forward_s(batch_size) / plain,
        )
        for candidate in candidates
    ]
    return sorted(found, key=lambda one: -one.speed_up)


def tree_speed_up(
    candidate: Candidate, tree: tuple[int, ...], batch_size: int, times: StepTimes
) -> float:
    """Of an expansion tree under measured times.

    approximation: a pass over a level's nodes takes as long as one over a single token, and
    verifying a tree as long as a chain of as many tokens.
    """
    plain = times.predict(batch_size, 0)
    verify = times.predict(batch_size, candidate.num_nodes(tree)) / plain
    return speed_up(candidate, tree, verify, candidate.forward_s(batch_size) / plain)


@dataclass(frozen=True)
class Pair:
    """A target and a draft elsewhere, by the cost of the draft's pass in target steps."""

    name: str
    ratio: float

    @classmethod
    def parse(cls, text: str) -> "Pair":
        """``NAME=RATIO``.

        Raises:
            SpecExtError: No name, or no positive number.
        """
        name, _, ratio = text.partition("=")
        try:
            found = cls(name.strip(), float(ratio))
        except ValueError:
            found = cls("", 0.0)
        if not found.name or not 0.0 < found.ratio < float("inf"):
            raise SpecExtError(
                f"pair {text!r}: expected NAME=RATIO, the time of a draft's pass over that of a "
                "target's step, e.g. 7B+68M=0.03"
            )
        return found


# Bounds of what such pairs cost: a pass that only reads weights takes time in proportion to the
# parameters, one that only launches layers in proportion to the layers (LLaMA 7B: 32, 68M: 2; Llama
# 3 70B: 80, 1B: 16).
PAIRS = (
    Pair("7B+68M by size", 0.068 / 6.74),
    Pair("7B+68M by depth", 2 / 32),
    Pair("70B+1B by size", 1.24 / 70.6),
    Pair("70B+1B by depth", 16 / 80),
)


def for_pair(candidate: Candidate, pair: Pair, longest: int) -> Prediction:
    """With this candidate's acceptance and a pair's costs.

    approximation: verifying a chain takes as long as a plain step, which holds while reading the
    target's weights is all that a step waits for (small batches on a GPU).
    """
    return best_chain(candidate, longest, lambda nodes: 1.0, pair.ratio * len(candidate.models))


def tree_for_pair(candidate: Candidate, tree: tuple[int, ...], pair: Pair) -> float:
    """Speed-up of a tree with a pair's costs; approximated as :func:`for_pair`."""
    return speed_up(candidate, tree, 1.0, pair.ratio * len(candidate.models))
