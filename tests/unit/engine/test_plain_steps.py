# SPDX-License-Identifier: Apache-2.0
"""Steps in which nothing is drafted cost the host as little as may be."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm_spec_ext.engine.runner import SpecRunnerMixin
from vllm_spec_ext.engine.verifying.plain_metadata import PlainMetadata


class Stock:
    """In the place of vLLM's runner."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def _calc_spec_decode_metadata(self, num_draft_tokens: Any, cu_num_tokens: Any) -> object:
        self.asked.append(num_draft_tokens.tolist())
        return object()


class Runner(SpecRunnerMixin, Stock):
    """Ours, without an engine."""

    def __init__(self) -> None:
        Stock.__init__(self)
        self._plain_metadata = PlainMetadata()


def metadata(runner: Runner, drafts: list[int], scheduled: list[int]) -> object:
    """Asked for as vLLM does."""
    return runner._calc_spec_decode_metadata(
        np.array(drafts, np.int32), np.cumsum(scheduled).astype(np.int32)
    )


def test_rows_of_single_tokens_are_found_once() -> None:
    runner = Runner()
    plain = metadata(runner, [0, 0, 0], [1, 1, 1])
    assert metadata(runner, [0, 0, 0], [1, 1, 1]) is plain
    assert metadata(runner, [0, 0], [1, 1]) is not plain
    assert runner.asked == [[0, 0, 0], [0, 0]]


def test_drafts_and_prompts_are_looked_at_each_time() -> None:
    runner = Runner()
    for drafts, scheduled in (([0, 2, 0], [1, 3, 1]), ([0, 0, 0], [1, 1, 40])):
        first, second = (metadata(runner, drafts, scheduled) for _ in range(2))
        assert first is not second
    assert len(runner.asked) == 4
