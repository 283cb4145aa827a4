# SPDX-License-Identifier: Apache-2.0
"""Our worker on vLLM's CPU platform."""

import logging
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_spec_ext.engine.row_padding import RowPadding, linear_layers, may_pad
from vllm_spec_ext.engine.starting.kv_blocks import choose_block_size
from vllm_spec_ext.engine.starting.spec_config import SpecExtConfig
from vllm_spec_ext.engine.worker import SpecWorkerMixin

logger = logging.getLogger("vllm.spec_ext")


class SpecCPUWorker(SpecWorkerMixin, CPUWorker):
    """``CPUWorker`` with a specialised runner."""

    def init_device(self) -> None:
        """Runners read how many tokens a KV block has, so that is chosen before."""
        spec_config = self.vllm_config.speculative_config
        assert isinstance(spec_config, SpecExtConfig)
        if spec_config.needs_scratch_blocks:
            choose_block_size(self.vllm_config)
        super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        """The weights are in their places by now: measure how many rows are quickest."""
        result = super().compile_or_warm_up_model()
        if not self.use_v2_model_runner and may_pad(self.vllm_config):
            padding = RowPadding.measured(list(linear_layers(self.model_runner.get_model())))
            self.model_runner.row_padding = padding
            if padding is not None:
                logger.info("vllm-spec-ext: rows that a step of few tokens gets: %s", padding)
        return result
