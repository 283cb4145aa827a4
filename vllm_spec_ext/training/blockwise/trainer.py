# SPDX-License-Identifier: Apache-2.0
"""Training blockwise heads (Stern et al. 2018): the shared stages, then measuring and saving."""

import contextlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_spec_ext.atomic import disk_full_named, replace_folder, write_json
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.blockwise.heads import CONFIG_NAME, load_heads
from vllm_spec_ext.training.blockwise.checkpoint import check_replaceable, save_heads
from vllm_spec_ext.training.blockwise.evaluate import HeadFigures
from vllm_spec_ext.training.blockwise.heads_task import HeadsTask
from vllm_spec_ext.training.blockwise.schema import FREE_TO_CHANGE, BlockwiseTraining
from vllm_spec_ext.training.command_line import run_trainer
from vllm_spec_ext.training.earlier_result import check_earlier_result
from vllm_spec_ext.training.hub import push_to_hub
from vllm_spec_ext.training.provenance import NAME as RECORD_NAME
from vllm_spec_ext.training.provenance import recorded_settings
from vllm_spec_ext.training.stages import check_finished, prepare, train
from vllm_spec_ext.training.target import load_tokenizer

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
    if config.writes_result:  # now, and not after hours of training
        check_replaceable(config.out)
        if config.finetune:
            _check_tuned_model(config)
    check_finished(config, CONFIG_NAME, "finished heads")
    task = prepare(
        config, lambda target, data, states: HeadsTask(config, target, data, states), report
    )
    if task is None:
        return None
    if config.stage == "eval":
        return _eval_stage(config, task, report)
    train(config, task, report, FREE_TO_CHANGE)
    return _save(config, task, report)


def _check_tuned_model(config: BlockwiseTraining) -> None:
    """Raise SpecExtError where the trained target would take the place of something else."""
    final = config.tuned_model
    folders = {"--model": Path(config.model), "--out": config.out, "--data": config.data_folder}
    for option, folder in folders.items():
        if folder.resolve().is_relative_to(final.resolve()):
            raise SpecExtError(
                f"{option} {folder} lies where --finetune leaves the trained target ({final}), "
                "which is replaced as a whole; give another --run-dir"
            )
    check_earlier_result(
        config.run_folder,
        RECORD_NAME,
        "target",
        is_own=lambda record: any(one.get("finetune") for one in recorded_settings(record)),
        files=(final.name,),
        option="--run-dir",
    )


def _save(config: BlockwiseTraining, task: HeadsTask, report: Report) -> HeadFigures:
    shape = task.heads_config
    figures = task.measure(config.tree_nodes)
    write_json(config.run_folder / "figures.json", figures.as_dict())
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
        replace_folder(partial, final)
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
    return run_trainer(
        BlockwiseTraining,
        train_blockwise,
        arguments,
        "python -m vllm_spec_ext.training.blockwise",
        "Train heads for blockwise parallel decoding.",
    )
