# SPDX-License-Identifier: Apache-2.0
"""What is trained: heads, their target and their data, as the shared training loop wants them."""

import contextlib
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vllm_spec_ext.proposers.blockwise.heads import BlockwiseHeads, HeadsConfig, TokensSeen
from vllm_spec_ext.training.batches import IGNORED, BatchPlan, Split, split_data
from vllm_spec_ext.training.blockwise.checkpoint import default_head_width
from vllm_spec_ext.training.blockwise.evaluate import HeadFigures, measure_heads
from vllm_spec_ext.training.blockwise.schema import BlockwiseTraining
from vllm_spec_ext.training.blockwise.tokens_seen import tokens_seen
from vllm_spec_ext.training.chunked_loss import backward_cross_entropy
from vllm_spec_ext.training.draft_vocab import DraftProjection, frequent_tokens
from vllm_spec_ext.training.hidden import HiddenSource
from vllm_spec_ext.training.shards import TokenData
from vllm_spec_ext.training.target import Target, pick_dtype
from vllm_spec_ext.training.text_copies import TextCopies

_SMOOTHING = 0.9  # of the figures in progress lines


class _HeadResult(NamedTuple):
    loss: Tensor  # 0-d, sum over the targets that the head can draft
    correct: Tensor  # 0-d
    num_listed: int  # targets that the head can draft
    num_targets: int  # all of them


