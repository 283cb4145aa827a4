# SPDX-License-Identifier: Apache-2.0
"""Whether the scheduler prepares the next step while this one runs, where nobody said.

On a GPU a step that waits for the host loses more than adaptive lengths save: with a model of five
billion parameters on an H200 ``input_copy`` ran at 0.9 of plain decoding's speed step by step, and
at 1.5 asynchronously (docs/gpu.md). So a method that need not wait does not.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from vllm_spec_ext.engine.starting.runners import RunnerChoice
from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers import registry

if TYPE_CHECKING:
    from vllm.config.parallel import ParallelConfig
    from vllm.config.vllm import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_spec_ext.parsed_method import ParsedMethod

WIDTH, WIDTHS = "num_speculative_tokens", "num_speculative_tokens_per_batch_size"

ASYNC_WIDTH = 8
"""Draft tokens of a request and step, where none were asked for and scheduling is asynchronous.

All are verified in every step. On an H200 the same model ran at 1.55, 1.48 and 1.06 of plain
decoding's speed with 8, and at 1.64, 1.21 and 0.29 with 32; 1, 8 and 32 requests.
"""

MOST_ROWS = 288
"""Draft tokens and their requests' last tokens in a step; more requests decode plainly.

Nothing more was gained with 8 for each of 32 requests, and vLLM 0.32 captures no full CUDA graph
for more than 512 rows.
"""

WIDTH_SCHEDULER = "vllm_spec_ext.engine.v2.late_tables.width_scheduler.WidthScheduler"

ANY_NUMBER = 1 << 16  # of requests; above what an engine can have


def settle(
    args: "EngineArgs", parallel: "ParallelConfig", runner: RunnerChoice, parsed: "ParsedMethod"
) -> str | None:
    """Choose a scheduler, and how much is drafted with it; sets both.

    Args:
        args: ``EngineArgs``.
        parallel: Target ``ParallelConfig``.
        runner: Of the engine.
        parsed: The method.

    Returns:
        As of :func:`why_synchronous`.
    """
    late = drafts_late(parsed, runner)
    because = why_synchronous(args, parallel, runner, late=late)
    most = parsed.vllm_options[WIDTH]
    if because is not None:
        make_synchronous(args)
    elif not late:
        parsed.vllm_options[WIDTH] = async_width(parsed.given, most)
    else:
        rests = may_rest(args, parsed.given, parsed.options)
        parsed.vllm_options.update(late_widths(parsed.given, most, rests=rests))
        if rests:
            args.scheduler_cls = WIDTH_SCHEDULER
    return because


def has_gpu() -> bool:
    """Whether the engine's steps run beside the host."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda_alike())


def most_requests(width: int) -> int:
    """Requests of the largest batch that drafts.

    Args:
        width: Draft tokens of each.
    """
    return max(2, MOST_ROWS // (width + 1))


def async_width(given: Mapping[str, Any], most: int) -> int:
    """Draft tokens of each request where scheduling is asynchronous; arguments as below."""
    return most if WIDTH in given or WIDTHS in given else min(ASYNC_WIDTH, most)


def late_widths(given: Mapping[str, Any], most: int, *, rests: bool) -> dict[str, Any]:
    """vLLM's options of how much is drafted, as far as the user did not give them.

    Args:
        given: The user's JSON, underscores in its keys.
        most: Draft tokens of a request, given or the method's own default.
        rests: As of :func:`may_rest`. Then the scheduler of ours decides, and the table is read for
            the CUDA graphs that are captured: of steps without drafts, too, in engines of any size.
    """
    if WIDTHS in given:
        return {}
    width = async_width(given, most)
    few = most_requests(width)
    table = [(1, few, width), (few + 1, ANY_NUMBER, 0)]
    if rests:
        table[:1] = [(1, 1, 0), (2, few, width)]
    return {WIDTH: width, WIDTHS: table}


def may_rest(args: "EngineArgs", given: Mapping[str, Any], options: MethodOptions) -> bool:
    """Whether drafts rest where they do not pay: nobody said what a batch size is to draft.

    Args:
        args: ``EngineArgs`` of an engine that drafts late.
        given: The user's JSON, underscores in its keys.
        options: Of the method.
    """
    unsaid = args.scheduler_cls is None and WIDTHS not in given
    # With one request alone there would be graphs of one kind.
    return has_gpu() and unsaid and options.adaptive_length and args.max_num_seqs != 1


def make_synchronous(args: "EngineArgs") -> None:
    """Have each step wait for the one before.

    An asynchronous scheduler, vLLM's default, has every request verify as many tokens in every
    step, whether it pays or not.
    """
    if args.async_scheduling is None:
        args.async_scheduling = False


def drafts_late(parsed: "ParsedMethod", runner: RunnerChoice) -> bool:
    """Whether drafts could be looked up on the device; see ``late_tables.design.why_waiting``.

    Args:
        parsed: The method.
        runner: Of the engine.
    """
    if not runner.is_v2 or parsed.online is not None:
        return False
    if parsed.rule is not None and not parsed.rule.is_strict:
        return False
    asks = getattr(registry.load(parsed.info.name), "drafts_late", None)
    return asks is not None and bool(asks(parsed.options))


def why_synchronous(
    args: "EngineArgs", parallel: "ParallelConfig", runner: RunnerChoice, *, late: bool
) -> str | None:
    """Why each step waits for the one before: it was asked for, or costs nothing; None: none does.

    Args:
        args: ``EngineArgs``.
        parallel: Target ``ParallelConfig``.
        runner: Of the engine.
        late: As of :func:`drafts_late`.
    """
    if not runner.is_v2:
        return "the V1 runner knows no other with our methods"
    if args.async_scheduling is not None:
        return None if args.async_scheduling else "asked for"
    if not late:
        return "drafts are made behind each step's tokens"
    if args.scheduler_cls is not None:
        return "scheduler_cls was given"
    if not has_gpu():
        return "there is no GPU that would wait for the host"
    return None if _runs_ahead(parallel) else "the executor takes one step at a time"


def _runs_ahead(parallel: "ParallelConfig") -> bool:
    """Whether the executor takes a step while another one runs; vLLM asks it, too."""
    from vllm.v1.executor.abstract import Executor

    asks = cast("VllmConfig", SimpleNamespace(parallel_config=parallel))
    return bool(Executor.get_class(asks).supports_async_scheduling())
