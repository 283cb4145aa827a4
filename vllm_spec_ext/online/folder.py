# SPDX-License-Identifier: Apache-2.0
"""What is in a folder of ``online``, and whether a folder is one.

Through small files engine, trainer and command line speak; each has one writer.

``online.json`` (engine, once): whose folder this is. ``engine.json`` (engine): what it serves and
what became of versions. ``control.json`` (command line): what a person wants. ``trainer.json``
(trainer): how it is doing.
"""

from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_spec_ext.atomic import PARTIAL, not_readable, write_json
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.online.versions import VERSIONS
from vllm_spec_ext.options import OnlineOptions


class _Record(BaseModel):
    # A newer writer may add facts that an older reader does not need.
    model_config = ConfigDict(frozen=True, extra="ignore")


class FolderFacts(_Record):
    """``online.json``."""

    method: str
    target: str
    """Name or folder of the target, from which the trainer reads what it needs."""
    drafter: str
    """Hash of version 0, see :func:`.versions.drafter_hash`."""
    vocab_size: int
    options: OnlineOptions
    """The engine's at its last start."""
    drafting: dict[str, int] = Field(default_factory=dict)
    """How the method drafts, as its student has to know; of the same start."""


class Verdict(_Record):
    """What became of a version."""

    version: int
    kept: bool
    reason: str
    before: float
    """Accepted draft tokens a request's step of the version in use."""
    after: float
    """Those of the version that was tried."""
    when: float
    """Seconds since the epoch."""


class EngineState(_Record):
    """``engine.json``."""

    serving: int = 0
    since: float = 0.0
    """When that version came into use, in seconds since the epoch."""
    trying: int | None = None
    frozen: bool = False
    obeyed: int = 0
    """Serial number of the last order of ``control.json`` that was carried out."""
    handled: int = 0
    """Newest version that was tried, or refused as damaged or foreign."""
    verdicts: tuple[Verdict, ...] = ()
    """Latest last."""
    served: tuple[int, ...] = ()
    """Versions that were served, ascending up to the one in use; the last few."""
    acceptance: float | None = None
    """Accepted draft tokens a request's step of the version in use, since it came into use."""
    acceptance_at_start: float | None = None
    """Those of the weights of the start, on their share of the same steps."""
    recorded: int = 0
    """Positions on disk since the engine started."""
    lost: int = 0
    """Positions that found no memory or no disk space."""


class Control(_Record):
    """``control.json``."""

    serial: int = 0
    frozen: bool = False
    """Serve what is served, try nothing new."""
    serve: int | None = None
    """Serve this version now; carried out once for each serial number."""


class TrainerState(_Record):
    """``trainer.json``."""

    pid: int
    started: float
    """Seconds since the epoch, as all times here."""
    alive_at: float
    steps: int = 0
    published: int = 0
    """Newest version that it made."""
    position: int = 0
    """Newest shard that it has read."""
    loss: float | None = None
    held_out: float | None = None
    """Mean divergence on requests that are not trained on."""
    overlap: float | None = None
    """Mean probability that a draft token drawn from the drafter would be accepted, there."""
    core_share: float = 0.0
    """Cores used on average since the start."""
    waits_for: str = Field(default="")
    """Why it does not train now; empty = it does."""


RecordT = TypeVar("RecordT", bound=_Record)
FACTS, STATE, TRAINER = "online.json", "engine.json", "trainer.json"
_NAMES: dict[type[_Record], str] = {
    FolderFacts: FACTS,
    EngineState: STATE,
    Control: "control.json",
    TrainerState: TRAINER,
}
SAMPLES = "samples"
TRAINER_STATE, TRAINER_LOG = "trainer.pt", "trainer.log"
ENGINE_LOCK, TRAINER_LOCK = "engine.lock", "trainer.lock"
_OWN = (
    *_NAMES.values(),
    SAMPLES,
    VERSIONS,
    TRAINER_STATE,
    TRAINER_LOG,
    ENGINE_LOCK,
    TRAINER_LOCK,
    f".*{PARTIAL}",
)
_EMPTY = ("lost+found", ".nfs*")
"""Of a file system's own; a new volume is empty."""
_NUM_NAMED = 3


def read_record(root: Path, kind: type[RecordT]) -> RecordT | None:
    """A file of a folder; None if it is not there.

    Raises:
        SpecExtError: It is damaged, or cannot be read.
    """
    path = root / _NAMES[kind]
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SpecExtError(f"{path} {not_readable(error)}") from error
    except ValidationError as error:
        raise SpecExtError(
            f"{path} is damaged, or another program's ({error}); give another folder, or delete it"
        ) from error


def write_record(root: Path, record: _Record) -> None:
    """Replace a file of a folder at once; raises as ``atomic_file``."""
    values: dict[str, Any] = record.model_dump(mode="json")
    write_json(root / _NAMES[type(record)], values)


def folder_path(options: OnlineOptions) -> Path:
    """The folder that the options name."""
    return Path(options.folder).expanduser()


def check_folder(root: Path, method: str, drafter: str) -> None:
    """Refuse a folder that belongs to something else.

    Raises:
        SpecExtError: It is a file, or holds something else than what online learning left there,
            or samples and versions of another drafter.
    """
    if root.exists() and not root.is_dir():
        raise SpecExtError(f"online: {root} is a file, expected a folder or a new name")
    facts = read_record(root, FolderFacts)
    if facts is None:
        _refuse_foreign_files(root)
        return
    if (facts.method, facts.drafter) != (method, drafter):
        raise SpecExtError(
            f"online: {root} belongs to another drafter ({facts.method}, {facts.drafter}; this one "
            f"is {method}, {drafter}); give another folder, or serve the drafter that it is of"
        )


def _refuse_foreign_files(root: Path) -> None:
    """Of a folder without ``online.json``, which comes after the lock and version 0.

    Where a server starts just now, or was killed while it started, only what it made is there.
    """
    try:
        names = sorted(path.name for path in root.iterdir())
        # It is made first, so what is listed without it may be of a server that starts just now.
        is_begun = ENGINE_LOCK in names or (root / ENGINE_LOCK).exists()
    except FileNotFoundError:
        return
    except OSError as error:
        raise SpecExtError(f"online: {root} {not_readable(error)}") from error
    allowed = (*_EMPTY, *_OWN) if is_begun else _EMPTY
    foreign = [name for name in names if not any(fnmatch(name, one) for one in allowed)]
    if foreign:
        more = len(foreign) - _NUM_NAMED
        named = ", ".join(foreign[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
        raise SpecExtError(
            f"online: {root} holds something else: found {named}, and no {FACTS}; expected a new "
            "or empty folder, or one in which this drafter has learned before. Give another one as "
            "folder of online"
        )
