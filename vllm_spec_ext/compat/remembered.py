# SPDX-License-Identifier: Apache-2.0
"""What was found to be in order is not looked up again while no file of it has changed.

To parse what the hook map names takes more than a second of each process that starts an engine.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from vllm_spec_ext.cache_folder import cache_folder
from vllm_spec_ext.compat import source
from vllm_spec_ext.compat.entries import Entry
from vllm_spec_ext.errors import SpecExtError


def is_in_order(root: Path, entries: Sequence[Entry]) -> bool:
    """Whether :func:`remember` was told so of these entries, and no file has changed since.

    Args:
        root: Folder that holds the package ``vllm``.
        entries: Of the hook map.
    """
    try:
        known = json.loads(_note(root, entries).read_text(encoding="utf-8"))
        return bool(known) and all(_state(Path(file)) == state for file, state in known.items())
    # It is not there, cut off, or somebody else's; or this user has no home folder.
    except (OSError, ValueError, AttributeError, SpecExtError):
        return False


def remember(root: Path, entries: Sequence[Entry], files: Iterable[Path]) -> None:
    """All of these entries are in order. Where nothing can be written nothing is remembered.

    Args:
        root: As above.
        entries: As above.
        files: Source that was looked at.
    """
    with contextlib.suppress(OSError, SpecExtError):
        note = _note(root, entries)
        partial = note.with_name(f"{note.name}.{os.getpid()}")
        states = {str(file): _state(file) for file in files}
        note.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(states), encoding="utf-8")
        os.replace(partial, note)


def _note(root: Path, entries: Sequence[Entry]) -> Path:
    """A file for each vLLM, each hook map, and each way to look it up."""
    how = source.__file__, _state(Path(source.__file__))
    key = repr((str(root.resolve()), how, list(entries)))
    digest = hashlib.sha256(key.encode()).hexdigest()
    return cache_folder() / "compat" / f"{digest[:32]}.json"


def _state(file: Path) -> list[int]:
    """Of a file that is the same as long as this is."""
    found = file.stat()
    return [found.st_size, found.st_mtime_ns]
