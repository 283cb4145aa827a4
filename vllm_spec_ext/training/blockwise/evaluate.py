# SPDX-License-Identifier: Apache-2.0
"""How good heads are on held-out text: accuracy per head, and the acceptance lengths to expect.

Teacher forcing: the text stands for what the target would emit, which is exact for text that the
target itself wrote greedily. Acceptance lengths count the bonus token, as vLLM does.
"""

import math
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_spec_ext.proposers.blockwise.heads import BlockwiseHeads
from vllm_spec_ext.proposers.draft_tree import agreeing_path
from vllm_spec_ext.training.acceptance import walk
from vllm_spec_ext.training.batches import IGNORED, make_batch
from vllm_spec_ext.training.blockwise.tokens_seen import tokens_seen
from vllm_spec_ext.training.draft_vocab import DraftProjection
from vllm_spec_ext.training.hidden import HiddenSource
from vllm_spec_ext.training.shards import TokenData
from vllm_spec_ext.training.target import Target
from vllm_spec_ext.training.text_copies import TextCopies

TOP = (1, 2, 3, 5)
_CANDIDATES = 5


@dataclass(frozen=True)
class HeadFigures:
    """Measured on held-out sequences."""

    num_positions: int
    num_sequences: int
    target_agreement: float
    """Positions where the target itself predicts the text's next token; far below 1 means text
    that this target did not write."""
    accuracy: list[dict[str, float]]
    """Per head: part of positions with the right token among its best 1, 2, 3 and 5."""
    position_acceptance: float
    """1 + mean number of leading heads that are right, every position counted once."""
    acceptance_length: float
    """Tokens per target step when decoding the held-out text with the heads' chain."""
    tree_nodes: int
    tree_acceptance_length: float
    """The same with draft trees of that many nodes."""

    def summary(self) -> dict[str, float]:
        """Short names for progress lines."""
        per_head = {f"held_acc{i + 1}": a["top1"] for i, a in enumerate(self.accuracy)}
        return {**per_head, "held_acceptance": self.acceptance_length}

    def as_dict(self) -> dict[str, object]:
        """Plain values, rounded to four digits."""
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


@dataclass(frozen=True)
class _Rows:
    ranks: NDArray[np.int64]  # [n, num_heads] rank of the right token; -1 = not a candidate
    has_target: NDArray[np.bool_]  # [n, num_heads]
    log_probs: NDArray[np.float32]  # [n, num_heads, candidates]
    agrees: NDArray[np.bool_]  # [n] the target's own prediction
    starts: NDArray[np.int64]  # [sequences + 1] rows of each sequence, positions in order


def measure_heads(
    heads: BlockwiseHeads,
    target: Target,
    data: TokenData,
    sequences: NDArray[np.int64],
    states: HiddenSource,
    *,
    max_length: int,
    batch_size: int,
    logit_chunk: int,
    tree_nodes: int = 0,
) -> HeadFigures:
    """Measure heads on all positions of some sequences.

    Args:
        heads: The heads, on the target's device.
        target: For the projection and the embeddings.
        data: All sequences.
        sequences: [n] numbers of the held-out ones.
        states: Source of hidden states.
        max_length: Tokens used of each sequence.
        batch_size: Sequences per batch.
        logit_chunk: Positions whose logits exist at the same time.
        tree_nodes: Budget of the draft trees; 0 = do not measure trees.
    """
    was_training = heads.training
    heads.eval()
    with torch.no_grad():
        rows = _collect(
            heads,
            target,
            data,
            sequences,
            states,
            max_length=max_length,
            batch_size=batch_size,
            logit_chunk=logit_chunk,
        )
    heads.train(was_training)
    accuracy = []
    for i in range(heads.config.num_heads):
        ranks = rows.ranks[rows.has_target[:, i], i]
        count = max(1, len(ranks))
        accuracy.append(
            {f"top{k}": round(float(((ranks >= 0) & (ranks < k)).sum()) / count, 4) for k in TOP}
        )
    accepted = np.cumprod(rows.ranks == 0, axis=1).sum(axis=1)
    whole = rows.has_target.all(axis=1)
    tree_length = 0.0
    if tree_nodes:
        tree_length = walk(rows.starts, lambda row: _tree_accepts(rows, row, tree_nodes))
    return HeadFigures(
        num_positions=len(accepted),
        num_sequences=len(sequences),
        target_agreement=float(rows.agrees.mean()),
        accuracy=accuracy,
        position_acceptance=1.0 + float(accepted[whole].mean()) if whole.any() else 1.0,
        acceptance_length=walk(rows.starts, lambda row: int(accepted[row])),
        tree_nodes=tree_nodes,
        tree_acceptance_length=tree_length,
    )


def _collect(
    heads: BlockwiseHeads,
    target: Target,
    data: TokenData,
    sequences: NDArray[np.int64],
    states: HiddenSource,
    *,
    max_length: int,
    batch_size: int,
    logit_chunk: int,
) -> _Rows:
    num_heads = heads.config.num_heads
    copies = TextCopies.if_shown(data, heads.config.copy_match, num_heads)
    projection = DraftProjection(target, heads.draft_vocab)
    top = min(_CANDIDATES, projection.num_places)
    ranks, has_target, log_probs, agrees, counts = [], [], [], [], []
    for start in range(0, len(sequences), batch_size):
        batch = make_batch(
            data,
            sequences[start : start + batch_size],
            num_heads,
            max_length,
            inputs=copies,
        )
        hidden = states(batch)
        device = hidden.device
        counts += np.bincount(batch.rows.numpy(), minlength=len(batch.sequences)).tolist()
        has_target.append((batch.targets != IGNORED).numpy())
        for low in range(0, len(hidden), logit_chunk):
            part = slice(low, low + logit_chunk)
            seen = tokens_seen(batch, part, device)
            shown = seen.shown
            wanted = projection.places(batch.targets[part].to(device), shown)
            own = target.project(hidden[part]).argmax(-1)
            agrees.append((own == seen.following).cpu().numpy())
            drafts = heads(hidden[part].to(heads.b_out.dtype), seen, target.embed)
            found_ranks, found_scores = [], []
            for i in range(num_heads):  # one head's logits at a time
                own_shown = None if shown is None else shown[:, i]
                scores = projection(drafts[:, i], own_shown).float().log_softmax(-1)
                best, places = scores.topk(top, dim=-1)
                hit = places == wanted[:, i : i + 1]
                rank = torch.where(hit.any(-1), hit.int().argmax(-1), -1)
                found_ranks.append(rank.cpu().numpy())
                found_scores.append(best.cpu().numpy())
            ranks.append(np.stack(found_ranks, axis=1))
            log_probs.append(np.stack(found_scores, axis=1))
    return _Rows(
        ranks=np.concatenate(ranks),
        has_target=np.concatenate(has_target),
        log_probs=np.concatenate(log_probs).astype(np.float32),
        agrees=np.concatenate(agrees),
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
    )


def _tree_accepts(rows: _Rows, row: int, budget: int) -> int:
    # Not at the top: numba must not be loaded before a vLLM worker starts. vLLM 0.32's CPU worker
    # scans all modules for Triton kernels (triton_utils.dispatcher._rebind_kernels) and fails at
    # llvmlite's library object; spawned workers import the module that was run as a program.
    from vllm_spec_ext.proposers.blockwise.tree import best_tree

    _, ranks, parents = best_tree(np.ascontiguousarray(rows.log_probs[row]), budget, -math.inf)
    # A wanted token that is none of the candidates has rank -1, which no node has.
    return len(agreeing_path(ranks.tolist(), parents.tolist(), rows.ranks[row].tolist()))
