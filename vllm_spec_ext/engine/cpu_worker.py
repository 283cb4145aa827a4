# SPDX-License-Identifier: Apache-2.0
"""Our worker on vLLM's CPU platform."""

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_spec_ext.engine.worker import SpecWorkerMixin


class SpecCPUWorker(SpecWorkerMixin, CPUWorker):
    """``CPUWorker`` with a specialised runner."""
