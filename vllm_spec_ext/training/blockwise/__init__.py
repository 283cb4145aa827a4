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
from pathlib import Path
from typing import Any

import torch

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.fingerprint import tokenizer_fingerprint
from vllm_spec_ext.proposers.blockwise.heads import load_heads
from vllm_spec_ext.training.atomic import disk_full_named, write_json
from vllm_spec_ext.training.batches import used_lengths
from vllm_spec_ext.training.blockwise.checkpoint import push_to_hub, save_heads
from vllm_spec_ext.training.blockwise.evaluate import HeadFigures
from vllm_spec_ext.training.blockwise.heads_task import HeadsTask
from vllm_spec_ext.training.distill import (
    RECORDING,
    make_data,
    transformers_generator,
    vllm_generator,
)
from vllm_spec_ext.training.flags import parse_command_line
from vllm_spec_ext.training.hidden import (
    cached_states,
    live_states,
    recorded_states,
    uses_recorded_states,
    write_cache,
)
from vllm_spec_ext.training.loop import LoopSettings, check_resume, restore, run_loop
from vllm_spec_ext.training.provenance import record_command
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
    if config.stage in ("all", "train"):
        check_resume(config.run_folder, config.resume)
    check_folders(config.out, config.run_folder, config.data_folder)
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
        target = load_target(_model(config), device, dtype, frozen=not config.finetune)
    check_data(data, target, config.max_length)
    states = live_states(target)
    if uses_recorded_states(config, data):
        report(f"hidden states: recorded with the data ({data.folder})")
        states = recorded_states(target, data)
    elif config.cache_hidden:
        folder = config.run_folder / "hidden"
        write_cache(
            folder, target, data, config.max_length, batch_size=config.batch_size, report=report
        )
        states = cached_states(folder, target, data, config.max_length)
    task = HeadsTask(config, target, data, states)
    if config.stage == "eval":
        return _eval_stage(config, task, report)
    return _train_stage(config, task, report)


def check_folders(*folders: Path) -> None:
    """Raise SpecExtError for a folder that cannot be made because a file is in its place."""
    for folder in folders:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise SpecExtError(
                f"{there} is a file, expected a folder; choose another than {folder}"
            )


def _model(config: BlockwiseTraining) -> str:
    """What to load: finished heads that were trained with the target are measured on that one."""
    if config.stage != "eval" or not config.finetune:
        return config.model
    if not config.tuned_model.is_dir():
        raise SpecExtError(
            f"no {config.tuned_model}; --stage eval --finetune measures the heads on the target "
            "that was trained with them. Give the --out and --run-dir of that run, or drop "
            "--finetune"
        )
    return str(config.tuned_model)


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
    with contextlib.suppress(OSError):  # not there, or not empty
        (config.data_folder / RECORDING).rmdir()
    return loaded[0] if loaded else None


def _train_stage(config: BlockwiseTraining, task: HeadsTask, report: Report) -> HeadFigures:
    folder = config.run_folder
    settings = config.model_dump(mode="json")
    identity = {name: value for name, value in settings.items() if name not in FREE_TO_CHANGE}
    identity["prompts_sha256"] = task.data.manifest.get("prompts_sha256")
    identity["num_tokens"] = len(task.data.token_ids)
    identity["data_sha256"] = task.data.sha256
    shape = task.heads_config
    report(
        f"{shape.num_heads} heads of width {shape.head_width}, {shape.num_parameters:,} parameters"
        f"; {len(task.split.train)} sequences to train on, {len(task.split.held_out)} held out; "
        f"{task.total_steps} steps on {task.target.device}"
    )
    unused = len(task.data) - len(task.split.train) - len(task.split.held_out)
    if unused:
        report(
            f"{unused} of {len(task.data)} sequences are not used: less than two tokens after "
            f"their prompt within --max-length {config.max_length}"
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
    final, partial = config.tuned_model, config.run_folder / ".model.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with disk_full_named(final):
            task.target.model.save_pretrained(partial)
            with contextlib.suppress(SpecExtError):
                load_tokenizer(config.model).save_pretrained(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    finally:  # half a model only takes the space that is missing
        shutil.rmtree(partial, ignore_errors=True)
    report(
        f"the target has changed: serve {final}, not {config.model}; its text differs from the "
        "original model's"
    )


def _eval_stage(config: BlockwiseTraining, task: HeadsTask, report: Report) -> HeadFigures:
    _, heads = load_heads(
        config.out,
        hidden_size=task.target.hidden_size,
        vocab_size=task.target.vocab_size,
        fingerprint=task.heads_config.tokenizer_fingerprint,
    )
    task.heads = heads.to(task.target.device)
    figures = task.measure(config.tree_nodes)
    for name, value in figures.as_dict().items():
        report(f"{name}: {value}")
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line without any framework, for machines that have torch and transformers only."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        config = parse_command_line(
            BlockwiseTraining,
            [word for word in given if word != "--debug"],
            "python -m vllm_spec_ext.training.blockwise",
            "Train heads for blockwise parallel decoding.",
        )
        train_blockwise(config, lambda line: print(line, flush=True))
    except SpecExtError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if debug:
            raise
        print(
            f"error: {type(error).__name__}: {error}\n"
            "(an error in vllm-spec-ext or its environment; --debug shows the traceback)",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
