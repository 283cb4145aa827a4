# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of a block's slots, weighted by how far a draft gets.

A slot counts only if all slots before it are right. D-PACE's weight of slot j is
``sum over m >= j of prod over i <= m of (q_i / 2 + 1 / 2)`` with the probabilities q of the right
tokens: the expected accepted length's own gradient, softened. A constant within a step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_spec_ext.proposers.nar.extras import Embed, SlotExtras, conditional_log_probs
from vllm_spec_ext.training.draft_vocab import DraftProjection

CANDIDATES = 16  # of each slot, between which the selector chooses


class SlotTokens(NamedTuple):
    """What belongs to slots, one row each: [rows] int64."""

    targets: Tensor  # right tokens; IGNORED where there is none to learn
    before: Tensor  # right tokens in front
    slots: Tensor  # number of the slot in its block
    copies: Tensor | None  # tokens shown
    kinds: Tensor | None  # 0 = nothing shown

    @property
    def shown(self) -> Tensor | None:
        """[rows] tokens shown, -1 where there is none; None if there are none at all."""
        if self.copies is None or self.kinds is None:
            return None
        return self.copies.masked_fill(self.kinds == 0, -1)

    def take(self, rows: Tensor | slice) -> "SlotTokens":
        """Some of the rows."""
        return SlotTokens(*(None if part is None else part[rows] for part in self))


def slot_logits(
    states: Tensor,  # [rows, hidden] final states of slots
    tokens: SlotTokens,
    projection: DraftProjection,
    extras: SlotExtras,
) -> Tensor:
    """[rows, places] float32: the target's projection, and what copies gain."""
    shown = tokens.shown
    logits = projection(states, shown).float()
    if shown is None or tokens.kinds is None:
        return logits
    bonus = extras.copy_bonus(states, tokens.slots, tokens.kinds)
    places = projection.places(shown, shown).clamp(min=0)  # where nothing is shown, the bonus is 0
    return logits.scatter_add(1, places.unsqueeze(1), bonus.unsqueeze(1))


def candidate_log_probs(
    states: Tensor,  # [rows, hidden]
    tokens: SlotTokens,
    log_probs: Tensor,  # [rows, candidates]
    candidates: Tensor,  # [rows, candidates] int64 token ids
    extras: SlotExtras,
    embed: Embed,
) -> Tensor:
    """[rows, candidates] log-probability behind the right token before, by the selector."""
    before = extras.table_a(embed(tokens.before.clamp(min=0))).unsqueeze(1)
    edges = extras.edges(states, before, extras.table_b(embed(candidates)))
    return conditional_log_probs(log_probs, edges).squeeze(1)


class SlotLoss(NamedTuple):
    """Of rows that have something to learn."""

    losses: Tensor  # [rows] with a graph
    probabilities: Tensor  # [rows] detached, of the right tokens
    correct: Tensor  # 0-d


def slot_losses(
    states: Tensor,  # [rows, hidden]
    tokens: SlotTokens,  # targets are not IGNORED
    projection: DraftProjection,
    extras: SlotExtras,
    embed: Embed,
    selected: float,
) -> SlotLoss:
    """Cross-entropy of the slots alone and behind the right token before, mixed.

    Args:
        states: Final states.
        tokens: Right tokens and copies; rows whose token cannot be drafted must be left out.
        projection: Onto the draft vocabulary.
        extras: Copies' trust, and the selector.
        embed: The drafter's embeddings.
        selected: Part of the loss that the selector's log-probabilities have, 0 to 1.
    """
    logits = slot_logits(states, tokens, projection, extras)
    wanted = projection.places(tokens.targets, tokens.shown)
    places = wanted.unsqueeze(1)
    selects = bool(extras.config.selector_rank) and selected > 0.0
    if selects:
        best = logits.detach().topk(min(CANDIDATES, projection.num_places), dim=-1).indices
        places = torch.cat([places, best], dim=1)
    found = logits.log_softmax(-1).gather(1, places)  # one gather: each has a gradient as wide
    losses = -found[:, 0]
    guesses = best[:, 0] if selects else logits.detach().argmax(-1)
    if selects:
        candidates = projection.tokens(best, tokens.shown)
        behind = candidate_log_probs(states, tokens, found[:, 1:], candidates, extras, embed)
        hit = best == wanted.unsqueeze(1)
        # A right token that is no candidate keeps its own probability.
        among = torch.where(hit, -behind, 0.0).sum(-1)
        paths = torch.where(hit.any(-1), among, losses)
        losses = (1.0 - selected) * losses + selected * paths
    return SlotLoss(losses, (-losses.detach()).exp(), (guesses == wanted).sum())


def drafted_log_probs(
    states: Tensor,  # [rows, hidden]
    tokens: SlotTokens,
    places: Tensor,  # [rows, m] int64 columns of the projection; -1 = a token that is not drafted
    projection: DraftProjection,
    extras: SlotExtras,
    embed: Embed,
    candidates: int = CANDIDATES,
) -> Tensor:
    """[rows, m] float32 log-probability of some tokens, as slots draft them behind the right one.

    By the selector among the likeliest tokens of a slot, and as of the slot alone for all others
    and without a selector. Of a token that is not drafted the value is that of any other.

    Args:
        states: Final states of the slots.
        tokens: Right tokens before, and copies.
        places: Of the tokens in question.
        projection: Onto the draft vocabulary.
        extras: Copies' trust, and the selector.
        embed: The drafter's embeddings.
        candidates: Tokens of a slot that the selector chooses from.
    """
    logits = slot_logits(states, tokens, projection, extras)
    asked = places.clamp(min=0)
    if not extras.config.selector_rank:
        return logits.gather(1, asked) - logits.logsumexp(-1, keepdim=True)
    best = logits.detach().topk(min(candidates, projection.num_places), dim=-1).indices
    # One gather: each has a gradient as wide as the logits.
    found = logits.gather(1, torch.cat([asked, best], dim=1)) - logits.logsumexp(-1, keepdim=True)
    alone, base = found.split([asked.shape[1], best.shape[1]], dim=1)
    candidate_ids = projection.tokens(best, tokens.shown)
    behind = candidate_log_probs(states, tokens, base, candidate_ids, extras, embed)
    same = asked.unsqueeze(-1) == best.unsqueeze(1)  # [rows, m, candidates]
    among = torch.where(same, behind.unsqueeze(1), 0.0).sum(-1)
    return torch.where(same.any(-1), among, alone)


def path_weights(
    probabilities: Tensor,  # [blocks, slots] of right tokens; 1 where shown
    known: Tensor,  # [blocks, slots] bool: there is a right token
) -> Tensor:
    """[blocks, slots] float32 weight of each slot (D-PACE, see above)."""
    reached = torch.where(known, 0.5 * probabilities + 0.5, 0.0).cumprod(-1)
    return reached.flip(-1).cumsum(-1).flip(-1)
