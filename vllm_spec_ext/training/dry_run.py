# SPDX-License-Identifier: Apache-2.0
"""What a training run would cost: measured on a few batches, nothing written."""

import time
from collections.abc import Callable

import numpy as np
import torch

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.training.batches import Batch, make_batch, used_lengths
from vllm_spec_ext.training.distill import check_context, tokenise_prompts, transformers_generator
from vllm_spec_ext.training.hidden import (
    cache_bytes,
    cache_dtype,
    live_states,
    recorded_states,
    state_width,
    uses_recorded_states,
)
from vllm_spec_ext.training.loop import duration
from vllm_spec_ext.training.prompts import read_prompts
from vllm_spec_ext.training.schema import Training
from vllm_spec_ext.training.shards import TokenData, read_data
from vllm_spec_ext.training.target import Target, load_tokenizer
from vllm_spec_ext.training.task import DraftTask, MakeTask, TaskT

_MEASURED_STEPS = 3
_GENERATED_PROMPTS = 4


def dry_run(
    config: Training,
    target: Target,
    make_task: MakeTask[TaskT],
    report: Callable[[str], None] = print,
) -> None:
    """Print expected steps, time and disk use.

    Args:
        config: The run's settings.
        target: The loaded target.
        make_task: Makes what the measured steps train; it is thrown away.
        report: Receives the lines.
    """
    data, invented = _data(config, target, report)
    generates = invented and not config.raw_text
    report(_described(config, data, invented))
    dtype = next(target.model.parameters()).dtype
    layers = config.state_layers(target.num_layers)
    width = state_width(target, layers)
    states = live_states(target, layers)
    generating = once = 0.0
    if generates and config.generator == "transformers":
        generating = _time_generation(config, target, data)
        report(
            f"time: at most about {duration(generating)} to generate the data, by "
            f"{_GENERATED_PROMPTS} prompts at a time; larger batches are faster"
        )
    stored = config.cache_hidden
    if uses_recorded_states(config, data):
        report("hidden states: recorded with the data")
        stored, states = False, recorded_states(target, data)
    elif stored:
        if invented and config.records_states:
            # float32, of the new tokens only, see record_states.py
            recorded = len(data) * config.max_new_tokens * target.hidden_size * 4
            report(
                "hidden states: recorded while the data is generated, at most "
                f"{recorded / 1e9:.2f} GB in the data folder"
            )
            stored = False
        else:
            once = _time_states(config, target, data)

        def states(batch: Batch) -> torch.Tensor:  # as fast as those from the disk
            shape = (len(batch.rows), width)
            return torch.randn(shape, dtype=dtype, device=target.device)

    task = make_task(target, data, states)
    seconds = _time_steps(task)
    measuring = _time_measurement(config, task)
    num_measurements = 1 + (task.total_steps - 1) // config.eval_every
    trained = sum(p.numel() for module in task.modules.values() for p in module.parameters())
    report(task.size_line)
    report(f"steps: {task.total_steps} of {task.plan.batch_size} sequences")
    if once:
        report(f"time: about {duration(once)} for the hidden states, which are kept")
    steps, measured = seconds * task.total_steps, measuring * num_measurements
    report(f"time: {seconds:.3f} s a step, about {duration(steps)} for the steps")
    report(
        f"time: about {duration(measured)} to measure {len(task.split.held_out)} held-out "
        f"sequences, {num_measurements} x; draft trees, at the end, not included"
    )
    whole = duration(generating + once + steps + measured)
    missing = generates and config.generator == "vllm"
    report(
        f"time: about {whole} in all"
        + (", generating the data with vLLM not included" if missing else "")
    )
    # AdamW keeps two numbers beside each weight; the old state stays until the new is whole.
    report(f"disk: {trained * 12 * 2 / 1e6:.1f} MB for the saved state in {config.run_folder}")
    for line in task.disk_lines():
        report(line)
    if stored:
        cached = cache_bytes(data, config.max_length, width, cache_dtype(config, target))
        report(f"disk: {cached / 1e9:.2f} GB for cached hidden states")
    if target.device.type == "cuda":
        report(f"GPU memory: {torch.cuda.max_memory_allocated(target.device) / 1e9:.1f} GB at most")