class HeadsTask:
    """Heads, their target and their data, as the training loop wants them."""

    def __init__(
        self, config: BlockwiseTraining, target: Target, data: TokenData, states: HiddenSource
    ) -> None:
        """Build untrained heads and their optimizer; deterministic in ``config.seed``."""
        self.config, self.target, self.data, self.states = config, target, data, states
        self.split: Split = split_data(data, config.max_length, config.eval_sequences, config.seed)
        self.plan = BatchPlan(
            data,
            self.split.train,
            config.num_heads,
            config.batch_size,
            config.max_length,
            config.positions_per_sequence,
            config.seed,
            config.prompt_text,
            TextCopies.if_shown(data, config.copy_match, config.num_heads),
        )
        torch.manual_seed(config.seed)
        self.heads_config = heads_config(config, target, data)
        self.heads = BlockwiseHeads(self.heads_config).to(target.device).train()
        self.heads.dropout = config.dropout
        if self.heads_config.draft_vocab_size is not None:
            size = self.heads_config.draft_vocab_size
            listed = frequent_tokens(data, self.split.train.tolist(), size, target.vocab_size)
            self.heads.draft_vocab = listed.to(target.device)
        self.projection = DraftProjection(target, self.heads.draft_vocab)
        self.modules: dict[str, nn.Module] = {"heads": self.heads}
        # Decay is for what starts at zero or at random; gains start at one.
        matrices = [self.heads.w_in.weight, self.heads.w_out]
        others = [p for p in self.heads.parameters() if all(p is not m for m in matrices)]
        rate = config.learning_rate
        groups: list[dict[str, Any]] = [
            {"params": matrices, "peak_lr": rate, "weight_decay": config.weight_decay},
            {"params": others, "peak_lr": rate, "weight_decay": 0.0},
        ]
        if config.finetune:
            self.modules["target"] = target.model
            weights = [p for p in target.model.parameters() if p.requires_grad]
            peak = config.target_learning_rate
            groups.append({"params": weights, "peak_lr": peak, "weight_decay": 0.0})
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98))
        self._shown: dict[str, float] = {}

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        if self.config.max_steps is not None:
            return self.config.max_steps
        return max(1, round(self.config.epochs * self.plan.batches_per_epoch))

    @property
    def shape(self) -> str:
        """The heads in a line."""
        shape = self.heads_config
        return (
            f"{shape.num_heads} heads of width {shape.head_width}, "
            f"{shape.num_parameters:,} parameters"
        )

    @property
    def size_line(self) -> str:
        """The heads' shape and size on disk."""
        shape = self.heads_config
        size = shape.num_parameters * (4 if self.config.save_dtype == "fp32" else 2)
        return f"heads: {shape.num_heads} of width {shape.head_width}, {size / 1e6:.2f} MB"

    def disk_lines(self) -> list[str]:
        """The trained target's size, if it is trained."""
        if not self.config.finetune:
            return []
        size = sum(p.numel() for p in self.target.model.parameters()) * 4
        return [f"disk: {size / 1e6:.1f} MB for the trained target in {self.config.tuned_model}"]

    def train_step(self, step: int) -> dict[str, float]:
        """Gradients of one batch: of one random head's loss, or of the mean over all heads."""
        config = self.config
        # Dropout draws from torch's global state, which no saved state holds.
        torch.manual_seed(int(np.random.default_rng([config.seed, 4, step]).integers(2**62)))
        batch = self.plan.batch(step)
        with torch.set_grad_enabled(config.finetune), self._autocast():
            hidden = self.states(batch)
        device = hidden.device
        targets = batch.targets.to(device)
        seen = tokens_seen(batch, slice(None), device)
        if config.finetune:
            return self._train_both(hidden, seen, targets, step)
        return self._show(self._train_heads(hidden, seen, targets, step))

    def _chosen_heads(self, step: int) -> list[int]:
        if self.config.loss == "all":
            return list(range(self.config.num_heads))
        # A uniformly random head is an unbiased estimate of the mean loss (Stern et al., sec. 6).
        return [
            int(np.random.default_rng([self.config.seed, 3, step]).integers(self.config.num_heads))
        ]

    def _train_heads(
        self, hidden: Tensor, seen: TokensSeen, targets: Tensor, step: int
    ) -> dict[str, _HeadResult]:
        with self._autocast():
            drafts = self.heads(hidden, seen, self.target.embed)
        chosen = self._chosen_heads(step)
        places = self.projection.places(targets)
        # A detached copy collects the gradients of all heads, so that the heads' own graph, and
        # in fine-tuning the target's, is walked once.
        leaf = drafts.detach().requires_grad_()
        results = {}
        for i in chosen:
            with self._autocast():
                loss, correct, count = backward_cross_entropy(
                    leaf[:, i],
                    places[:, i],
                    self.projection,
                    self.config.logit_chunk,
                    1 / len(chosen),
                )
            num_targets = int((targets[:, i] != IGNORED).sum())
            results[f"{i + 1}"] = _HeadResult(loss, correct, count, num_targets)
        if leaf.grad is not None:
            drafts.backward(leaf.grad)
        return results

    def _train_both(
        self, hidden: Tensor, seen: TokensSeen, targets: Tensor, step: int
    ) -> dict[str, float]:
        """As :meth:`_train_heads`, with the target's own loss (the paper's head 1) beside it."""
        leaf = hidden.detach().requires_grad_()
        results = self._train_heads(leaf, seen, targets, step)
        with self._autocast():
            loss, correct, count = backward_cross_entropy(
                leaf.view_as(leaf), seen.following, self.target.project, self.config.logit_chunk
            )
        results["own"] = _HeadResult(loss, correct, count, count)
        hidden.backward(leaf.grad)
        return self._show(results)

    def _show(self, results: dict[str, _HeadResult]) -> dict[str, float]:
        for name, (loss, correct, num_listed, num_targets) in results.items():
            # Held-out accuracy, too, is over all tokens, also those that heads cannot draft.
            for key, total, of in (("loss", loss, num_listed), ("acc", correct, num_targets)):
                if of:
                    mean, former = total.item() / of, self._shown.get(key + name)
                    self._shown[key + name] = (
                        mean if former is None else _SMOOTHING * former + (1 - _SMOOTHING) * mean
                    )
        return dict(sorted(self._shown.items()))

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        device = self.target.device
        if pick_dtype(self.config.dtype, device) is torch.bfloat16:
            return torch.autocast(device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def evaluate(self) -> dict[str, float]:
        """Held-out figures under short names, chain only."""
        return self.measure().summary()

    def measure(self, tree_nodes: int = 0, num_sequences: int | None = None) -> HeadFigures:
        """Held-out figures in full, of all held-out sequences or only some."""
        with self._autocast():
            return measure_heads(
                self.heads,
                self.target,
                self.data,
                self.split.held_out[:num_sequences],
                self.states,
                max_length=self.config.max_length,
                batch_size=self.config.batch_size,
                logit_chunk=self.config.logit_chunk,
                tree_nodes=tree_nodes,
            )


def heads_config(config: BlockwiseTraining, target: Target, data: TokenData) -> HeadsConfig:
    """Shape of the heads, and what they will say about their origin."""
    width = config.head_width or default_head_width(
        target.hidden_size,
        config.num_heads,
        dense=not config.block_diagonal,
        conditioned=config.condition_on_next,
        copying=config.copy_match > 0,
    )
    kept = ("kind", "prompt_files", "num_prompts", "max_new_tokens", "temperature")
    facts = {name: data.manifest[name] for name in kept if name in data.manifest}
    return HeadsConfig(
        target=config.target_name or str(config.tuned_model)
        if config.finetune
        else config.shown_target,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        tokenizer_fingerprint=data.manifest.get("tokenizer_fingerprint"),
        num_heads=config.num_heads,
        head_width=width,
        draft_vocab_size=config.draft_vocab and min(config.draft_vocab, target.vocab_size),
        block_diagonal=config.block_diagonal,
        condition_on_next=config.condition_on_next,
        copy_match=config.copy_match,
        copy_map=config.copy_match > 0 and not target.tied,
        training={
            "finetune": config.finetune,
            "loss": config.loss,
            "data": {**facts, "num_tokens": len(data.token_ids), "num_sequences": len(data)},
        },
    )
