# SPDX-License-Identifier: Apache-2.0
"""What a training run would cost: measured on a few batches, nothing written."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.training.batches import Batch, make_batch, used_lengths
from vllm_spec_ext.training.heads_task import HeadsTask
from vllm_spec_ext.training.hidden import (
    cache_bytes,
    live_states,
    recorded_states,
    uses_recorded_states,
)
from vllm_spec_ext.training.loop import duration
from vllm_spec_ext.training.prompts import read_prompts
from vllm_spec_ext.training.schema import BlockwiseTraining
from vllm_spec_ext.training.shards import TokenData, read_data
from vllm_spec_ext.training.target import Target

_MEASURED_STEPS = 3


def dry_run(
    config: BlockwiseTraining,
    target: Target,
    report: Callable[[str], None] = print,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Print expected steps, time and disk use.

    Args:
        config: The run's settings.
        target: The loaded target; the measured steps train throw-away heads.
        report: Receives the lines.
        clock: Seconds.
    """
    data, invented = _data(config, target)
    if invented:
        prompts = len(data)
        bound = prompts * (config.max_prompt_tokens + config.max_new_tokens) * 4
        report(
            f"data: not made yet; {prompts} prompts, at most {prompts * config.max_new_tokens:,} "
            f"new tokens and {bound / 1e6:.1f} MB of shards; steps are measured on random tokens"
        )
    else:
        report(f"data: {len(data)} sequences, {len(data.token_ids):,} tokens ({data.folder})")
    dtype = next(target.model.parameters()).dtype
    states = live_states(target)
    once = 0.0
    stored = config.cache_hidden
    if uses_recorded_states(config, data):
        report("hidden states: recorded with the data")
        stored, states = False, recorded_states(target, data)
    elif stored:
        if invented and config.records_states:
            # float32, of the new tokens only, see record_states.py
            size = len(data) * config.max_new_tokens * target.hidden_size * 4
            report(
                "hidden states: recorded while the data is generated, at most "
                f"{size / 1e9:.2f} GB in the data folder"
            )
            stored = False
        else:
            once = _time_states(config, target, data, clock)

        def states(batch: Batch) -> torch.Tensor:  # as fast as those from the disk
            shape = (len(batch.rows), target.hidden_size)
            return torch.randn(shape, dtype=dtype, device=target.device)

    task = HeadsTask(config, target, data, states)
    seconds = _time_steps(task, clock)
    shape = task.heads_config
    heads_bytes = shape.num_parameters * (4 if config.save_dtype == "fp32" else 2)
    trained = sum(p.numel() for module in task.modules.values() for p in module.parameters())
    report(f"heads: {shape.num_heads} of width {shape.head_width}, {heads_bytes / 1e6:.2f} MB")
    report(f"steps: {task.total_steps} of {task.plan.batch_size} sequences")
    if once:
        report(f"time: about {duration(once)} for the hidden states, which are kept")
    whole = duration(once + seconds * task.total_steps)
    report(f"time: {seconds:.3f} s a step, about {whole} in all")
    # AdamW keeps two numbers beside each weight; the old state stays until the new is whole.
    report(f"disk: {trained * 12 * 2 / 1e6:.1f} MB for the saved state in {config.run_folder}")
    if stored:
        size = cache_bytes(data, config.max_length, target.hidden_size, dtype)
        report(f"disk: {size / 1e9:.2f} GB for cached hidden states")
    if target.device.type == "cuda":
        report(f"GPU memory: {torch.cuda.max_memory_allocated(target.device) / 1e9:.1f} GB at most")


def _data(config: BlockwiseTraining, target: Target) -> tuple[TokenData, bool]:
    try:
        return read_data(config.data_folder), False
    except SpecExtError:
        if not config.prompts:
            raise
    prompts = len(read_prompts(config.prompts, config.field, config.max_prompts))
    length = config.max_length
    count = max(2, prompts)
    ids = np.random.default_rng(config.seed).integers(0, target.vocab_size, count * length)
    return (
        TokenData(
            Path(config.data_folder),
            {},
            ids.astype(np.int32),
            np.arange(count + 1, dtype=np.int64) * length,
            np.full(count, min(length // 2, config.max_prompt_tokens), np.int32),
        ),
        True,
    )


def _time_states(
    config: BlockwiseTraining, target: Target, data: TokenData, clock: Callable[[], float]
) -> float:
    """Seconds for the states of all sequences, from one batch of average ones after a warm-up."""
    lengths = used_lengths(data, config.max_length)
    typical = np.argsort(np.abs(lengths - lengths.mean()), kind="stable")[: config.batch_size]
    batch = make_batch(data, typical, 1, config.max_length)
    seconds = 0.0
    for _ in range(2):
        start = clock()
        with torch.no_grad():
            live_states(target)(batch)
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        seconds = clock() - start
    return seconds * float(lengths.sum() / lengths[typical].sum())


def _time_steps(task: HeadsTask, clock: Callable[[], float]) -> float:
    """Seconds of an average step: those of some steps, by their number of positions."""
    seconds, positions = 0.0, 0
    for step in range(_MEASURED_STEPS + 1):  # the first warms up
        start = clock()
        task.optimizer.zero_grad(set_to_none=True)
        task.train_step(step)
        task.optimizer.step()
        if task.target.device.type == "cuda":
            torch.cuda.synchronize(task.target.device)
        if step:
            seconds += clock() - start
            positions += len(task.plan.batch(step).rows)
    return seconds / positions * task.plan.mean_positions
