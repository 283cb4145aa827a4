# SPDX-License-Identifier: Apache-2.0
"""What our CPU and GPU workers share: a specialised runner and the calls of the benchmark."""

from typing import TYPE_CHECKING, Any, cast

from vllm_spec_ext.engine.runner import SpecRunnerMixin
from vllm_spec_ext.engine.starting.scratch import check_room
from vllm_spec_ext.engine.watching.step_log import StepLog
from vllm_spec_ext.errors import SpecExtError

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_spec_ext.engine.v2.runner import SpecRunnerV2Mixin


class SpecWorkerMixin:
    """Mixed in front of vLLM's worker; installed by ``parallel_config.worker_cls``."""

    model_runner: SpecRunnerMixin  # once init_device has specialised it

    use_v2_model_runner: bool
    vllm_config: "VllmConfig"

    def init_device(self) -> None:
        """Build vLLM's runner, then give it our overrides."""
        super().init_device()  # type: ignore[misc]
        if self.use_v2_model_runner:
            # Its module needs Triton, and what the worker has patched by now.
            from vllm_spec_ext.engine.v2.runner import specialise as specialise_v2

            specialise_v2(self.model_runner)
        else:
            specialise(self.model_runner)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """The target, the drafts' models, and then what drafts without waiting."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if self.use_v2_model_runner:
            cast("SpecRunnerV2Mixin", self.model_runner).start_late_drafts()

    def sleep(self, level: int = 1) -> None:
        """Refuse to discard the weights of draft models and heads: nobody would load them again.

        Raises:
            SpecExtError: Level 2, beside such.
        """
        drafter = self.model_runner.drafter
        if level > 1 and (drafter.models or drafter.needs.hidden_states):
            raise SpecExtError(
                f"sleep: found level {level} beside draft models or heads, whose weights it "
                "discards and nothing loads again; expected level 1. vLLM has paused the engine by "
                "now, and goes on when it is woken up (/wake_up)"
            )
        super().sleep(level)  # type: ignore[misc]

    def compile_or_warm_up_model(self) -> Any:
        """Requests that vLLM makes up for that are not drafted for; what drafts runs by itself."""
        self.model_runner.is_warming_up = True
        try:
            result = super().compile_or_warm_up_model()  # type: ignore[misc]
        finally:
            self.model_runner.is_warming_up = False
        self.model_runner.drafter.warm_up()
        return result

    def determine_available_memory(self) -> int:
        """Leave scratch blocks and page means out of the memory for requests."""
        specs = list(self.model_runner.get_kv_cache_spec().values())
        drafter = self.model_runner.drafter
        scratch, views = drafter.scratch_need, drafter.views
        available: int = super().determine_available_memory()  # type: ignore[misc]
        block = sum(spec.page_size_bytes for spec in specs)
        room = views.without_means(available)  # scratch blocks have means, too
        num_scratch = scratch.out_of(room // block) if block else 0
        left = room - num_scratch * block
        config = self.vllm_config
        # Else the number of blocks is given, or max_model_len is made to fit.
        if (
            num_scratch
            and config.cache_config.num_gpu_blocks_override is None
            and config.model_config.original_max_model_len != -1
        ):
            # One block beside those of a request is vLLM's own, the null block.
            needed = sum(
                spec.max_memory_usage_bytes(config) + spec.page_size_bytes for spec in specs
            )
            expected = views.with_means(scratch.with_requests(-(-needed // block)) * block)
            check_room(left, available, needed, expected, num_scratch)
        return left

    def shutdown(self) -> None:
        """Let the proposer save what it keeps; worker processes may end without exit handlers."""
        runner: SpecRunnerMixin | None = getattr(self, "model_runner", None)
        if runner is not None:  # else it failed while it started
            runner.drafter.close()
        super().shutdown()  # type: ignore[misc]

    def spec_ext_stats(self) -> dict[str, list[float]]:
        """Drafter time of each step since the last call, in microseconds; clears it."""
        timings = self.model_runner.drafter.propose_us
        result = {"propose_us": list(timings)}
        timings.clear()
        return result

    def spec_ext_reset(self) -> None:
        """Forget what the proposer learned, for measurements that must start cold."""
        if self.use_v2_model_runner:
            late = cast("SpecRunnerV2Mixin", self.model_runner).late_steps
            if late is not None:
                late.read()  # the last step's: else the next one would tell the fresh proposer
        self.model_runner.drafter.reset()

    def spec_ext_flush(self) -> None:
        """Write what online distillation recorded so far, without waiting for more."""
        online = self.model_runner.drafter.online
        if online is not None:
            online.flush()

    def spec_ext_record(self, wanted: bool) -> None:
        """Switch the recording of drafts and their outcomes on (afresh) or off."""
        self.model_runner.step_log = StepLog() if wanted else None

    def spec_ext_recorded(self) -> list[dict[str, Any]]:
        """The steps recorded since they were asked for last, see :class:`StepLog`."""
        log = self.model_runner.step_log
        steps = [] if log is None else list(log.steps)
        if log is not None:
            log.steps.clear()
        return steps


def specialise(runner: "GPUModelRunner") -> None:
    """Give a freshly built V1 model runner our overrides.

    vLLM's CPU worker builds its runner in ``init_device`` and offers no factory to override
    (vLLM 0.32 ``CPUWorker.init_device``), so the class is exchanged after construction.
    """
    base = type(runner)
    runner.__class__ = type(f"Spec{base.__name__}", (SpecRunnerMixin, base), {})
    cast(SpecRunnerMixin, runner).init_spec_ext()
