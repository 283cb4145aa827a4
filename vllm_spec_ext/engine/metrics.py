# SPDX-License-Identifier: Apache-2.0
"""What the front end tells Prometheus about this plugin, beside vLLM's own metrics.

The names do not contain ``vllm``: vLLM drops every such collector when an engine starts
(v1/metrics/prometheus.py, ``unregister_vllm_metrics``).
"""

from functools import cache
from typing import Any


@cache
def _lossless_gauge() -> Any:
    from prometheus_client import Gauge

    return Gauge(
        "spec_ext:lossless",
        "1 if drafts are judged by a rule that leaves the output as the target's own, else 0.",
        labelnames=["method", "rule"],
        multiprocess_mode="mostrecent",
    )


def publish_rule(method: str, rule: str) -> None:
    """Say which acceptance rule this process's engine runs.

    Args:
        method: Name of the proposer.
        rule: ``"exact"``, or the relaxed rule with its parameters.
    """
    _lossless_gauge().labels(method=method, rule=rule).set(rule == "exact")
