# SPDX-License-Identifier: Apache-2.0
"""Training a draft model: the shared stages, then measuring and saving."""

from collections.abc import Callable, Sequence

from vllm_spec_ext.atomic import write_json
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.training.command_line import run_trainer
from vllm_spec_ext.training.draft.boosting import check_earlier
from vllm_spec_ext.training.draft.checkpoint import FACTS_NAME, check_replaceable, save_draft
from vllm_spec_ext.training.draft.cut_tokenizer import check_can_be_cut
from vllm_spec_ext.training.draft.draft_task import DraftModelTask
from vllm_spec_ext.training.draft.evaluate import DraftFigures
from vllm_spec_ext.training.draft.schema import FREE_TO_CHANGE, DraftTraining
from vllm_spec_ext.training.hub import push_to_hub
from vllm_spec_ext.training.stages import check_finished, prepare, train
from vllm_spec_ext.training.target import load_target, load_tokenizer

Report = Callable[[str], None]


def train_draft(config: DraftTraining, report: Report = print) -> DraftFigures | None:
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
    check_finished(config, FACTS_NAME, "a finished draft")
    check_earlier(config.boost_on)
    if config.vocab is not None and config.stage in ("all", "train"):
        check_can_be_cut(load_tokenizer(config.model), config.vocab)
    task = prepare(
        config, lambda target, data, states: DraftModelTask(config, target, data, states), report
    )
    if task is None:
        return None
    if config.stage == "eval":
        return _eval_stage(config, task, report)
    report(task.coverage_line)
    train(config, task, report, FREE_TO_CHANGE)
    return _save(config, task, report)


def _save(config: DraftTraining, task: DraftModelTask, report: Report) -> DraftFigures:
    figures = task.measure()
    write_json(config.run_folder / "figures.json", figures.as_dict())
    try:
        tokenizer = load_tokenizer(config.model)
    except SpecExtError as error:
        if config.vocab is not None:
            raise
        report(f"warning: the folder gets no tokenizer: {error}")
        tokenizer = None
    model = task.draft.model.eval()
    facts = task.facts()
    size = save_draft(config.out, model, tokenizer, config.vocab, config.save_dtype, facts, figures)
    report(
        f"saved {config.out} ({size / 1e6:.1f} MB): {figures.acceptance_length:.3f} tokens per "
        f"step with a chain of {figures.chain}; {figures.accuracy['top1']:.1%} of greedy guesses "
        "are right"
    )
    if figures.merged:
        report(
            f"merged with {len(task.earlier)} earlier: some model is right at "
            f"{figures.merged['coverage']:.1%} of the positions "
            f"({figures.merged['earlier_coverage']:.1%} without this one)"
        )
    if config.push_to_hub:
        report(f"uploaded: {push_to_hub(config.out, config.push_to_hub)}")
    return figures


def _eval_stage(config: DraftTraining, task: DraftModelTask, report: Report) -> DraftFigures:
    dtype = next(task.target.model.parameters()).dtype
    task.draft = load_target(str(config.out), task.target.device, dtype)
    figures = task.measure()
    for name, value in figures.as_dict().items():
        report(f"{name}: {value}")
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line without any framework, for machines that have torch and transformers only."""
    return run_trainer(
        DraftTraining,
        train_draft,
        arguments,
        "python -m vllm_spec_ext.training.draft",
        "Cut a draft model from a target and distil it.",
    )
