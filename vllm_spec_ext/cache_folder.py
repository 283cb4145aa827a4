# SPDX-License-Identifier: Apache-2.0
"""Where this plugin keeps files that it can make again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/vllm-spec-ext``, by default below ``~/.cache``; not made yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification: a relative path is invalid and to be ignored.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "vllm-spec-ext"
