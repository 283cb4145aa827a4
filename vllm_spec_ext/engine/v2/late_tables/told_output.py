# SPDX-License-Identifier: Apache-2.0
"""A step's answer while its tokens are on their way to the host."""

import functools
import threading
from abc import ABC
from typing import TYPE_CHECKING, Any, cast

from vllm_spec_ext.engine.watching.counts import News
from vllm_spec_ext.engine.watching.stat_channel import add_news

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu.async_utils import AsyncOutput


class ToldOutputMixin(ABC):  # noqa: B024
    """Mixed in front of the class of vLLM's answer by :func:`tell_both`.

    vLLM reads it on a thread of its own, we do when the next step is queued; vLLM's own may be read
    once. Abstract like that: Python exchanges an object's class only for one of the same layout.
    """

    def init_told(self, news: News) -> None:
        """State of our own; called once.

        Args:
            news: What was counted up to here; goes with the answer.
        """
        self.spec_news = news
        self.spec_lock = threading.Lock()
        self.spec_answer: ModelRunnerOutput | None = None

    @property
    def is_told(self) -> bool:
        """Whether somebody has read it, so that nobody waits any more."""
        return self.spec_answer is not None

    def get_output(self) -> "ModelRunnerOutput":
        """The answer; whoever comes first waits for the device."""
        with self.spec_lock:
            if self.spec_answer is None:
                answer = super().get_output()  # type: ignore[misc]
                self.spec_answer = add_news(answer, self.spec_news)
            return self.spec_answer


@functools.cache
def _told(base: type[Any]) -> type[Any]:
    return type(f"Told{base.__name__}", (ToldOutputMixin, base), {})


def tell_both(output: "AsyncOutput | ToldOutputMixin", news: News) -> ToldOutputMixin:
    """Let vLLM and us read an answer; the same object, with our override."""
    output.__class__ = _told(cast(Any, type(output)))
    told = cast(ToldOutputMixin, output)
    told.init_told(news)
    return told
