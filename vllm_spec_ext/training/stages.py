# SPDX-License-Identifier: Apache-2.0
"""The stages of a run, each of which goes on where it was stopped.

Distillation data, hidden states (computed on the fly, or cached), training. Only the data stage
needs vLLM, and only if asked for it. Measuring and writing the result are the method's own.
"""

import contextlib
import gc
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_spec_ext.atomic import read_json
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.fingerprint import tokenizer_fingerprint
from vllm_spec_ext.training.batches import used_lengths
from vllm_spec_ext.training.distill import (
    RECORDING,
    make_data,
    transformers_generator,
    vllm_generator,
)
from vllm_spec_ext.training.dry_run import dry_run
from vllm_spec_ext.training.hidden import (
    cache_dtype,
    cached_states,
    live_states,
    recorded_states,
    uses_recorded_states,
    write_cache,
)
from vllm_spec_ext.training.loop import LoopSettings, check_resume, restore, run_loop
from vllm_spec_ext.training.prompts import check_prompt_file
from vllm_spec_ext.training.provenance import NAME as RECORD_NAME
from vllm_spec_ext.training.provenance import record_command
from vllm_spec_ext.training.schema import Training
from vllm_spec_ext.training.shards import MANIFEST_NAME, TokenData, read_data
from vllm_spec_ext.training.target import (
    Target,
    load_target,
    load_tokenizer,
    pick_device,
    pick_dtype,
)
from vllm_spec_ext.training.task import DraftTask, MakeTask, TaskT

Report = Callable[[str], None]


def prepare(config: Training, make_task: MakeTask[TaskT], report: Report) -> TaskT | None:
    """All that comes before the first step.

    Args:
        config: Settings.
        make_task: Called once the target, its data and its hidden states are there.
        report: Receives progress lines.

    Returns:
        The task, untrained, or None if the settings ask for no more than the data or a dry run.

    Raises:
        SpecExtError: Anything wrong with settings, files or the target.
    """
    if config.stage in ("all", "train"):
        check_resume(config.run_folder, config.resume)
    check_folders(config.out, config.run_folder, config.data_folder)
    check_apart(config.out, config.kept_folders)
    frozen = not config.trains_target
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device) if frozen else torch.float32
    check_sources(config)
    if config.dry_run:
        target = load_target(config.model, device, dtype, frozen=frozen)
        dry_run(config, target, make_task, report)
        return None
    loaded: Target | None = None
    if config.prompts and config.stage in ("all", "data"):
        loaded = _data_stage(config, device, dtype, report)
    elif config.stage == "data":
        raise SpecExtError("the data stage needs prompts; give --prompts FILES")
    if config.stage == "data":
        return None
    data = read_data(config.data_folder)
    if loaded is None or not frozen:
        loaded = load_target(config.target_to_load(), device, dtype, frozen=frozen)
    target = loaded
    check_data(data, target, config.max_length)
    layers = config.state_layers(target.num_layers)
    states = live_states(target, layers)
    if uses_recorded_states(config, data):
        report(f"hidden states: recorded with the data ({data.folder})")
        states = recorded_states(target, data)
    elif config.cache_hidden:
        folder = config.run_folder / "hidden"
        write_cache(
            folder,
            target,
            data,
            config.max_length,
            batch_size=config.batch_size,
            layers=layers,
            dtype=cache_dtype(config, target),
            report=report,
        )
        states = cached_states(folder, target, data, config.max_length, layers)
    if config.stage == "eval":
        warn_of_another_split(config, data, report)
    return make_task(target, data, states)


