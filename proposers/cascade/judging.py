# SPDX-License-Identifier: Apache-2.0
"""How a level judges the tokens that the levels below it wrote.

Chosen drafts (temperature 0, a seed, or ``draw`` off): a token stands if it is the reviewer's
likeliest one, or with *lenience* if it is nearly as likely; the first that does not is replaced by
the likeliest. What comes out is a chosen chain, and any chosen chain is a right draft.

Drawn drafts: what comes out must be *drawn* from the distribution that is reported with it, the
reviewer's h, or the target's verification is biased. At row i the token d was drawn from q0 by the
level below, or is a method's guess (q0 is one-hot then). It stands with probability
``min(1, h(d) / q0(d))``; else the token is drawn from ``norm(max(0, h - q0))`` and what lies behind
is dropped. If all stand, one more is drawn from h. Each token that comes out is distributed as h of
its row, given the tokens before it (Leviathan et al. 2023, theorem 1; here one level further down).
TriForce's released code draws from the whole of h after a rejection and reports h all the same,
which is not lossless. Nor may a drawn token be left out because it is unlikely: whether there is a
next token has to be settled before it is drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch

from vllm_spec_ext.proposers.growth.drawing import draw

Distribution: TypeAlias = torch.Tensor | None
"""[vocab] what a token was drawn from; None: it was chosen, which is as good as one-hot."""


@dataclass(frozen=True)
class Verdict:
    """What a reviewer made of a chunk."""

    num_accepted: int  # leading tokens that stand
    token: int  # the reviewer's own, behind them
    distributions: torch.Tensor | None  # [num_accepted + 1, vocab] of all of these; None = chosen


class Chance(Protocol):
    """Where decisions of drawn drafts come from."""

    def accepts(self, probability: float) -> bool:
        """True with this probability."""

    def draws(self, weights: torch.Tensor) -> int:
        """A token, by [vocab] weights that need not sum to 1."""


class Noise:
    """Numbers of a generator of our own; never a request's, and never the target's."""

    def __init__(self, generator: np.random.Generator) -> None:
        """Use the generator's numbers, one a decision."""
        self._generator = generator

    def accepts(self, probability: float) -> bool:
        """See :class:`Chance`."""
        return float(self._generator.random()) < probability

    def draws(self, weights: torch.Tensor) -> int:
        """See :class:`Chance`."""
        return int(draw(weights[None], self._generator.random((1, 1)))[0, 0])


def judge_chosen(
    logits: Sequence[torch.Tensor],  # of each request [n_i + 1, vocab]
    tokens: Sequence[Sequence[int]],  # of each request [n_i]
    lenience: float,
) -> list[Verdict]:
    """Judge chosen chunks.

    Args:
        logits: Behind the token before the chunk, and behind each of its tokens.
        tokens: The chunks; may be empty.
        lenience: A token stands if its probability is at least this share of the likeliest one's;
            1 = only the likeliest itself.

    Returns:
        One verdict a request.
    """
    rows = torch.cat(list(logits)) if len(logits) > 1 else logits[0]
    values, best = rows.max(dim=-1)
    asked = torch.tensor([t for chunk in tokens for t in (*chunk, 0)], device=rows.device)
    own = rows.gather(1, asked[:, None])[:, 0]
    # Waits for the device, once for all requests: what is read next depends on it.
    near = (own >= values + math.log(lenience)).tolist() if lenience < 1.0 else None
    chosen = best.tolist()
    verdicts, start = [], 0
    for chunk in tokens:
        number = 0
        while number < len(chunk):
            row = start + number
            if chosen[row] != chunk[number] and (near is None or not near[row]):
                break
            number += 1
        verdicts.append(Verdict(number, chosen[start + number], None))
        start += len(chunk) + 1
    return verdicts


def judge_drawn(
    h: torch.Tensor,  # [n + 1, vocab] the reviewer's distributions
    tokens: Sequence[int],  # [n]
    drawn_from: Sequence[Distribution],  # [n] q0 of each token
    chance: Chance,
) -> Verdict:
    """Judge one drawn chunk by the rule of the module.

    Args:
        h: Behind the token before the chunk, and behind each of its tokens; after the request's
            temperature, top-k and top-p.
        tokens: The chunk; may be empty.
        drawn_from: Of each token.
        chance: Decides.
    """
    judged = zip(tokens, drawn_from, _ratios(h, tokens, drawn_from), strict=True)
    for place, (token, q0, ratio) in enumerate(judged):
        if chance.accepts(min(1.0, ratio)):
            continue
        rest = residual(h[place], token, q0)
        if float(rest.sum()) > 0.0:  # else h and q0 are the same but for rounding
            return Verdict(place, chance.draws(rest), h[: place + 1])
    return Verdict(len(tokens), chance.draws(h[len(tokens)]), h)


def _ratios(
    h: torch.Tensor, tokens: Sequence[int], drawn_from: Sequence[Distribution]
) -> list[float]:
    """[n] h over q0 of each token; waits for the device once."""
    if not tokens:
        return []
    certain = h.new_ones(())
    own = [h[place, token] for place, token in enumerate(tokens)]
    other = [
        certain if q0 is None else q0[token] for token, q0 in zip(tokens, drawn_from, strict=True)
    ]
    found = torch.stack([*own, *other]).tolist()
    return [mine / theirs for mine, theirs in zip(found, found[len(own) :], strict=False)]


def residual(h: torch.Tensor, token: int, q0: Distribution) -> torch.Tensor:
    """[vocab] weights of the token that replaces one that was drawn from q0 and rejected."""
    if q0 is None:
        rest = h.clone()
        rest[token] = 0.0
        return rest
    return (h - q0).clamp(min=0.0)
