# SPDX-License-Identifier: Apache-2.0
"""Drafters that learn while they serve, on the V2 runner; the tests of V1, one of each kind."""

from pathlib import Path
from typing import Any

import pytest
import test_online_engine as online
from test_online_engine import heads, serve

__all__ = ["heads", "serve"]


def test_records_are_the_targets_own(tiny_model: Path, serve: Any) -> None:
    online.test_records_are_the_targets_own(True, tiny_model, serve)


def test_same_tokens_across_many_swaps(
    serve: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    online.test_same_tokens_across_many_swaps(False, serve, make_engine, monkeypatch)
