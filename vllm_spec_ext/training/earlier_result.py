# SPDX-License-Identifier: Apache-2.0
"""What a training may replace when it ends: its own earlier result, and nobody else's files."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_spec_ext.atomic import PARTIAL, not_readable, read_json
from vllm_spec_ext.errors import SpecExtError

CARD_NAME = "README.md"
"""Of the model card beside a result."""

_MOST_NAMES = 5  # in a message


def check_earlier_result(
    folder: Path,
    mark: str,
    what: str,
    *,
    is_own: Callable[[dict[str, Any]], bool] | None = None,
    files: Sequence[str] | None = None,
    option: str = "--out",
) -> None:
    """Raise SpecExtError for a folder with files that no run of this trainer wrote.

    Args:
        folder: That is written to; may not be there.
        mark: The JSON file by which an earlier result is known.
        what: The result, for messages.
        is_own: Whether a mark is that of such a result; None = any is.
        files: Names of all that is replaced or removed; None = the folder as a whole.
        option: That names the folder.
    """
    if files is not None:
        found = [name for name in files if os.path.lexists(folder / name)]
    else:
        found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    # A run that was killed while it exchanged its files has left the mark among the new ones.
    marks = (folder / mark, folder / PARTIAL / mark)
    if not found or any(_is_own(path, is_own) for path in marks):
        return
    shown = ", ".join(found[:_MOST_NAMES]) + (", ..." if len(found) > _MOST_NAMES else "")
    raise SpecExtError(
        f"{folder} holds {shown}, which the training would replace, and its {mark} is missing or "
        f"another's, so it holds no {what} of an earlier run; give another {option}, or move these "
        "files away"
    )


def _is_own(path: Path, is_own: Callable[[dict[str, Any]], bool] | None) -> bool:
    if is_own is None or not path.is_file():
        return path.is_file()
    try:
        return is_own(read_json(path))
    except OSError as error:
        raise SpecExtError(f"{path} {not_readable(error)}") from error
    except SpecExtError:  # not JSON: another's
        return False
