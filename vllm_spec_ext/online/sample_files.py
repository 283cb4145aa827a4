# SPDX-License-Identifier: Apache-2.0
"""Samples on disk: shards whose names hold their hash, written by a thread beside the engine."""

import hashlib
import logging
import queue
import random
import re
import threading
import time
from pathlib import Path

from vllm_spec_ext.atomic import write_bytes
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.online.trace import Trace, pack, unpack
from vllm_spec_ext.options import OnlineOptions

logger = logging.getLogger("vllm.spec_ext")

_SHARD_STARTS = 256
_FLUSH_SECONDS = 10.0
_DIGITS = 16
_NAME = re.compile(rf"(\d{{8,}})-[0-9a-f]{{{_DIGITS}}}\.safetensors")


def shards(folder: Path) -> list[Path]:
    """Shards of a folder of samples, oldest first; files of others are none, and stay."""
    return sorted(path for path in folder.glob("*.safetensors") if _NAME.fullmatch(path.name))


def number_of(shard: Path) -> int:
    """How many shards were written before it."""
    return int(shard.name.partition("-")[0])


def write_shard(folder: Path, number: int, traces: list[Trace]) -> Path:
    """Write traces at once; raises as :func:`~..atomic.atomic_file`."""
    from safetensors.torch import save

    data = save({name: value.contiguous() for name, value in pack(traces).items()})
    digest = hashlib.sha256(data).hexdigest()[:_DIGITS]
    path = folder / f"{number:08d}-{digest}.safetensors"
    write_bytes(path, data)
    return path


def read_shard(path: Path) -> list[Trace]:
    """The traces of a shard.

    Raises:
        SpecExtError: Not what was written.
        FileNotFoundError: It made room for newer ones.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()[:_DIGITS]
    expected = path.stem.partition("-")[2]
    if found != expected:
        raise SpecExtError(f"{path} is damaged (its hash is {found}); delete it")
    try:
        return unpack(load(data))
    except (SafetensorError, SpecExtError) as error:
        raise SpecExtError(f"{path} holds no samples ({error}); delete it") from error


def make_room(folder: Path, limit_bytes: int, draw: random.Random) -> None:
    """Delete shards of the older half at random until the rest fits.

    What stays of a stretch of text thins out as it ages, and never runs dry at once.
    """
    found = shards(folder)
    sizes = {path: path.stat().st_size for path in found}
    while len(found) > 1 and sum(sizes[path] for path in found) > limit_bytes:
        gone = found.pop(draw.randrange((len(found) + 1) // 2))
        gone.unlink(missing_ok=True)


class SampleWriter:
    """Takes traces from the engine's step and writes them from a thread of its own."""

    def __init__(self, folder: Path, options: OnlineOptions) -> None:
        """Go on behind the shards that are there.

        Args:
            folder: Of the samples; made if missing.
            options: Of their size on disk.
        """
        self._folder = folder
        self._limit_bytes = int(options.disk_mb * 2**20)
        self._draw = random.Random(options.seed)
        # None = the end; an event = write now, and say so.
        self._queue: queue.SimpleQueue[Trace | threading.Event | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending_bytes = 0
        self._is_failing = False
        self.num_starts = 0
        """Positions that were written."""
        self.num_lost = 0
        """Positions that could not be written."""
        self._thread = threading.Thread(target=self._run, name="spec-ext-samples", daemon=True)
        self._thread.start()

    @property
    def pending_bytes(self) -> int:
        """Of traces that are not on disk."""
        return self._pending_bytes

    def put(self, trace: Trace) -> None:
        """Take a trace; returns at once."""
        with self._lock:
            self._pending_bytes += trace.num_bytes
        self._queue.put(trace)

    def flush(self) -> None:
        """Write all that was put in; waits until that was tried."""
        if self._thread.is_alive():
            done = threading.Event()
            self._queue.put(done)
            done.wait(timeout=30.0)

    def close(self) -> None:
        """Write what is left."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout=30.0)

    def _run(self) -> None:
        waiting: list[Trace] = []
        since = time.monotonic()
        while True:
            try:
                came = self._queue.get(timeout=1.0)
                if not isinstance(came, Trace):
                    self._flush(waiting)
                    waiting = []
                    if came is None:
                        return
                    came.set()
                    continue
                if not waiting:
                    since = time.monotonic()
                waiting.append(came)
            except queue.Empty:
                pass
            enough = sum(len(trace.starts) for trace in waiting) >= _SHARD_STARTS
            if waiting and (enough or time.monotonic() - since >= _FLUSH_SECONDS):
                self._flush(waiting)
                waiting = []

    def _flush(self, traces: list[Trace]) -> None:
        if not traces:
            return
        count = sum(len(trace.starts) for trace in traces)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            found = shards(self._folder)
            number = max(map(number_of, found), default=0) + 1
            write_shard(self._folder, number, traces)
            make_room(self._folder, self._limit_bytes, self._draw)
            self.num_starts += count
            self._is_failing = False
        except (OSError, SpecExtError) as error:  # a full disk; serving goes on
            self.num_lost += count
            if not self._is_failing:
                logger.warning("vllm-spec-ext: samples are lost until this ends: %s", error)
            self._is_failing = True
        finally:
            with self._lock:
                self._pending_bytes -= sum(trace.num_bytes for trace in traces)
