# SPDX-License-Identifier: Apache-2.0
"""Drafters that learn while they serve, on the V2 runner; the tests of V1, one of each kind."""

from pathlib import Path
from typing import Any

import pytest
import test_online_engine as online
import test_online_nar as block
from test_online_engine import heads, serve
from test_online_nar import drafter
from test_online_nar import serve as serve_block

__all__ = ["drafter", "heads", "serve", "serve_block"]


def test_records_are_the_targets_own(tiny_model: Path, serve: Any) -> None:
    online.test_records_are_the_targets_own(True, tiny_model, serve)


def test_same_tokens_across_many_swaps(
    serve: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    online.test_same_tokens_across_many_swaps(False, serve, make_engine, monkeypatch)


def test_same_tokens_across_many_swaps_of_a_block_drafter(
    serve_block: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    block.test_same_tokens_across_many_swaps(False, serve_block, make_engine, monkeypatch)
