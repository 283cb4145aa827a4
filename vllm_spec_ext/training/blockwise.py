# SPDX-License-Identifier: Apache-2.0
"""Training blockwise heads (Stern et al. 2018): ``python -m vllm_spec_ext.training.blockwise``.

Stages, each of which goes on where it was stopped: distillation data, hidden states (computed on
the fly, or cached), training, measuring. Only the data stage needs vLLM, and only if asked for it.
"""

import contextlib
import gc
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.fingerprint import tokenizer_fingerprint
from vllm_spec_ext.proposers.blockwise_heads import BlockwiseHeads, HeadsConfig, load_heads
from vllm_spec_ext.training.atomic import write_json
from vllm_spec_ext.training.batches import BatchPlan, Split, split_data
from vllm_spec_ext.training.checkpoint import default_head_width, push_to_hub, save_heads
from vllm_spec_ext.training.chunked_loss import backward_cross_entropy
from vllm_spec_ext.training.distill import make_data, transformers_generator, vllm_generator
from vllm_spec_ext.training.evaluate import HeadFigures, measure_heads
from vllm_spec_ext.training.flags import parse_command_line
from vllm_spec_ext.training.hidden import HiddenSource, cached_states, live_states, write_cache
from vllm_spec_ext.training.loop import LoopSettings, run_loop
from vllm_spec_ext.training.provenance import provenance
from vllm_spec_ext.training.schema import FREE_TO_CHANGE, BlockwiseTraining
from vllm_spec_ext.training.shards import TokenData, read_data
from vllm_spec_ext.training.target import (
    Target,
    load_target,
    load_tokenizer,
    pick_device,
    pick_dtype,
)

Report = Callable[[str], None]
_SMOOTHING = 0.95  # of the figures in progress lines


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
        )
        torch.manual_seed(config.seed)
        self.heads_config = heads_config(config, target, data)
        self.heads = BlockwiseHeads(self.heads_config).to(target.device).train()
        self.modules: dict[str, nn.Module] = {"heads": self.heads}
        matrices = [p for p in self.heads.parameters() if p.ndim > 1]
        biases = [p for p in self.heads.parameters() if p.ndim == 1]
        rate = config.learning_rate
        groups: list[dict[str, Any]] = [
            {"params": matrices, "peak_lr": rate, "weight_decay": config.weight_decay},
            {"params": biases, "peak_lr": rate, "weight_decay": 0.0},
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

    def train_step(self, step: int) -> dict[str, float]:
        """Gradients of one batch: of one random head's loss, or of the mean over all heads."""
        config = self.config
        batch = self.plan.batch(step)
        with torch.set_grad_enabled(config.finetune), self._autocast():
            hidden = self.states(batch)
        device = hidden.device
        targets = batch.targets.to(device)
        if config.finetune:
            return self._train_both(hidden, batch.next_tokens.to(device), targets, step)
        return self._show(self._train_heads(hidden, batch.next_tokens.to(device), targets, step))

    def _chosen_heads(self, step: int) -> list[int]:
        if self.config.loss == "all":
            return list(range(self.config.num_heads))
        # A uniformly random head is an unbiased estimate of the mean loss (Stern et al., sec. 6).
        return [
            int(np.random.default_rng([self.config.seed, 3, step]).integers(self.config.num_heads))
        ]

    def _train_heads(
        self, hidden: Tensor, following: Tensor, targets: Tensor, step: int
    ) -> dict[str, tuple[Tensor, Tensor, int]]:
        embedding = self.target.embed(following) if self.heads_config.condition_on_next else None
        with self._autocast():
            drafts = self.heads(hidden, embedding)
        chosen = self._chosen_heads(step)
        # A detached copy collects the gradients of all heads, so that the heads' own graph, and
        # in fine-tuning the target's, is walked once.
        leaf = drafts.detach().requires_grad_()
        results = {}
        for i in chosen:
            with self._autocast():
                results[f"{i + 1}"] = backward_cross_entropy(
                    leaf[:, i],
                    targets[:, i],
                    self.target.project,
                    self.config.logit_chunk,
                    1 / len(chosen),
                )
        if leaf.grad is not None:
            drafts.backward(leaf.grad)
        return results

    def _train_both(
        self, hidden: Tensor, following: Tensor, targets: Tensor, step: int
    ) -> dict[str, float]:
        """As :meth:`_train_heads`, with the target's own loss (the paper's head 1) beside it."""
        leaf = hidden.detach().requires_grad_()
        results = self._train_heads(leaf, following, targets, step)
        with self._autocast():
            results["own"] = backward_cross_entropy(
                leaf.view_as(leaf), following, self.target.project, self.config.logit_chunk
            )
        hidden.backward(leaf.grad)
        return self._show(results)

    def _show(self, results: dict[str, tuple[Tensor, Tensor, int]]) -> dict[str, float]:
        for name, (loss, correct, count) in results.items():
            if count:
                for key, value in (("loss", loss), ("acc", correct)):
                    mean, former = value.item() / count, self._shown.get(key + name)
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
    )
    kept = ("kind", "prompt_files", "num_prompts", "max_new_tokens", "temperature")
    facts = {name: data.manifest[name] for name in kept if name in data.manifest}
    return HeadsConfig(
        target=str(config.run_folder / "model") if config.finetune else config.shown_target,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        tokenizer_fingerprint=data.manifest.get("tokenizer_fingerprint"),
        num_heads=config.num_heads,
        head_width=width,
        block_diagonal=config.block_diagonal,
        condition_on_next=config.condition_on_next,
        training={
            "finetune": config.finetune,
            "loss": config.loss,
            "data": {**facts, "num_tokens": len(data.token_ids), "num_sequences": len(data)},
        },
    )


