# SPDX-License-Identifier: Apache-2.0
"""Where this plugin keeps files that it can make again."""

import os
from pathlib import Path

from vllm_spec_ext.errors import SpecExtError


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/vllm-spec-ext``, by default below ``~/.cache``; not made yet.

    Raises:
        SpecExtError: This user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification: a relative path is invalid and to be ignored.
    if base and Path(base).is_absolute():
        return Path(base) / "vllm-spec-ext"
    try:
        return Path.home() / ".cache" / "vllm-spec-ext"
    except RuntimeError as error:
        raise SpecExtError(
            "found no home folder, expected one to keep files in that can be made again; set "
            "XDG_CACHE_HOME to a folder you can write"
        ) from error
