# SPDX-License-Identifier: Apache-2.0
"""The training loop that all trainers share: schedule, logging, saved states, clean stops."""

import io
import json
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from vllm_spec_ext.atomic import DiskFullError, not_readable, write_bytes
from vllm_spec_ext.errors import SpecExtError

STATE_NAME = "state.pt"
LOG_NAME = "log.jsonl"
BOARDS_NAME = "tensorboard"


class Task(Protocol):
    """What is trained. Step n must not depend on anything but the modules and n."""

    modules: dict[str, nn.Module]  # everything with trained weights
    optimizer: torch.optim.Optimizer  # each group carries its peak rate as "peak_lr"

    def train_step(self, step: int) -> dict[str, float]:
        """Forward and backward of one batch; the loop clips and steps."""

    def evaluate(self) -> dict[str, float]:
        """Figures on held-out data."""


@dataclass(frozen=True)
class LoopSettings:
    """How long, and how often what."""

    total_steps: int
    warmup_steps: int
    clip: float
    save_every: int
    eval_every: int
    log_every: int


def learning_rate_factor(step: int, settings: LoopSettings) -> float:
    """Linear rise over the warm-up, then a cosine to zero at the last step."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    rest = max(1, settings.total_steps - settings.warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * (step - settings.warmup_steps) / rest))


def run_loop(
    task: Task,
    settings: LoopSettings,
    folder: Path,
    identity: dict[str, Any],
    *,
    step: int = 0,
    report: Callable[[str], None] = print,
) -> None:
    """Train to the last step.

    Ctrl-C and SIGTERM let the running step finish, save, and raise KeyboardInterrupt.

    Args:
        task: What to train.
        settings: How long, and how often what.
        folder: Run folder, for the state and the log.
        identity: Settings and data of the run, saved with its state.
        step: Steps that are done already, as :func:`restore` returned.
        report: Receives progress lines.

    Raises:
        SpecExtError: The training diverged; the last saved state stands.
        DiskFullError: The state could not be saved; the one before is still whole.
    """
    if step:
        report(f"resumed at step {step} of {settings.total_steps} ({folder / STATE_NAME})")
    _forget_behind(folder, step)
    boards = _Boards(folder, step, report)
    began, first = time.monotonic(), step
    finished_step = True
    with _stop_requested() as stop:
        try:
            while step < settings.total_steps:
                finished_step = False
                figures = _one_step(task, settings, step)
                step += 1
                finished_step = True
                if step % settings.eval_every == 0 and step < settings.total_steps:
                    figures |= task.evaluate()
                    _log(folder, boards, step, figures)
                    report(
                        progress_line(
                            step, settings.total_steps, figures, time.monotonic() - began, first
                        )
                    )
                elif step % settings.log_every == 0 or step == settings.total_steps:
                    _log(folder, boards, step, figures)
                    report(
                        progress_line(
                            step, settings.total_steps, figures, time.monotonic() - began, first
                        )
                    )
                if step % settings.save_every == 0 or step == settings.total_steps:
                    save_state(task, folder, identity, step)
                if stop.is_set():
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            # In the middle of a step the weights are half updated: the last saved state stands.
            if finished_step:
                save_state(task, folder, identity, step)
                report(f"stopped; step {step} is saved; --resume auto, the default, goes on there")
            raise
        finally:
            boards.close()


def _one_step(task: Task, settings: LoopSettings, step: int) -> dict[str, float]:
    factor = learning_rate_factor(step, settings)
    for group in task.optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
    task.optimizer.zero_grad(set_to_none=True)
    figures = task.train_step(step)
    weights = [p for group in task.optimizer.param_groups for p in group["params"]]
    norm = float(nn.utils.clip_grad_norm_(weights, settings.clip))
    if not all(map(math.isfinite, (norm, *figures.values()))):
        shown = "  ".join(f"{name} {value:.3g}" for name, value in figures.items())
        raise SpecExtError(
            f"the training diverged at step {step + 1}: gradient norm {norm:.3g}, {shown}; "
            "expected finite numbers. Nothing more is saved; lower --learning-rate (now "
            f"{task.optimizer.param_groups[0]['peak_lr']:g}) and start over with --resume restart"
        )
    task.optimizer.step()
    return figures


def save_state(task: Task, folder: Path, identity: dict[str, Any], step: int) -> None:
    """Write everything that step ``step`` needs, replacing the former state at once."""
    buffer = io.BytesIO()
    torch.save(
        {
            "step": step,
            "identity": json.dumps(identity, sort_keys=True),
            "modules": {name: module.state_dict() for name, module in task.modules.items()},
            "optimizer": task.optimizer.state_dict(),
        },
        buffer,
    )
    write_bytes(folder / STATE_NAME, buffer.getvalue())


def check_resume(folder: Path, resume: str) -> None:
    """Raise SpecExtError if a state is required and there is none."""
    path = folder / STATE_NAME
    if resume == "require" and not path.exists():
        raise SpecExtError(f"--resume require, but there is no {path}; drop the flag to start")


def restore(task: Task, folder: Path, identity: dict[str, Any], resume: str) -> int:
    """Load the folder's state into the task; the number of steps done, 0 without a state.

    Raises:
        SpecExtError: No state though one is required, a damaged one, or one of another run.
    """
    path = folder / STATE_NAME
    check_resume(folder, resume)
    if resume == "restart":  # a run that ends before it saves must not go on from this one's
        path.unlink(missing_ok=True)
        _set_aside(folder)
    if not path.exists():
        return 0
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        saved, step = json.loads(state["identity"]), int(state["step"])
    except OSError as error:
        raise SpecExtError(f"{path} {not_readable(error)}") from error
    except Exception as error:  # torch raises many kinds for a damaged archive
        raise SpecExtError(
            f"{path} cannot be read ({type(error).__name__}: {error}); start over with "
            "--resume restart"
        ) from error
    wanted = json.loads(json.dumps(identity, sort_keys=True))
    saved.setdefault("split", "shuffled")  # by the versions before
    # Names that the version which wrote the state did not know yet are not compared.
    differing = sorted(n for n in saved if saved[n] != wanted.get(n))
    if differing:
        parts = "; ".join(
            f"{n}: {saved.get(n)!r} there, {wanted.get(n)!r} asked" for n in differing
        )
        raise SpecExtError(
            f"{path} belongs to a run with other settings ({parts}); use another --out or "
            "--run-dir, the same settings, or --resume restart"
        )
    try:
        for name, module in task.modules.items():
            module.load_state_dict(state["modules"][name])
        task.optimizer.load_state_dict(state["optimizer"])
    except (KeyError, RuntimeError, ValueError) as error:
        raise SpecExtError(
            f"{path} is of another version of this package or of other shapes ({error}); start "
            "over with --resume restart"
        ) from error
    return step


def progress_line(
    step: int, total: int, figures: Mapping[str, float], seconds: float, first: int
) -> str:
    """``step 40/2000  loss 3.21  ...  12 min left``."""
    left = seconds / max(1, step - first) * (total - step)
    shown = "  ".join(f"{name} {value:.3f}" for name, value in figures.items())
    return f"step {step}/{total}  {shown}  {duration(left)} left"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _log(folder: Path, boards: "_Boards", step: int, figures: Mapping[str, float]) -> None:
    line = json.dumps({"step": step, **{n: round(v, 6) for n, v in figures.items()}})
    try:
        with open(folder / LOG_NAME, "a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError:
        pass  # a lost log line is no reason to stop; the state's own write reports a full disk
    boards.add(step, figures)


def _forget_behind(folder: Path, step: int) -> None:
    """Figures of steps that no state was saved of, and that are made again."""
    path = folder / LOG_NAME
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    kept = [line for line in lines if _step_of(line) <= step]
    if len(kept) < len(lines):
        with suppress(OSError, DiskFullError):  # as in _log
            write_bytes(path, "".join(line + "\n" for line in kept).encode())


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError):  # it was being written when the machine stopped
        return math.inf


def _set_aside(folder: Path) -> None:
    """The figures of a run that was given up, which are not this one's."""
    for name in (LOG_NAME, BOARDS_NAME):
        former = folder / f"former.{name}"
        if (folder / name).exists():
            shutil.rmtree(former, ignore_errors=True)
            former.unlink(missing_ok=True)
            (folder / name).rename(former)


class _Boards:
    """Tensorboard, where it is installed, until its files cannot be written any more."""

    def __init__(self, folder: Path, step: int, report: Callable[[str], None]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._report = report
        self._writer: Any = None
        with self._dropped_on_error():
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                return
            self._writer = SummaryWriter(str(folder / BOARDS_NAME), purge_step=step + 1)

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        with self._dropped_on_error():
            for name, value in figures.items() if self._writer is not None else ():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        with self._dropped_on_error():
            if self._writer is not None:
                self._writer.close()

    @contextmanager
    def _dropped_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._writer = None
            self._report(f"tensorboard: no more figures ({error}); the training goes on")


@contextmanager
def _stop_requested() -> Iterator[threading.Event]:
    """An event that Ctrl-C or SIGTERM sets; a second one acts at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handler(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    former = {name: signal.signal(name, handler) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for name, old in former.items():
            signal.signal(name, old)
