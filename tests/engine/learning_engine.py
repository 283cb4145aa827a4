# SPDX-License-Identifier: Apache-2.0
"""Engines that learn while they serve, each on a folder of its own."""

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from generation import count_preempted, run, sampling_params, tokens
from safetensors.torch import load, save
from scenarios import PROMPTS, SCENARIOS
from test_cache_view_engine import CROWDED
from test_greedy_identity import runner_of

from vllm_spec_ext.online.folder import SAMPLES, FolderFacts, read_record
from vllm_spec_ext.online.sample_files import read_shard, shards
from vllm_spec_ext.online.session import _Ready
from vllm_spec_ext.online.trace import Trace
from vllm_spec_ext.online.trainer import run_trainer
from vllm_spec_ext.online.versions import version_folder, write_version

ALL = {"record": "all", "others": 1.0, "budget": 0.0, "guard": 0.0, "likeliest": 8}
# Few samples of a toy, which is to be learned by heart.
UNTIL_LEARNED = {"learning_rate": 3e-3, "batch_size": 32, "passes": 1000}
FEW_BLOCKS = {"num_gpu_blocks_override": 16}


def no_weight(_name: str) -> bool:
    """All may change."""
    return False


class Served:
    """An engine, its folder, and what it left there."""

    def __init__(self, engine: Any, folder: Path, stays: Callable[[str], bool] = no_weight) -> None:
        """Take an engine.

        Args:
            engine: An ``LLM`` with ``online``.
            folder: That it names.
            stays: Whether a version must have the weight of this name as it was.
        """
        self.engine, self.folder, self._stays = engine, folder, stays
        self.drafter = runner_of(engine).drafter

    @property
    def session(self) -> Any:
        return self.drafter.online

    def until(self, is_so: Callable[[], bool], seconds: float = 30.0) -> None:
        """Wait for the thread of the session, which looks four times a second."""
        end = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < end
            time.sleep(0.05)

    def traces(self) -> list[Trace]:
        """All that was recorded; nothing is recorded afterwards."""
        self.drafter.close()
        return [trace for path in shards(self.folder / SAMPLES) for trace in read_shard(path)]

    def files(self) -> dict[str, bytes]:
        """Of version 0."""
        folder = version_folder(self.folder, 0)
        names = json.loads((folder / "version.json").read_text())["sha256"]
        return {name: (folder / name).read_bytes() for name in names}

    def noise(self, seed: int) -> dict[str, bytes]:
        """Other weights wherever a version may have some."""
        random = torch.Generator().manual_seed(seed)

        def shaken(name: str, value: torch.Tensor) -> torch.Tensor:
            if self._stays(name) or not value.is_floating_point():
                return value
            return value + 0.3 * torch.randn(value.shape, generator=random).to(value.dtype)

        def changed(data: bytes) -> bytes:
            return save({name: shaken(name, value) for name, value in load(data).items()})

        return {
            name: changed(data) if name.endswith(".safetensors") else data
            for name, data in self.files().items()
        }

    def publish(
        self,
        number: int,
        files: Mapping[str, bytes] | None = None,
        drafter: str | None = None,
        damaged: str | None = None,
    ) -> None:
        """A version of these files, or of noise.

        Args:
            number: Of the version.
            files: Content by name.
            drafter: That it descends from, if that is another.
            damaged: File whose last bytes are not what was written.
        """
        known = read_record(self.folder, FolderFacts)
        assert known is not None
        files = files or self.noise(number)
        # Aside, as the session looks for versions at any time.
        folder = write_version(self.folder / "aside", number, files, drafter or known.drafter)
        if damaged is not None:
            (folder / damaged).write_bytes(files[damaged][:-4] + b"abcd")
        folder.rename(version_folder(self.folder, number))

    def weights(self, files: Mapping[str, bytes]) -> Any:
        """As the engine reads them; they are not published, so the session tries nothing."""
        with tempfile.TemporaryDirectory() as folder:
            write_files(Path(folder), files)
            return self.drafter._proposer.read_weights(Path(folder))

    def stop_recording(self) -> None:
        """What was recorded is on disk."""
        self.session._writer.close()
        self.session._writer = None
        self.session.tap = None


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """As a version has them."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


Serve = Callable[..., Served]


@contextlib.contextmanager
def served_engines(
    make_engine: Any, folder: Path, stays: Callable[[str], bool] = no_weight
) -> Iterator[Serve]:
    """Starts engines that learn; their sessions end with the test, the engines with the module.

    Args:
        make_engine: Of an engine's arguments.
        folder: Of the test.
        stays: As of :class:`Served`.

    Yields:
        ``start(config, arguments, **online)``: of the method, of the engine, and options.
    """
    made: list[Served] = []

    def start(
        config: Mapping[str, Any], arguments: Mapping[str, Any] | None = None, **online: Any
    ) -> Served:
        own = folder / f"online{len(made)}"
        options = {"folder": str(own), **ALL, **online}
        given = {**config, "adaptive_length": False, "online": options}
        engine = make_engine(speculative_config=given, **(arguments or {}))
        made.append(Served(engine, own, stays))
        return made[-1]

    yield start
    for served in made:
        served.drafter.close()


def exchange_in_every_step(
    served: Served, weights: Mapping[int, Any], patch: pytest.MonkeyPatch
) -> list[int]:
    """Other weights in every step.

    Args:
        served: The engine.
        weights: By version.
        patch: Ends it.

    Returns:
        Versions, one for each step that was done.
    """
    session, numbers, used = served.session, sorted(weights), list[int]()
    begin = session.begin_step

    def exchanged() -> None:
        number = numbers[len(used) % len(numbers)]
        session._ready = _Ready(number, weights[number], "a test")
        begin()
        assert session._using == number
        used.append(number)

    patch.setattr(session, "begin_step", exchanged)
    return used


def check_same_tokens_across_exchanges(
    serve: Callable[[Mapping[str, Any]], Served],
    make_engine: Any,
    is_crowded: bool,
    patch: pytest.MonkeyPatch,
    num_versions: int = 3,
) -> None:
    """In every step another version of noise, while requests come, go and are preempted.

    Args:
        serve: An engine of these arguments.
        make_engine: One that does not draft.
        is_crowded: Whether the KV of all requests does not fit.
        patch: Ends it.
        num_versions: That take turns.
    """
    scenario = CROWDED if is_crowded else SCENARIOS["mixed_lengths"]
    expected = tokens(run(make_engine(), scenario))
    served = serve(FEW_BLOCKS if is_crowded else {})
    weights = {n: served.weights(served.noise(n)) for n in range(1, num_versions + 1)}
    used = exchange_in_every_step(served, weights, patch)
    preempted = count_preempted(served.engine, patch)
    assert tokens(run(served.engine, scenario)) == expected
    assert len(used) > 50
    assert bool(preempted) == is_crowded


class Asked:
    """Some prompts that an engine is asked again and again; its answers do not change."""

    def __init__(self, engine: Any, make_engine: Any, prompts: Sequence[str] = PROMPTS) -> None:
        """Ask an engine that does not draft.

        Args:
            engine: That learns.
            make_engine: One that does not.
            prompts: What is asked.
        """
        self._engine, self._prompts = engine, prompts
        self._expected = self._answers(make_engine())

    def once(self) -> None:
        """Compare the answers with plain decoding's."""
        assert self._answers(self._engine) == self._expected

    def until(self, is_so: Callable[[], bool], most: int = 20) -> None:
        """Ask so many times at most."""
        for _ in range(most):
            self.once()
            if is_so():
                return
        raise AssertionError("it did not happen")

    def _answers(self, engine: Any) -> list[list[list[int]]]:
        params = sampling_params({"max_tokens": 40})
        return tokens(engine.generate(self._prompts, params, use_tqdm=False))


def learn(served: Served, asked: Asked, max_steps: int) -> None:
    """Record, train and try a version; there is a verdict on it then.

    Args:
        served: The engine; its option ``publish_steps`` is `max_steps`.
        asked: What it learns.
        max_steps: Of training.
    """
    for _ in range(3):
        asked.once()
    served.stop_recording()
    run_trainer(served.folder, budget=8.0, max_steps=max_steps)
    served.until(lambda: served.session._ready is not None)
    asked.until(lambda: bool(served.session.state.verdicts))
