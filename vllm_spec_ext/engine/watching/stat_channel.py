# SPDX-License-Identifier: Apache-2.0
"""How counters travel from a worker to the stat loggers of a front end, on whichever machine.

vLLM takes statistics of each step from the worker's ``ModelRunnerOutput`` to ``SchedulerStats``
(0.32 ``Scheduler.update_from_output`` and ``make_stats``) and hands these to one front end of the
engine (``EngineCoreOutputs.scheduler_stats``), whose stat loggers add them up. All of its fields
are of a fixed type (msgpack drops any other) but two: the statistics of connectors, dictionaries
that vLLM passes on as they are. Ours take the place of a KV connector's, with which this plugin
refuses to run (:mod:`..starting.limits`). No scheduler, executor or client is touched.

The front end takes them out again before any other stat logger looks
(:mod:`.stat_logger`): vLLM's own would ask a connector what they mean.
"""

import copy
from typing import TYPE_CHECKING, cast

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from vllm_spec_ext.engine.watching.counts import News, WorkerCounts

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import SchedulerStats

KEY = "spec_ext"


def put_news(output: object, counts: WorkerCounts) -> object:
    """Send what is new along with a worker's answer.

    Args:
        output: ``ModelRunnerOutput``; with anything else (None: the step is not over yet) what is
            new waits for the next answer.
        counts: Of this worker.

    Returns:
        The answer to give instead; of an empty one a copy, as vLLM shares one object for all.
    """
    if not isinstance(output, ModelRunnerOutput):
        return output
    return add_news(output, counts.take())


def add_news(output: ModelRunnerOutput, news: News) -> ModelRunnerOutput:
    """As :func:`put_news`, of what was taken from the counts before."""
    if not news:
        return output
    result = output if output.req_ids else copy.copy(output)
    result.kv_connector_output = KVConnectorOutput(
        kv_connector_stats=KVConnectorStats(data={KEY: news})
    )
    return result


def take_news(stats: "SchedulerStats | None") -> News | None:
    """What a worker sent, out of a step's statistics; None if nothing."""
    if stats is None or stats.kv_connector_stats is None:
        return None
    news = stats.kv_connector_stats.pop(KEY, None)
    if not stats.kv_connector_stats:
        stats.kv_connector_stats = None
    return cast("News | None", news)