def train(config: Training, task: DraftTask, report: Report, free_to_change: Set[str]) -> None:
    """Train to the last step, from the saved state if there is one.

    Args:
        config: Settings.
        task: What :func:`prepare` returned.
        report: Receives progress lines.
        free_to_change: Settings in which a resumed run may differ from the one before.

    Raises:
        SpecExtError: A state of another run, or the training diverged.
        KeyboardInterrupt: Stopped; the state is saved.
    """
    folder = config.run_folder
    settings = config.model_dump(mode="json")
    identity = {name: value for name, value in settings.items() if name not in free_to_change}
    identity["prompts_sha256"] = task.data.manifest.get("prompts_sha256")
    identity["num_tokens"] = len(task.data.token_ids)
    identity["data_sha256"] = task.data.sha256
    identity["split"] = "by prompt"
    report(
        f"{task.shape}"
        f"; {len(task.split.train)} sequences to train on, {len(task.split.held_out)} held out; "
        f"{task.total_steps} steps on {task.target.device}"
    )
    unused = len(task.data) - len(task.split.train) - len(task.split.held_out)
    if unused:
        report(
            f"{unused} of {len(task.data)} sequences are not used: less than two tokens after "
            f"their prompt within --max-length {config.max_length}"
        )
    lost = cut_off(task.data, config.max_length)
    if lost > 0.01:
        report(
            f"--max-length {config.max_length} cuts off {lost:.0%} of the answers' tokens; raise "
            "it, or give shorter prompts or --max-new-tokens"
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
    step = restore(task, folder, identity, config.resume)
    record_command(folder, task.target.device, settings, task.data.manifest)
    run_loop(task, loop, folder, identity, step=step, report=report)


def cut_off(data: TokenData, max_length: int) -> float:
    """Share of the tokens behind the prompts that is not used."""
    lengths = np.diff(data.offsets)
    behind = lengths - data.prompt_lengths
    used = np.clip(np.minimum(lengths, max_length) - data.prompt_lengths, 0, None)
    return float(1.0 - used.sum() / max(1, behind.sum()))


def check_folders(*folders: Path) -> None:
    """Raise SpecExtError for a folder that cannot be made because a file is in its place."""
    for folder in folders:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise SpecExtError(
                f"{there} is a file, expected a folder; choose another than {folder}"
            )


def check_apart(out: Path, others: Sequence[tuple[str, Path]]) -> None:
    """Raise SpecExtError for a folder inside that of the result, which is replaced at the end."""
    for option, folder in others:
        if folder.resolve().is_relative_to(out.resolve()):
            raise SpecExtError(
                f"{option}: {folder} lies in --out {out}, which is replaced as a whole when the "
                "training ends; choose a folder outside of it"
            )


def check_finished(config: Training, file: str, what: str) -> None:
    """Raise SpecExtError where the eval stage has nothing to measure; before a target loads.

    Args:
        config: Settings.
        file: Without which the folder holds no result.
        what: That is measured.
    """
    if config.stage == "eval" and not (config.out / file).is_file():
        raise SpecExtError(
            f"--stage eval measures {what}, and {config.out} holds no {file}; train first, or give "
            "the folder of what was trained to --out"
        )


def check_sources(config: Training) -> None:
    """Raise SpecExtError where there is nothing to learn from; before a target loads."""
    has_data = (config.data_folder / MANIFEST_NAME).is_file()
    reads_prompts = not has_data if config.dry_run else config.stage in ("all", "data")
    for path in config.prompts if reads_prompts else ():
        check_prompt_file(path)
    if not config.prompts and not has_data and config.stage != "data":
        raise SpecExtError(
            f"found no prompts, and no data of an earlier run in {config.data_folder}; give "
            "--prompts FILES, or --data FOLDER"
        )


def check_data(data: TokenData, target: Target, max_length: int) -> None:
    """Refuse token ids that the target does not have, too long texts, and another tokenizer's."""
    longest = int(used_lengths(data, max_length).max())
    if target.context is not None and longest > target.context:
        raise SpecExtError(
            f"{data.folder} holds texts of {longest} tokens (within --max-length {max_length}), "
            f"but {target.name} has a context of {target.context}; "
            f"give --max-length {target.context}"
        )
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
            f"{data.folder} was made with another tokenizer (fingerprint {stored[:19]}…) than "
            f"{target.name}'s ({found[:19]}…); make the data again with this target"
        )


def warn_of_another_split(config: Training, data: TokenData, report: Report) -> None:
    """Say so if some of the texts to measure with were trained on, by the record of the run."""
    try:
        record = read_json(config.run_folder / RECORD_NAME)
        trained, num_prompts = record["settings"], record["data"].get("num_prompts")
        seed, held_out, length = (
            trained[name] for name in ("seed", "eval_sequences", "max_length")
        )
    except (SpecExtError, FileNotFoundError, KeyError, TypeError, AttributeError):
        return  # trained elsewhere, or its record is gone
    other_texts = data.manifest.get("num_prompts") != num_prompts or config.max_length != length
    if num_prompts is not None and num_prompts < 10 * held_out and other_texts:
        report(
            f"there were {num_prompts} texts when this was trained (--max-length {length}), less "
            f"than ten for each of --eval-sequences {held_out}: then which are held out changes "
            "with their number, some of these were trained on, and these figures may be too good"
        )
    if config.seed != seed or config.eval_sequences > held_out:
        report(
            f"--seed {config.seed} and --eval-sequences {config.eval_sequences} hold out texts "
            f"that were trained on with --seed {seed} and --eval-sequences {held_out} "
            f"({config.run_folder / RECORD_NAME}), so these figures are too good"
        )


def warn_of_foreign_text(task: DraftTask, report: Report) -> None:
    """Say so before training if greedy text of the target is not what the target would write.

    The usual reasons are another model, another prompt format, or a library that reads the
    model's configuration differently; what is trained would learn and then be rejected.
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
    config: Training, device: torch.device, dtype: torch.dtype, report: Report
) -> Target | None:
    loaded: list[Target] = []

    def generator() -> Any:
        if config.generator == "vllm":
            return vllm_generator(config)
        loaded.append(load_target(config.model, device, dtype))
        return transformers_generator(config, loaded[0].model)

    make_data(config, load_tokenizer(config.model), generator, report)
    gc.collect()  # a vLLM engine frees its memory when it is collected, before training starts
    with contextlib.suppress(OSError):  # not there, or not empty
        (config.data_folder / RECORDING).rmdir()
    return loaded[0] if loaded else None
