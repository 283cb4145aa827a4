# SPDX-License-Identifier: Apache-2.0
"""Whether an engine with asynchronous scheduling drafts late, or waits for each step's tokens."""

from typing import TYPE_CHECKING

from vllm_spec_ext.engine.starting.spec_config import MethodSettings

if TYPE_CHECKING:
    from vllm_spec_ext.engine.drafting.drafter import Drafter


def why_waiting(drafter: "Drafter", settings: MethodSettings) -> str | None:
    """Why drafts are made on the host, behind each step's tokens; None: they need not be.

    Args:
        drafter: Its proposer is ready.
        settings: Of the engine.
    """
    return why_all_wait(drafter, settings) or drafter.not_late_because


def why_all_wait(drafter: "Drafter", settings: MethodSettings) -> str | None:
    """The same, as far as it does not depend on the proposer."""
    if drafter.models or drafter.views:
        return "it drafts by running models"
    if settings.online is not None:
        return "it learns while it serves"
    if settings.rule is not None and not settings.rule.is_strict:
        return "a relaxed rule looks at drafts on the host"
    return None


def scheduling(
    synchronous_because: str | None, waits_because: str | None, *, may_be_async: bool = False
) -> str:
    """For the start-up line.

    Args:
        synchronous_because: Why scheduling is not asynchronous; None: it is.
        waits_because: As of :func:`why_waiting`.
        may_be_async: The engine has a GPU, which waits for the host between two steps, and the
            runner that could do without.
    """
    if synchronous_because is not None:
        hint = "; plain decoding may be faster on a GPU, docs/gpu.md" if may_be_async else ""
        return f"synchronous scheduling ({synchronous_because}{hint})"
    if waits_because is None:
        return "asynchronous scheduling, drafts made on the device before the host has the tokens"
    return f"asynchronous scheduling, drafts made behind each step's tokens ({waits_because})"