def train_blockwise(config: BlockwiseTraining, report: Report = print) -> HeadFigures | None:
    """Run the stages that the settings ask for.

    Args:
        config: Settings.
        report: Receives progress lines.

    Returns:
        Held-out figures, or None if the run ended before measuring.

    Raises:
        SpecExtError: Anything wrong with settings, files or the target.
        KeyboardInterrupt: Stopped; the state is saved.
    """
    device = pick_device(config.device)
    dtype = torch.float32 if config.finetune else pick_dtype(config.dtype, device)
    if config.dry_run:
        from vllm_spec_ext.training.dry_run import dry_run

        dry_run(
            config, load_target(config.model, device, dtype, frozen=not config.finetune), report
        )
        return None
    target: Target | None = None
    if config.prompts and config.stage in ("all", "data"):
        target = _data_stage(config, device, dtype, report)
    elif config.stage == "data":
        raise SpecExtError("the data stage needs prompts; give --prompts FILES")
    if config.stage == "data":
        return None
    data = read_data(config.data_folder)
    if target is None or config.finetune:
        target = load_target(config.model, device, dtype, frozen=not config.finetune)
    check_data(data, target)
    states = live_states(target)
    if config.cache_hidden:
        folder = config.run_folder / "hidden"
        write_cache(
            folder, target, data, config.max_length, batch_size=config.batch_size, report=report
        )
        states = cached_states(folder, target, data, config.max_length)
    task = HeadsTask(config, target, data, states)
    if config.stage == "eval":
        return _eval_stage(config, task, report)
    return _train_stage(config, task, report)


def check_data(data: TokenData, target: Target) -> None:
    """Refuse token ids that the target does not have, and another tokenizer's."""
    highest = int(data.token_ids.max())
    if highest >= target.vocab_size:
        raise SpecExtError(
            f"{data.folder} holds token id {highest}, but {target.name} has a vocabulary of "
            f"{target.vocab_size}; make the data again with this target"
        )
    stored = data.manifest.get("tokenizer_fingerprint")
    try:
        found = tokenizer_fingerprint(load_tokenizer(target.name))
    except SpecExtError:
        return  # no tokenizer on the training machine: the shards' fingerprint travels on
    if stored is not None and stored != found:
        raise SpecExtError(
            f"{data.folder} was made with another tokenizer (fingerprint {stored[:12]}…) than "
            f"{target.name}'s ({found[:12]}…); make the data again with this target"
        )


