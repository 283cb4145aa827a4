# SPDX-License-Identifier: Apache-2.0
"""The trainer's process: learns from the samples of a folder, and publishes versions in it.

It shares nothing with the engine but the folder. It may be killed at any time, and goes on where it
last published; a full disk costs a version, not the run.
"""

import argparse
import contextlib
import copy
import io
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_spec_ext.atomic import DiskFullError, not_readable, remove_partials, write_bytes
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.online.cpu_budget import CpuBudget
from vllm_spec_ext.online.folder import (
    SAMPLES,
    TRAINER,
    TRAINER_LOCK,
    TRAINER_STATE,
    EngineState,
    FolderFacts,
    TrainerState,
    read_record,
    write_record,
)
from vllm_spec_ext.online.folder_lock import FolderLock
from vllm_spec_ext.online.sample_pool import SamplePool
from vllm_spec_ext.online.student import Judged, Student, make_student
from vllm_spec_ext.online.versions import (
    VERSIONS,
    check_version,
    prune_versions,
    version_numbers,
    write_version,
)
from vllm_spec_ext.training.target import pick_device

logger = logging.getLogger("vllm.spec_ext")

_CLIP = 1.0
# AdamW's first steps move every weight by the learning rate, whatever its gradient; trained heads
# lose more by one such step than they learn in a hundred.
_WARMUP_STEPS = 50
# A version is the running mean of the weights over about so many steps. Small batches at a constant
# rate shake weights about, and what a version gains by the last batch it loses by the others.
_AVERAGED_STEPS = 100
_KEPT_VERSIONS = 16
_POLL_S = 1.0
_TELL_S = 2.0


