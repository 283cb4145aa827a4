# SPDX-License-Identifier: Apache-2.0
"""How good a block drafter is on held-out text: each slot, chains, and trees.

Teacher forcing: the text stands for what the target would emit, which is exact for text that the
target itself wrote greedily. A chain is the selector's greedy walk; it is accepted up to its first
wrong token, and up to there the walk stood on the text's own tokens. Lengths count the bonus token.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_spec_ext.proposers.draft_tree import agreeing_path
from vllm_spec_ext.training.acceptance import tokens_per_step, walk_texts
from vllm_spec_ext.training.batches import IGNORED, make_batch
from vllm_spec_ext.training.draft_vocab import DraftProjection
from vllm_spec_ext.training.hidden import HiddenSource
from vllm_spec_ext.training.nar.blocks import Blocks, arrange
from vllm_spec_ext.training.nar.losses import CANDIDATES, SlotTokens, slot_logits
from vllm_spec_ext.training.nar.model import NarDrafter
from vllm_spec_ext.training.nar.pass_batch import (
    StatesRead,
    read_states,
    slot_states,
    some_sequences,
)
from vllm_spec_ext.training.nar.schema import NarTraining
from vllm_spec_ext.training.shards import TokenData
from vllm_spec_ext.training.target import Target
from vllm_spec_ext.training.text_copies import TextCopies

TOP = (1, 2, 3, 5)
_AGREEMENT_TEXTS = 8


class Drafting(NamedTuple):
    """A drafter and what it drafts from."""

    drafter: NarDrafter
    scales: torch.nn.Module  # of its states; the identity for a finished drafter
    target: Target
    projection: DraftProjection
    data: TokenData
    states: HiddenSource
    config: NarTraining


@dataclass(frozen=True)
class NarFigures:
    """Measured on held-out sequences."""

    num_positions: int
    num_sequences: int
    target_agreement: float
    """Positions of the first texts where the target itself predicts the text's next token; far
    below 1 means text that this target did not write."""
    accuracy: list[dict[str, float]]
    """Per slot, without the selector: part of positions with the right token among its best 1, 2,
    3 and 5."""
    behind_right: list[float]
    """Per slot, with the selector: part of right tokens where the token before is right."""
    accepted: list[float]
    """Part of chains that are accepted to slot 1, 2, ..., of those that end before the text."""
    acceptance_length: float
    """Tokens per target step when decoding the held-out text with the walk's chain."""
    chain_lengths: list[float]
    """The same for chains of 1, 2, ... slots."""
    without_selector: float
    """``acceptance_length`` of each slot's best token."""
    tree_nodes: list[int]
    tree_acceptance_lengths: list[float]
    tree_without_selector: list[float]
    by_text: dict[str, NDArray[np.int64]] = field(default_factory=dict, repr=False, compare=False)
    """[texts, 2] parts of some of these figures, for standard errors; not saved. Tokens and steps
    of ``chain1``, ``chain2``, ..., ``plain1``, ... (without the selector), ``tree12`` and
    ``plain_tree12``; right tokens and positions of ``slot1``, ... (without the selector)."""

    def summary(self) -> dict[str, float]:
        """Short names for progress lines."""
        per_slot = {f"held_slot{i + 1}": a["top1"] for i, a in enumerate(self.accuracy[:4])}
        return {**per_slot, "held_acceptance": self.acceptance_length}

    def as_dict(self) -> dict[str, object]:
        """Plain values, rounded to four digits."""

        def rounded(value: object) -> object:
            if isinstance(value, float):
                return round(value, 4)
            if isinstance(value, list):
                return [rounded(part) for part in value]
            return value

        told = {name: value for name, value in asdict(self).items() if name != "by_text"}
        return {name: rounded(value) for name, value in told.items()}


