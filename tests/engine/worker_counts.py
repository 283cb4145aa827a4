# SPDX-License-Identifier: Apache-2.0
"""What the worker of an engine counts, kept from the front end."""

from collections.abc import Callable
from typing import Any

import pytest

from vllm_spec_ext.engine.watching.counts import News


def kept_counts(runner: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], News]:
    """From now on nothing is told; returns what gives all that was counted since."""
    counts = runner.drafter.counts
    take: Callable[[], News] = counts.take
    take()
    monkeypatch.setattr(counts, "take", dict)
    return take