def warn_of_foreign_text(task: HeadsTask, report: Report) -> None:
    """Say so before training if greedy text of the target is not what the target would write.

    The usual reasons are another model, another prompt format, or a library that reads the
    model's configuration differently; heads would learn and then be rejected.
    """
    manifest = task.data.manifest
    if manifest.get("kind") != "distilled" or manifest.get("temperature") != 0.0:
        return
    agreement = task.measure(num_sequences=8).target_agreement
    if agreement < 0.9:
        report(
            f"warning: {task.target.name} predicts only {agreement:.0%} of the tokens in "
            f"{task.data.folder}, which is greedy text of {manifest.get('model')}; expected above "
            "95%. Are model and library versions the same as when the data was made?"
        )


def _data_stage(
    config: BlockwiseTraining, device: torch.device, dtype: torch.dtype, report: Report
) -> Target | None:
    loaded: list[Target] = []

    def generator() -> Any:
        if config.generator == "vllm":
            return vllm_generator(config)
        loaded.append(load_target(config.model, device, dtype))
        return transformers_generator(config, loaded[0].model)

    make_data(config, load_tokenizer(config.model), generator, report)
    gc.collect()  # a vLLM engine frees its memory when it is collected, before training starts
    return loaded[0] if loaded else None


def _train_stage(config: BlockwiseTraining, task: HeadsTask, report: Report) -> HeadFigures:
    folder = config.run_folder
    settings = config.model_dump(mode="json")
    write_json(folder / "run.json", provenance(task.target.device, settings, task.data.manifest))
    identity = {name: value for name, value in settings.items() if name not in FREE_TO_CHANGE}
    identity["prompts_sha256"] = task.data.manifest.get("prompts_sha256")
    identity["num_tokens"] = len(task.data.token_ids)
    shape = task.heads_config
    report(
        f"{shape.num_heads} heads of width {shape.head_width}, {shape.num_parameters:,} parameters"
        f"; {len(task.split.train)} sequences to train on, {len(task.split.held_out)} held out; "
        f"{task.total_steps} steps on {task.target.device}"
    )
    loop = LoopSettings(
        total_steps=task.total_steps,
        warmup_steps=int(task.total_steps * config.warmup),
        clip=config.clip,
        save_every=config.save_every,
        eval_every=config.eval_every,
        log_every=config.log_every,
    )
    warn_of_foreign_text(task, report)
    run_loop(task, loop, folder, identity, resume=config.resume, report=report)
    figures = task.measure(config.tree_nodes)
    write_json(folder / "figures.json", figures.as_dict())
    if config.finetune:
        _save_target(config, task, report)
    size = save_heads(config.out, task.heads_config, task.heads, config.save_dtype, figures)
    report(
        f"saved {config.out} ({size / 1e6:.2f} MB): {figures.acceptance_length:.3f} tokens per "
        f"step with a chain of {shape.num_heads}, {figures.tree_acceptance_length:.3f} with trees "
        f"of {figures.tree_nodes} nodes"
    )
    if config.push_to_hub:
        report(f"uploaded: {push_to_hub(config.out, config.push_to_hub)}")
    return figures


def _save_target(config: BlockwiseTraining, task: HeadsTask, report: Report) -> None:
    final, partial = config.run_folder / "model", config.run_folder / ".model.partial"
    shutil.rmtree(partial, ignore_errors=True)
    task.target.model.save_pretrained(partial)
    with contextlib.suppress(SpecExtError):
        load_tokenizer(config.model).save_pretrained(partial)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    report(
        f"the target has changed: serve {final}, not {config.model}; its text differs from the "
        "original model's"
    )


def _eval_stage(config: BlockwiseTraining, task: HeadsTask, report: Report) -> HeadFigures:
    _, heads = load_heads(
        config.out, hidden_size=task.target.hidden_size, vocab_size=task.target.vocab_size
    )
    task.heads = heads.to(task.target.device)
    figures = task.measure(config.tree_nodes)
    for name, value in figures.as_dict().items():
        report(f"{name}: {value}")
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line without any framework, for machines that have torch and transformers only."""
    try:
        config = parse_command_line(
            BlockwiseTraining,
            arguments,
            "python -m vllm_spec_ext.training.blockwise",
            "Train heads for blockwise parallel decoding.",
        )
        train_blockwise(config, lambda line: print(line, flush=True))
    except SpecExtError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