@dataclass(frozen=True)
class _Rows:
    """All positions of all sequences, in order; slots K, candidates C, best first."""

    first: NDArray[np.int64]  # [n] the block's first token
    targets: NDArray[np.int64]  # [n, K] IGNORED past the end
    candidates: NDArray[np.int64]  # [n, K, C]
    log_probs: NDArray[np.float32]  # [n, K, C]
    weights: NDArray[np.float32] | None  # [n, K, rank] of each slot's state
    starts: NDArray[np.int64]  # [sequences + 1]


def measure_drafter(
    drafting: Drafting,
    sequences: NDArray[np.int64],
    tree_nodes: tuple[int, ...] = (),
    *,
    show_copies: bool = True,
) -> NarFigures:
    """Measure a drafter on all positions of some sequences.

    Args:
        drafting: The drafter, and its surroundings.
        sequences: [n] numbers of the texts.
        tree_nodes: Budgets of the draft trees; none = do not measure trees.
        show_copies: Whether slots are shown what they are shown in drafting; else masks alone.
    """
    drafter = drafting.drafter
    was_training = drafter.training
    drafter.eval()
    with torch.no_grad():
        rows = _collect(drafting, sequences, show_copies)
        agreement = _agreement(drafting, sequences[:_AGREEMENT_TEXTS])
        tables = _tables(drafting)
    drafter.train(was_training)
    known = rows.targets != IGNORED
    ranks = _ranks(rows.candidates, rows.targets)
    best = ranks == 0
    walked = best if tables is None else _chosen(rows, tables) == rows.targets
    slots = rows.targets.shape[1]
    accepted = np.cumprod(walked, axis=1).sum(axis=1)
    plain = np.cumprod(best, axis=1).sum(axis=1)
    whole = known.all(axis=1)

    by_text: dict[str, NDArray[np.int64]] = {}
    for name, lengths in (("chain", accepted), ("plain", plain)):
        for most in range(1, slots + 1):
            by_text[f"{name}{most}"] = walk_texts(
                rows.starts,
                lambda row, lengths=lengths, most=most: min(most, int(lengths[row])),  # type: ignore[misc]
            )
    for nodes in tree_nodes:
        for name, found in (("tree", tables), ("plain_tree", None)):
            by_text[f"{name}{nodes}"] = walk_texts(
                rows.starts,
                lambda row, found=found, nodes=nodes: _tree_accepts(rows, found, row, nodes),  # type: ignore[misc]
            )
    for slot in range(slots):
        counts = np.stack([best[:, slot] & known[:, slot], known[:, slot]], axis=1)
        parts = np.split(counts.astype(np.int64), rows.starts[1:-1])
        by_text[f"slot{slot + 1}"] = np.stack([part.sum(0) for part in parts])

    def lengths_of(name: str, numbers: Iterable[int]) -> list[float]:
        return [tokens_per_step(by_text[f"{name}{number}"]) for number in numbers]

    chain_lengths = lengths_of("chain", range(1, slots + 1))
    return NarFigures(
        num_positions=len(accepted),
        num_sequences=len(sequences),
        target_agreement=agreement,
        accuracy=[
            {
                f"top{k}": round(_share((ranks[:, i] >= 0) & (ranks[:, i] < k), known[:, i]), 4)
                for k in TOP
            }
            for i in range(slots)
        ],
        behind_right=[_share(walked[:, i], known[:, i]) for i in range(slots)],
        accepted=[_share(accepted > i, whole) for i in range(slots)],
        acceptance_length=chain_lengths[-1],
        chain_lengths=chain_lengths,
        without_selector=tokens_per_step(by_text[f"plain{slots}"]),
        tree_nodes=list(tree_nodes),
        tree_acceptance_lengths=lengths_of("tree", tree_nodes),
        tree_without_selector=lengths_of("plain_tree", tree_nodes),
        by_text=by_text,
    )


