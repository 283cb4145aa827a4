# SPDX-License-Identifier: Apache-2.0
"""How good a draft is on held-out answers: which of its guesses are right, and what follows."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_spec_ext.training.acceptance import acceptance_per_position, chain_accepts, walk
from vllm_spec_ext.training.batches import make_batch
from vllm_spec_ext.training.draft.boosting import known_ids
from vllm_spec_ext.training.hidden import HiddenSource
from vllm_spec_ext.training.shards import TokenData
from vllm_spec_ext.training.target import Target

TOP = (1, 2, 3, 5)
MOST_RANKS = 8  # as many as an expansion tree may have children


@dataclass(frozen=True)
class Guesses:
    """A draft's guesses at all positions of some texts, the text before them read as it is."""

    ranks: NDArray[np.int64]  # [n] rank of the text's next token; -1 = not among the best few
    starts: NDArray[np.int64]  # [sequences + 1] rows of each sequence, positions in order

    @property
    def right(self) -> NDArray[np.bool_]:
        """[n] the greedy guess is the text's next token."""
        return self.ranks == 0


@dataclass(frozen=True)
class DraftFigures:
    """Measured on held-out sequences."""

    num_positions: int
    num_sequences: int
    target_agreement: float
    """Positions where the target itself predicts the text's next token; far below 1 means text
    that this target did not write."""
    accuracy: dict[str, float]
    """Part of positions with the right token among the draft's best 1, 2, 3 and 5."""
    overlap: float
    """Mean over positions of sum(min(p, q)), p the target's distribution, q the draft's: how often
    a token drawn from q would be accepted at temperature 1."""
    chain: int
    acceptance_per_position: list[float]
    """Share of chains whose first, second, ... token is accepted, as vLLM counts."""
    acceptance_length: float
    """Tokens per target step when decoding the held-out text with chains of that length, bonus
    token included."""
    vocab_coverage: float
    """Part of the text's tokens that are in the draft's vocabulary."""
    merged: dict[str, float]
    """Together with the earlier drafts of ``boost_on``: ``earlier_coverage`` and ``coverage``
    (part of positions where any of the earlier models', or any model's, guess is right), and
    ``earlier_acceptance_length`` and ``acceptance_length`` of all their chains as one tree. Empty
    without earlier drafts."""

    def summary(self) -> dict[str, float]:
        """Short names for progress lines."""
        found = {"held_top1": self.accuracy["top1"], "held_acceptance": self.acceptance_length}
        depths = enumerate(self.acceptance_per_position, start=1)
        found |= {f"held_depth{depth}": share for depth, share in depths}
        return found | {f"held_merged_{n}": v for n, v in self.merged.items() if "earlier" not in n}

    def as_dict(self) -> dict[str, object]:
        """Plain values, rounded to four digits."""
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


def guess(
    draft: Target,
    data: TokenData,
    sequences: NDArray[np.int64],
    *,
    max_length: int,
    batch_size: int,
    logit_chunk: int,
    target: Target | None = None,
    states: HiddenSource | None = None,
) -> tuple[Guesses, float, float]:
    """A draft's guesses by teacher forcing.

    Args:
        draft: The draft model.
        data: All sequences.
        sequences: [n] numbers of those to measure.
        max_length: Tokens used of each sequence.
        batch_size: Sequences per batch.
        logit_chunk: Positions whose logits exist at the same time.
        target: Compare with its distributions, too.
        states: Source of its hidden states; needed with ``target``.

    Returns:
        The guesses, the target's agreement with the text and the overlap of the distributions
        (0.0 each without a target).
    """
    ranks, counts = [], []
    agreeing = overlap = 0.0
    top = min(MOST_RANKS, draft.vocab_size)
    draft.model.eval()
    for start in range(0, len(sequences), batch_size):
        batch = make_batch(data, sequences[start : start + batch_size], 0, max_length)
        counts += np.bincount(batch.rows.numpy(), minlength=len(batch.sequences)).tolist()
        with torch.no_grad():
            mine = draft_states(draft, batch.token_ids, batch.mask, batch.rows, batch.columns)
            theirs = None if states is None else states(batch)
            wanted = batch.next_tokens.to(mine.device)
            for low in range(0, len(mine), logit_chunk):
                part = slice(low, low + logit_chunk)
                logits = draft.project(mine[part]).float()
                hits = logits.topk(top, dim=-1).indices == wanted[part, None]
                ranks.append(torch.where(hits.any(1), hits.int().argmax(1), -1).cpu().numpy())
                if target is not None and theirs is not None:
                    own = target.project(theirs[part]).float()
                    agreeing += float((own.argmax(-1) == wanted[part]).sum())
                    probs = own.softmax(-1)[:, : logits.shape[1]]
                    overlap += float(torch.minimum(probs, logits.softmax(-1)).sum())
    found = Guesses(
        np.concatenate(ranks).astype(np.int64),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
    )
    return found, agreeing / len(found.ranks), overlap / len(found.ranks)


def draft_states(
    draft: Target,
    token_ids: torch.Tensor,  # [batch, length] int64
    mask: torch.Tensor,  # [batch, length] int64
    rows: torch.Tensor,  # [n] int64
    columns: torch.Tensor,  # [n] int64
) -> torch.Tensor:
    """The draft's own hidden states at these positions, [n, hidden_size]."""
    device = draft.device
    ids = known_ids(token_ids.to(device), draft.vocab_size)
    return draft.hidden(ids, mask.to(device))[rows.to(device), columns.to(device)]


def figures_of(
    found: Guesses,
    *,
    agreement: float,
    overlap: float,
    chain: int,
    vocab_coverage: float,
    earlier: Sequence[Guesses] = (),
) -> DraftFigures:
    """Figures of a draft's guesses, and of all chains as one tree with those of earlier drafts."""
    accepted = chain_accepts(found.right, found.starts, chain)
    merged: dict[str, float] = {}
    if earlier:
        any_right = np.logical_or.reduce([one.right for one in earlier])
        # A merged tree holds each model's chain, so its longest accepted path is the best chain.
        longest = np.maximum.reduce(
            [chain_accepts(one.right, one.starts, chain) for one in earlier]
        )
        both = np.maximum(longest, accepted)
        merged = {
            "earlier_coverage": round(float(any_right.mean()), 4),
            "coverage": round(float((any_right | found.right).mean()), 4),
            "earlier_acceptance_length": round(walk(found.starts, lambda r: int(longest[r])), 4),
            "acceptance_length": round(walk(found.starts, lambda r: int(both[r])), 4),
        }
    ranks = found.ranks
    return DraftFigures(
        num_positions=len(ranks),
        num_sequences=len(found.starts) - 1,
        target_agreement=agreement,
        accuracy={f"top{k}": round(float(((ranks >= 0) & (ranks < k)).mean()), 4) for k in TOP},
        overlap=overlap,
        chain=chain,
        acceptance_per_position=acceptance_per_position(accepted, found.starts, chain),
        acceptance_length=walk(found.starts, lambda row: int(accepted[row])),
        vocab_coverage=vocab_coverage,
        merged=merged,
    )


def coverage(
    data: TokenData, sequences: NDArray[np.int64], max_length: int, vocab_size: int
) -> float:
    """Part of the answers' tokens whose ids are below a bound."""
    answers = [
        data.sequence(i)[int(data.prompt_lengths[i]) : max_length] for i in sequences.tolist()
    ]
    return float((np.concatenate(answers) < vocab_size).mean())
