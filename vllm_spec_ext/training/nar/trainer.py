# SPDX-License-Identifier: Apache-2.0
"""Training a block drafter: the shared stages, then measuring and saving."""

import json
from collections.abc import Callable, Sequence

import torch

from vllm_spec_ext.atomic import write_json
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.nar.guesses import check_heads
from vllm_spec_ext.proposers.nar.layout import CONFIG_NAME
from vllm_spec_ext.training.command_line import run_trainer
from vllm_spec_ext.training.draft_vocab import DraftProjection
from vllm_spec_ext.training.hub import push_to_hub
from vllm_spec_ext.training.nar.checkpoint import check_replaceable, finished, save_drafter
from vllm_spec_ext.training.nar.evaluate import NarFigures
from vllm_spec_ext.training.nar.further import read_drafter, with_shape_of
from vllm_spec_ext.training.nar.nar_task import NarTask, StateScales
from vllm_spec_ext.training.nar.schema import FREE_TO_CHANGE, NarTraining
from vllm_spec_ext.training.stages import check_finished, prepare, train

Report = Callable[[str], None]


def train_nar(config: NarTraining, report: Report = print) -> NarFigures | None:
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
    if config.writes_result:
        check_replaceable(config.out)  # now, and not after hours of training
    check_finished(config, CONFIG_NAME, "a finished drafter")
    if config.heads is not None:
        check_heads(config.heads)  # now, and not when the data is made
    trained = None
    if config.start_from is not None:
        trained = read_drafter(config.start_from)
        config = with_shape_of(config, trained)
    task = prepare(
        config, lambda target, data, states: NarTask(config, target, data, states, trained), report
    )
    if task is None:
        return None
    if config.stage == "eval":
        return _eval_stage(config, task, report)
    train(config, task, report, FREE_TO_CHANGE)
    return _save(config, task, report)


def _save(config: NarTraining, task: NarTask, report: Report) -> NarFigures:
    figures = task.measure(tuple(config.tree_nodes))
    facts = {}
    if config.copy_match:
        masks_alone = task.measure_on(
            task.data, task.states, task.split.held_out, show_copies=False
        )
        facts["without_copies"] = round(masks_alone.acceptance_length, 4)
    write_json(config.run_folder / "figures.json", {**figures.as_dict(), **facts})
    done = finished(task.drafter, task.scales.get_buffer("scales"))
    size = save_drafter(config.out, done, config.save_dtype, figures, facts)
    report(f"saved {config.out} ({size / 1e6:.2f} MB): {_lengths(config, figures)}")
    if config.push_to_hub:
        report(f"uploaded: {push_to_hub(config.out, config.push_to_hub)}")
    return figures


def _lengths(config: NarTraining, figures: NarFigures) -> str:
    chain = (
        f"{figures.acceptance_length:.3f} tokens per step with a chain of {config.slots} "
        f"({figures.without_selector:.3f} without the selector)"
    )
    trees = zip(figures.tree_nodes, figures.tree_acceptance_lengths, strict=True)
    return ", ".join([chain, *(f"{length:.3f} with trees of {n} nodes" for n, length in trees)])


def _eval_stage(config: NarTraining, task: NarTask, report: Report) -> NarFigures:
    drafter = read_drafter(config.out)
    shape, wanted = drafter.config, task.drafter.config
    for name in ("target_layer_ids", "hidden_size", "vocab_size", "num_state_units"):
        if getattr(shape, name) != getattr(wanted, name):
            raise SpecExtError(
                f"{config.out} has {name} {getattr(shape, name)}, and {config.shown_target} "
                f"{getattr(wanted, name)} with these settings; give the target and the "
                "--read-layers that the drafter was trained with"
            )
    task.drafter = drafter.to(task.target.device)
    task.scales = StateScales(shape.num_state_units).to(task.target.device)
    listed = drafter.extras.draft_vocab
    task.projection = DraftProjection(task.target, listed)
    with torch.inference_mode():
        figures = task.measure(tuple(config.tree_nodes))
    for name, value in figures.as_dict().items():
        report(f"{name}: {json.dumps(value)}")
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line without any framework, for machines that have torch and transformers only."""
    return run_trainer(
        NarTraining,
        train_nar,
        arguments,
        "python -m vllm_spec_ext.training.nar",
        "Train a block drafter.",
    )
