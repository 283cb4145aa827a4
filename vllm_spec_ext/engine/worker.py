# SPDX-License-Identifier: Apache-2.0
"""What our CPU and GPU workers share: a specialised runner and the calls of the benchmark."""

from typing import Any

from vllm_spec_ext.engine.runner import specialise


class SpecWorkerMixin:
    """Mixed in front of vLLM's worker; installed by ``parallel_config.worker_cls``."""

    model_runner: Any

    def init_device(self) -> None:
        """Build vLLM's runner, then give it our overrides."""
        super().init_device()  # type: ignore[misc]
        specialise(self.model_runner)

    def spec_ext_stats(self) -> dict[str, list[float]]:
        """Drafter time of each step since the last call, in microseconds; clears it."""
        timings = self.model_runner.drafter.propose_us
        result = {"propose_us": list(timings)}
        timings.clear()
        return result

    def spec_ext_reset(self) -> None:
        """Forget what the proposer learned, for measurements that must start cold."""
        self.model_runner.drafter.reset()
