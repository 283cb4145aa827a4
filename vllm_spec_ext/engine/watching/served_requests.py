# SPDX-License-Identifier: Apache-2.0
"""What a server's front end tells about requests, beyond what vLLM does by itself.

vLLM 0.32 counts the acceptance of each request on demand (``per_request_spec_decode_metrics``) and
puts it beside the text of an answer. Ray Data (2.60 ``vLLMOutputData``) writes a request's
``metrics`` into a row and leaves out the rest. So the same numbers are put there as well, under the
name that they have in vLLM's HTTP answers. Costs nothing where they are not counted.
"""

import dataclasses
import functools
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

_WRAPPED_BY = "_spec_ext_wrapped"
FIELD = "speculative_decoding"


def install_watch() -> None:
    """Wrap ``AsyncLLM.generate`` of this process, once."""
    from vllm.v1.engine.async_llm import AsyncLLM

    if not getattr(AsyncLLM.generate, _WRAPPED_BY, False):
        AsyncLLM.generate = _watched(AsyncLLM.generate)


def _watched(original: Any) -> Any:
    @functools.wraps(original)
    def generate(self: "AsyncLLM", *args: Any, **kwargs: Any) -> AsyncIterator["RequestOutput"]:
        from vllm_spec_ext.engine.starting.spec_config import SpecExtConfig

        stream = original(self, *args, **kwargs)
        config = self.vllm_config.speculative_config
        if not isinstance(config, SpecExtConfig):
            return stream
        counted = self.observability_config.per_request_spec_decode_metrics != "none"
        return _with_acceptance(stream) if counted else stream

    setattr(generate, _WRAPPED_BY, True)
    return generate


async def _with_acceptance(
    stream: AsyncGenerator["RequestOutput", None],
) -> AsyncIterator["RequestOutput"]:
    async with aclosing(stream):  # vLLM aborts a request whose stream is closed
        async for output in stream:
            if output.finished:
                add_acceptance(output)
            yield output


def add_acceptance(output: "RequestOutput") -> None:
    """Put the acceptance of a finished request with one answer into its metrics, if counted."""
    stats, answers = output.metrics, output.outputs
    counted = answers[0].spec_decode_metrics if len(answers) == 1 else None
    if stats is None or counted is None:
        return
    values = {**dataclasses.asdict(stats), FIELD: counted.to_dict()}
    output.metrics = _stats_with_acceptance()(**values)


@functools.cache
def _stats_with_acceptance() -> type:
    """vLLM's numbers of a request with one field more; Ray copies by field."""
    from vllm.v1.metrics.stats import RequestStateStats

    more = [(FIELD, dict[str, Any])]
    return dataclasses.make_dataclass("Stats", more, bases=(RequestStateStats,), kw_only=True)
