# SPDX-License-Identifier: Apache-2.0
"""A step's answer while its tokens are on their way to the host."""

import threading
from typing import TYPE_CHECKING

from vllm.v1.outputs import AsyncModelRunnerOutput

from vllm_spec_ext.engine.watching.counts import News
from vllm_spec_ext.engine.watching.stat_channel import add_news

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu.async_utils import AsyncOutput


class ToldOutput(AsyncModelRunnerOutput):
    """Given to vLLM, which reads it on a thread of its own; we do when the next step is queued.

    vLLM's own may be read once.
    """

    def __init__(self, output: "AsyncOutput", news: News) -> None:
        """Nothing waits here.

        Args:
            output: Of vLLM's runner.
            news: What was counted up to here; goes with the answer.
        """
        self._output = output
        self._news = news
        self._lock = threading.Lock()
        self._answer: ModelRunnerOutput | None = None

    @property
    def is_told(self) -> bool:
        """Whether somebody has read it, so that nobody waits any more."""
        return self._answer is not None

    def get_output(self) -> "ModelRunnerOutput":
        """The answer; whoever comes first waits for the device."""
        with self._lock:
            if self._answer is None:
                self._answer = add_news(self._output.get_output(), self._news)
            return self._answer