class Trainer:
    """Of one folder; :meth:`advance` is a turn of its loop."""

    _last: dict[str, Tensor]  # weights of the last version
    _average: dict[str, Tensor]  # running mean of the weights, which the next one will have

    def __init__(self, root: Path, student: Student, facts: FolderFacts) -> None:
        """Go on from the saved state, or from the version that is served.

        Args:
            root: The folder.
            student: Of its method.
            facts: Of the folder.

        Raises:
            SpecExtError: A damaged state, or no whole version.
        """
        self.root, self.student, self.facts = root, student, facts
        self.options = facts.options
        self.pool = SamplePool(
            root / SAMPLES, student.columns, student.row_positions, likeliest=self.options.likeliest
        )
        self.steps = 0
        self.published = 0
        self._seen_serving = self._engine().serving
        self._positions_trained = 0.0  # of those that are still there
        self._figures: dict[str, float] = {}
        self._load_version(self._seen_serving)
        position, num_positions = self._restore()
        self.pool.refresh()
        left = self.pool.num_positions_to(position)
        self._positions_trained *= left / num_positions if num_positions else 0.0

    def advance(self) -> str:
        """Train a step if there is something to learn, and publish when it is time.

        Returns:
            Why it did not train; empty if it did. Nothing changes then, the optimiser's state
            included.
        """
        engine = self._engine()
        if engine.serving < self._seen_serving:
            # What was learned since was worse: do not go on from there.
            self._load_version(engine.serving)
        self._seen_serving = engine.serving
        if engine.frozen:
            return "it is frozen"
        before = self.pool.num_positions
        if gone := self.pool.refresh():  # they do not stand for what comes
            self._positions_trained *= (before - gone) / before
        if not self.pool.num_positions:
            return "there are no samples"
        if self._positions_trained >= self.options.passes * self.pool.num_positions:
            return "there are no new samples"
        random = np.random.default_rng([self.options.seed, self.steps])
        batch = self.pool.batch(self.options.batch_size, self.options.replay, random)
        judged = self.student.judge(batch)
        num_rows = len(next(iter(batch.values())))
        self._positions_trained += num_rows * self.student.row_positions
        if not judged.num_drafted:
            return "the samples teach nothing yet"
        self._learn(judged)
        self.steps += 1
        if self.steps % self.options.publish_steps == 0:
            self.publish()
        return ""

    def publish(self) -> int | None:
        """Make a version if these weights are better than the last on requests kept apart.

        Returns:
            Its number; None if there is none, for want of progress or of disk space.
        """
        better = self._is_better()
        number = None
        try:
            if better:
                taken = version_numbers(self.root)
                number = max([*taken, self.published]) + 1
                training = {"steps": self.steps, "position": self.pool.position, **self._figures}
                drafter = self.facts.drafter
                with self._in_place(self._average):
                    files = self.student.files()
                write_version(self.root, number, files, drafter, training)
                self.published = number
                self._last = copy.deepcopy(self._average)
                engine = self._engine()
                keep = {0, number, engine.serving, engine.trying, *engine.served}
                prune_versions(self.root, keep, _KEPT_VERSIONS)
            self.save()
        except DiskFullError as error:
            logger.warning("vllm-spec-ext: %s", error)
        return number

    def save(self) -> None:
        """What the next process needs to go on; raises as ``atomic_file``."""
        buffer = io.BytesIO()
        values = {
            "drafter": self.facts.drafter,
            "weights": self._weights(),
            "average": self._average,
            "optimizer": self._optimizer.state_dict(),
            "optimizer_steps": self._optimizer_steps,
            "last": self._last,
            "steps": self.steps,
            "published": self.published,
            "positions_trained": self._positions_trained,
            "position": self.pool.position,
            "num_positions": self.pool.num_positions,
            "serving": self._seen_serving,
        }
        torch.save(values, buffer)
        write_bytes(self.root / TRAINER_STATE, buffer.getbuffer())

    @property
    def figures(self) -> dict[str, float]:
        """``loss`` of training, smoothed; ``held_out`` and ``overlap`` of the last look."""
        return dict(self._figures)

    def _engine(self) -> EngineState:
        return read_record(self.root, EngineState) or EngineState()

    def _load_version(self, number: int) -> None:
        self.student.load(check_version(self.root, number, self.facts.drafter))
        weights = [value for value in self.student.module.parameters() if value.requires_grad]
        rate = self.options.learning_rate
        self._optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
        self._optimizer_steps = 0
        self._last, self._average = self._weights(), self._weights()

    def _restore(self) -> tuple[int, int]:
        """Go on from the saved state.

        Returns:
            The newest shard that it knew, and how many positions there were; 0 without a state, and
            in those of earlier versions.
        """
        path = self.root / TRAINER_STATE
        if not path.is_file():
            return 0, 0
        try:
            saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            if saved["drafter"] != self.facts.drafter:
                raise SpecExtError(f"{path} is of another drafter; delete it")
            if self._seen_serving < saved["serving"]:
                return 0, 0  # rolled back while no trainer ran
            self._put(saved["weights"])
            self._average = self._beside_weights(saved["average"])
            self._last = self._beside_weights(saved["last"])
            self._optimizer.load_state_dict(saved["optimizer"])
            self._optimizer_steps = saved["optimizer_steps"]
            self.steps, self.published = saved["steps"], saved["published"]
            self._positions_trained = saved["positions_trained"]
            return int(saved.get("position", 0)), int(saved.get("num_positions", 0))
        except SpecExtError:
            raise
        except OSError as error:
            raise SpecExtError(f"{path} {not_readable(error)}") from error
        except Exception as error:  # torch raises many types for a damaged file
            raise SpecExtError(f"{path} is damaged ({error}); delete it") from error

    def _learn(self, judged: Judged) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        judged.loss.backward()
        weights = [value for group in self._optimizer.param_groups for value in group["params"]]
        norm = float(torch.nn.utils.clip_grad_norm_(weights, _CLIP))
        loss = float(judged.loss.detach())
        if not math.isfinite(norm + loss):
            raise SpecExtError(
                f"the training diverged at step {self.steps + 1} (loss {loss:.3g}); nothing of it "
                "was published. Lower online.learning_rate"
            )
        self._optimizer_steps += 1
        for group in self._optimizer.param_groups:
            rise = min(1.0, self._optimizer_steps / _WARMUP_STEPS)
            group["lr"] = self.options.learning_rate * rise
        self._optimizer.step()
        # Short at first, so that the weights of the start do not stay in it for long.
        past = min(1.0 - 1.0 / _AVERAGED_STEPS, self._optimizer_steps / (9 + self._optimizer_steps))
        for name, value in self._trained():
            self._average[name].lerp_(value.detach(), 1.0 - past)
        former = self._figures.get("loss", loss)
        self._figures["loss"] = 0.95 * former + 0.05 * loss

    def _is_better(self) -> bool:
        """Whether requests kept apart are foreseen better than by the last version."""
        apart = self.pool.held_out()
        if not apart:
            return True
        with self._in_place(self._average):
            own = self.student.judge(apart)
        with self._in_place(self._last):
            former = self.student.judge(apart)
        if not own.num_drafted:
            return True
        self._figures["held_out"] = float(own.loss)
        self._figures["overlap"] = float(own.overlap)
        return float(own.loss) < float(former.loss)

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        return (
            (name, value)
            for name, value in self.student.module.named_parameters()
            if value.requires_grad
        )

    def _weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self._trained()}

    def _beside_weights(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On the devices of the weights that they belong to."""
        return {name: kept[name].to(value.device) for name, value in self._trained()}

    def _put(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in self._trained():
                value.copy_(weights[name])

    @contextlib.contextmanager
    def _in_place(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """These instead of the weights that are trained, without gradients or dropout."""
        now = self._weights()
        self._put(weights)
        self.student.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._put(now)
            self.student.module.train()


def run_trainer(
    root: Path,
    *,
    budget: float | None = None,
    device: str | None = None,
    max_steps: int | None = None,
    parent: int | None = None,
    own_process: bool = False,
) -> None:
    """Train until it is stopped (SIGTERM, Ctrl-C), or for some steps.

    Args:
        root: The folder, which an engine has made.
        budget: Cores on average; None = as the engine's options say.
        device: As ``budget``.
        max_steps: Training steps of this run; None = no end.
        parent: Process that started this one, with which it ends; None = it stays. It is named,
            as it may be gone before this one has imported what it needs.
        own_process: Nothing else runs in this one: take the lowest priority and few threads.

    Raises:
        SpecExtError: No such folder, a damaged one, or one on which a trainer works.
    """
    facts = read_record(root, FolderFacts)
    if facts is None:
        raise SpecExtError(
            f"no online.json in {root}; expected the folder of a server that runs with "
            '{"online": {"folder": ...}}, which makes it when it starts'
        )
    share = facts.options.budget if budget is None else budget
    where = pick_device(device or facts.options.device)
    if own_process:
        with contextlib.suppress(OSError):
            os.nice(19)
        torch.set_num_threads(max(1, math.ceil(share)))
    stop = threading.Event()
    with _stopped_by_signals(stop), _only_one(root, stop, parent) as is_alone:
        if not is_alone:
            return
        for name in (f"{VERSIONS}/*", TRAINER_STATE, TRAINER):
            remove_partials(root, name)
        _tell_of_start(root)
        trainer = Trainer(root, make_student(facts, where), facts)
        told, started, last_steps = 0.0, time.time(), trainer.steps
        pace = CpuBudget(share) if share > 0 else None
        used = time.process_time
        while not stop.is_set() and parent in (None, os.getppid()):
            why = ""
            if pace is None:
                why = "its budget is 0"
            elif owed := pace.owed():  # for a long step; the end of the engine is seen meanwhile
                stop.wait(min(owed, _POLL_S))
            else:
                why = trainer.advance()
            if time.time() - told >= _TELL_S:
                told = time.time()
                _tell(root, trainer, started, used() / max(1e-9, told - started), why)
            if max_steps is not None and trainer.steps - last_steps >= max_steps:
                break
            if why or pace is None:
                stop.wait(_POLL_S)
                if pace is not None:
                    pace.forgive()
        with contextlib.suppress(DiskFullError):
            trainer.save()


def _tell_of_start(root: Path) -> None:
    """Loading a target may take minutes."""
    now = time.time()
    with contextlib.suppress(DiskFullError):
        write_record(
            root,
            TrainerState(pid=os.getpid(), started=now, alive_at=now, waits_for="it is starting"),
        )


def _tell(root: Path, trainer: Trainer, started: float, core_share: float, why: str) -> None:
    figures = trainer.figures
    with contextlib.suppress(DiskFullError):
        write_record(
            root,
            TrainerState(
                pid=os.getpid(),
                started=started,
                alive_at=time.time(),
                steps=trainer.steps,
                published=trainer.published,
                position=trainer.pool.position,
                loss=figures.get("loss"),
                held_out=figures.get("held_out"),
                overlap=figures.get("overlap"),
                core_share=core_share,
                waits_for=why,
            ),
        )


@contextlib.contextmanager
def _only_one(root: Path, stop: threading.Event, parent: int | None) -> Iterator[bool]:
    """Whether this one may work on a folder; False = it is to end.

    One that an engine has started waits for that of a server which is about to end.
    """
    lock = FolderLock(root / TRAINER_LOCK)
    while not lock.take():
        if parent is None:
            raise SpecExtError(f"another trainer works on {root}; only one may")
        if stop.wait(_POLL_S) or parent != os.getppid():
            yield False
            return
    try:
        yield True
    finally:
        lock.release()


@contextlib.contextmanager
def _stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in former:
        signal.signal(number, lambda *_: stop.set())
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def main() -> int:
    """``python -m vllm_spec_ext.online.trainer FOLDER``: as the engine starts it."""
    parser = argparse.ArgumentParser(description="Train the drafter of an online folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parent", type=int, help="Process to end with.")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        run_trainer(given.folder, parent=given.parent, own_process=True)
    except SpecExtError as error:
        print(f"vllm-spec-ext: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
