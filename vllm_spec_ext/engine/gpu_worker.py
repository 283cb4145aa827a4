# SPDX-License-Identifier: Apache-2.0
"""Our worker on CUDA-like platforms."""

from vllm.v1.worker.gpu_worker import Worker

from vllm_spec_ext.engine.worker import SpecWorkerMixin


class SpecGPUWorker(SpecWorkerMixin, Worker):
    """``Worker`` with a specialised runner."""
