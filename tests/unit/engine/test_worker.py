# SPDX-License-Identifier: Apache-2.0
"""What our workers add to vLLM's."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_spec_ext.engine.worker import SpecWorkerMixin
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.base import Needs


class Base:
    def __init__(self, models: list[str], v2: bool) -> None:
        self.called: list[Any] = []
        self.use_v2_model_runner = v2
        start = lambda: self.called.append("late drafts")  # noqa: E731
        self.model_runner: Any = SimpleNamespace(
            drafter=SimpleNamespace(models=models, needs=Needs()), start_late_drafts=start
        )

    def sleep(self, level: int = 1) -> None:
        self.called.append(level)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.called.append(load_dummy_weights)


class Worker(SpecWorkerMixin, Base):
    """As an engine has one."""


def test_deep_sleep_would_lose_the_weights_of_draft_models() -> None:
    worker = Worker(["draft"], v2=True)
    worker.sleep()
    with pytest.raises(SpecExtError, match="found level 2 beside draft models"):
        worker.sleep(level=2)
    assert worker.called == [1]
    other = Worker([], v2=True)
    other.model_runner.drafter.needs = Needs(hidden_states=True)
    with pytest.raises(SpecExtError, match="draft models or heads"):
        other.sleep(level=2)
    other.model_runner.drafter.needs = Needs()
    other.sleep(2)
    assert other.called == [2]


@pytest.mark.parametrize("v2", [True, False])
def test_late_drafts_start_behind_the_loading_of_models(v2: bool) -> None:
    worker = Worker([], v2)
    worker.load_model(load_dummy_weights=True)
    assert worker.called == ([True, "late drafts"] if v2 else [True])