def drafted_tokens(
    drafting: Drafting, sequences: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What a drafter drafts at all positions of some sequences, the token before always right.

    Args:
        drafting: The drafter, and its surroundings.
        sequences: [n] numbers of the texts.

    Returns:
        [rows, slots] token ids, and [n + 1] where the rows of each sequence begin. The first slot
        of a sequence's row r drafts token r + 1 behind its prompt.
    """
    drafting.drafter.eval()
    with torch.no_grad():
        rows = _collect(drafting, sequences, show_copies=True)
        tables = _tables(drafting)
    chosen = rows.candidates[..., 0] if tables is None else _chosen(rows, tables)
    return chosen, rows.starts


def _share(hits: NDArray[np.bool_], of: NDArray[np.bool_]) -> float:
    return float(hits[of].mean()) if of.any() else 0.0


def _collect(drafting: Drafting, sequences: NDArray[np.int64], show_copies: bool) -> _Rows:
    config, drafter = drafting.config, drafting.drafter
    match = drafter.config.nar.copy_match if show_copies else 0
    slots = drafter.config.num_slots
    copies = TextCopies.if_shown(drafting.data, match, slots)
    first, targets, candidates, log_probs, weights, counts = [], [], [], [], [], []
    size = config.sequences_per_pass
    for low in range(0, len(sequences), size):
        some = sequences[low : low + size]
        batch = make_batch(drafting.data, some, slots, config.max_length, inputs=copies)
        everything = np.ones(len(batch.rows), np.bool_)
        part, _ = some_sequences(batch, 0, len(some))
        device = drafting.target.device
        read = read_states(drafting.states, part, drafting.target, drafting.scales)
        no_prefix = np.zeros(len(batch.rows), np.int64)
        blocks = arrange(part, no_prefix, everything).to(device)
        real = (blocks.targets[..., 0] != IGNORED).flatten()
        tokens, states = _slot_rows(drafting, read, blocks, real)
        for start in range(0, len(states), config.logit_chunk):
            piece = slice(start, start + config.logit_chunk)
            taken = tokens.take(piece)
            logits = slot_logits(states[piece], taken, drafting.projection, drafter.extras)
            best, places = logits.log_softmax(-1).topk(
                min(CANDIDATES, drafting.projection.num_places), dim=-1
            )
            log_probs.append(best.cpu().numpy())
            candidates.append(drafting.projection.tokens(places, taken.shown).cpu().numpy())
            if drafter.config.nar.selector_rank:
                found = states[piece].float() @ drafter.extras.selector_h.float().T
                weights.append(found.float().cpu().numpy())
        first.append(blocks.first.flatten()[real].cpu().numpy())
        targets.append(tokens.targets.view(-1, slots).cpu().numpy())
        counts += np.bincount(batch.rows.numpy(), minlength=len(some)).tolist()
    total = sum(counts)
    return _Rows(
        first=np.concatenate(first),
        targets=np.concatenate(targets),
        candidates=np.concatenate(candidates).reshape(total, slots, -1).astype(np.int64),
        log_probs=np.concatenate(log_probs).reshape(total, slots, -1).astype(np.float32),
        weights=np.concatenate(weights).reshape(total, slots, -1) if weights else None,
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
    )


def _slot_rows(
    drafting: Drafting, read: StatesRead, blocks: Blocks, real: torch.Tensor
) -> tuple[SlotTokens, torch.Tensor]:
    """Slots of the real blocks, and their final states [rows, hidden]."""
    config = drafting.drafter.config
    nothing = torch.zeros_like(blocks.targets, dtype=torch.bool)
    states = slot_states(drafting.drafter, drafting.target, read, blocks, nothing)
    numbers = torch.arange(config.num_slots, device=real.device).expand_as(blocks.targets)
    tokens = SlotTokens(blocks.targets, blocks.before(), numbers, blocks.copies, blocks.kinds)
    picked = SlotTokens(*(None if p is None else p.flatten(0, 1)[real].flatten() for p in tokens))
    return picked, states.flatten(0, 1)[real].flatten(0, 1)


def _agreement(drafting: Drafting, sequences: NDArray[np.int64]) -> float:
    batch = make_batch(drafting.data, sequences, 1, drafting.config.max_length)
    device = drafting.target.device
    hidden = drafting.target.hidden(batch.token_ids.to(device), batch.mask.to(device))
    states = hidden[batch.rows, batch.columns]
    parts = states.split(drafting.config.logit_chunk)
    own = torch.cat([drafting.target.project(part).argmax(-1) for part in parts]).cpu()
    return float((own == batch.next_tokens).float().mean())


class _Tables(NamedTuple):
    before: NDArray[np.float32]  # [vocab, rank]
    behind: NDArray[np.float32]  # [vocab, rank]


def _tables(drafting: Drafting) -> _Tables | None:
    extras = drafting.drafter.extras
    if not extras.config.selector_rank:
        return None
    ids = torch.arange(drafting.target.vocab_size, device=drafting.target.device)
    embedding = drafting.target.embed(ids)
    made = (extras.table_a(embedding), extras.table_b(embedding))
    return _Tables(*(table.float().cpu().numpy() for table in made))


def _ranks(candidates: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.int64]:
    """[n, K] place of the right token among the candidates; -1 = it is none."""
    hits = candidates == targets[..., None]
    return np.where(hits.any(-1), hits.argmax(-1), -1)


def _chosen(rows: _Rows, tables: _Tables) -> NDArray[np.int64]:
    """[n, K] the best candidate behind the right token before."""
    assert rows.weights is not None
    before = np.concatenate([rows.first[:, None], np.maximum(rows.targets[:, :-1], 0)], axis=1)
    chosen = np.empty(rows.targets.shape, np.int64)
    for slot in range(rows.targets.shape[1]):
        asked = tables.before[before[:, slot]] * rows.weights[:, slot]  # [n, rank]
        for low in range(0, len(asked), 4096):
            part = slice(low, low + 4096)
            behind = tables.behind[rows.candidates[part, slot]]  # [n, C, rank]
            scores = rows.log_probs[part, slot] + np.einsum("nr,ncr->nc", asked[part], behind)
            best = scores.argmax(-1)[:, None]
            chosen[part, slot] = np.take_along_axis(rows.candidates[part, slot], best, 1)[:, 0]
    return chosen


def _tree_accepts(rows: _Rows, tables: _Tables | None, row: int, nodes: int) -> int:
    # Not at the top: numba must not be loaded before a vLLM worker starts.
    from vllm_spec_ext.proposers.nar.tree import best_tree

    log_probs = _conditional(rows, tables, row)
    slots, places, parents, _ = best_tree(log_probs, nodes, -math.inf)
    tokens = rows.candidates[row][slots, places]
    return len(agreeing_path(tokens.tolist(), parents.tolist(), rows.targets[row].tolist()))


def _conditional(rows: _Rows, tables: _Tables | None, row: int) -> NDArray[np.float32]:
    """[K, C, C] log-probability of each candidate behind each one before it; [K, 1, C] without a
    selector. As :func:`~vllm_spec_ext.proposers.nar.extras.conditional_log_probs`."""
    own = rows.log_probs[row][:, None, :]
    if tables is None or rows.weights is None:
        return np.ascontiguousarray(own)
    candidates = rows.candidates[row]
    before = np.concatenate([np.full_like(candidates[:1], rows.first[row]), candidates[:-1]])
    asked = tables.before[before] * rows.weights[row][:, None, :]  # [K, C, rank]
    moved = own + asked @ tables.behind[candidates].swapaxes(1, 2)
    together = np.logaddexp.reduce(own, -1, keepdims=True)
    made: NDArray[np.float32] = moved - np.logaddexp.reduce(moved, -1, keepdims=True) + together
    return np.ascontiguousarray(made, np.float32)
