# SPDX-License-Identifier: Apache-2.0
"""An engine's arguments while it is configured, and as the user gave them before and after."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

_usage: "ContextVar[UsageContext | None]" = ContextVar("usage_context", default=None)


@contextmanager
def kept(args: "EngineArgs", usage: "UsageContext | None") -> Iterator[None]:
    """Give back what is chosen for one engine: its arguments, or copies, may make others.

    Args:
        args: ``EngineArgs``, which its ``create_engine_config`` changes.
        usage: As that is told.
    """
    given = args.async_scheduling, args.scheduler_cls  # scheduling.py chooses where nothing was
    token = _usage.set(usage)
    try:
        yield
    finally:
        _usage.reset(token)
        args.async_scheduling, args.scheduler_cls = given


def usage_context() -> "UsageContext | None":
    """What the engine that is being configured is for; vLLM's usual sizes depend on it."""
    return _usage.get()


def is_server(args: "EngineArgs") -> bool:
    """Whether requests come from outside; the front end of an offline engine is its program."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # workers never need it

    return isinstance(args, AsyncEngineArgs)