def _described(config: Training, data: TokenData, invented: bool) -> str:
    num_tokens = len(data.token_ids)
    if not invented:
        return f"data: {len(data)} sequences, {num_tokens:,} tokens ({data.folder})"
    size = f"{num_tokens * 4 / 1e6:.1f} MB of shards"
    if config.raw_text:
        return f"data: not made yet; {len(data)} texts, {num_tokens:,} tokens, {size}"
    return (
        f"data: not made yet; {len(data)} prompts, at most "
        f"{len(data) * config.max_new_tokens:,} new tokens and {size}; continuations of random "
        "tokens, all of that length, stand for them: what follows is an upper bound"
    )


def _data(
    config: Training, target: Target, report: Callable[[str], None]
) -> tuple[TokenData, bool]:
    """The run's data, or what it will be like at most; and whether it is only that."""
    try:
        return read_data(config.data_folder), False
    except SpecExtError:
        if not config.prompts:
            raise
    texts = read_prompts(config.prompts, config.field, config.max_prompts, config.seed)
    prompts = tokenise_prompts(load_tokenizer(config.model), texts, config, report)
    new = 0 if config.raw_text else config.max_new_tokens
    if new and config.generator == "transformers":
        check_context(config, max(map(len, prompts)))
    random = np.random.default_rng(config.seed)
    sequences = [np.concatenate([p, random.integers(0, target.vocab_size, new)]) for p in prompts]
    data = TokenData(
        config.data_folder,
        {},
        np.concatenate(sequences).astype(np.int32),
        np.concatenate([[0], np.cumsum([len(s) for s in sequences])]).astype(np.int64),
        np.array([len(p) if new else 1 for p in prompts], np.int32),
    )
    return data, True


def _time_generation(config: Training, target: Target, data: TokenData) -> float:
    """Seconds for all continuations, from a few prompts of middling length."""
    order = np.argsort(data.prompt_lengths, kind="stable")
    middle = order[max(0, len(order) // 2 - _GENERATED_PROMPTS // 2) :][:_GENERATED_PROMPTS]
    prompts = [data.sequence(i)[: int(data.prompt_lengths[i])].tolist() for i in middle.tolist()]
    generate = transformers_generator(config, target.model)
    start = time.perf_counter()
    generate(prompts)  # ends with results on the host, so a GPU is done, too
    return (time.perf_counter() - start) * len(data) / len(prompts)


def _time_states(config: Training, target: Target, data: TokenData) -> float:
    """Seconds for the states of all sequences, from one batch of average ones after a warm-up."""
    lengths = used_lengths(data, config.max_length)
    typical = np.argsort(np.abs(lengths - lengths.mean()), kind="stable")[: config.batch_size]
    batch = make_batch(data, typical, 1, config.max_length)
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        with torch.no_grad():
            live_states(target, config.state_layers(target.num_layers))(batch)
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        seconds = time.perf_counter() - start
    return seconds * float(lengths.sum() / lengths[typical].sum())


def _time_steps(task: DraftTask) -> float:
    """Seconds of an average step: those of some steps, by their number of positions."""
    seconds, positions = 0.0, 0
    for step in range(_MEASURED_STEPS + 1):  # the first warms up
        start = time.perf_counter()
        task.optimizer.zero_grad(set_to_none=True)
        task.train_step(step)
        task.optimizer.step()
        if task.target.device.type == "cuda":
            torch.cuda.synchronize(task.target.device)
        if step:
            seconds += time.perf_counter() - start
            positions += len(task.plan.batch(step).rows)
    return seconds / positions * task.plan.mean_positions


def _time_measurement(config: Training, task: DraftTask) -> float:
    """Seconds to measure the held-out sequences, from one batch of them."""
    held_out = task.split.held_out
    some = held_out[: config.batch_size]
    start = time.perf_counter()
    task.measure(num_sequences=len(some))
    lengths = used_lengths(task.data, config.max_length)
    return (time.perf_counter() - start) * float(lengths[held_out].sum() / lengths[some].sum())
