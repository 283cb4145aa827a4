# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's two model runners an engine of ours gets: vLLM's choice, where we can follow it.

vLLM takes V2 where it sees Triton and nothing needs V1 (vLLM 0.32
``VllmConfig.use_v2_model_runner``). Its ``custom_class`` needs V1, its ``ngram_gpu`` does not: by
which of the two we are inside vLLM, an engine gets one runner or the other, and nothing of vLLM is
patched for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.triton_utils import HAS_TRITON

from vllm_spec_ext import compat
from vllm_spec_ext.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config.parallel import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

ENVIRONMENT = "VLLM_USE_V2_MODEL_RUNNER"


@dataclass(frozen=True)
class RunnerChoice:
    """A model runner, and why."""

    is_v2: bool
    reason: str

    def __str__(self) -> str:
        return f"vLLM's {'V2' if self.is_v2 else 'V1'} model runner ({self.reason})"


def _only_v1(args: "EngineArgs", parallel: "ParallelConfig") -> Iterator[str]:
    """What our part of the V2 runner does not do."""
    missing = compat.missing_for_v2()
    if missing:
        yield f"this vLLM ({'; '.join(missing)})"
    if parallel.data_parallel_size > 1:
        yield "data parallelism"
    # V2 turns hidden states to logits with one adapter a request (vLLM 0.32
    # ``v1/worker/gpu/lora_utils.py``), not a row: rows of drafts have none.
    if args.enable_lora:
        yield "LoRA"


def without_v2() -> str | None:
    """Why vLLM takes its V1 runner whatever is asked of us; None if it need not."""
    from vllm.envs import VLLM_USE_V2_MODEL_RUNNER  # computed by vLLM each time

    if VLLM_USE_V2_MODEL_RUNNER is False:
        return f"{ENVIRONMENT}=0"
    return None if HAS_TRITON or VLLM_USE_V2_MODEL_RUNNER else "vLLM sees no Triton"


def choose_runner(args: "EngineArgs", method: str, parallel: "ParallelConfig") -> RunnerChoice:
    """The runner that vLLM would take without us, if it works with what was asked for.

    Args:
        args: ``EngineArgs``.
        method: Our method, for the message.
        parallel: Target ``ParallelConfig``.

    Raises:
        UnsupportedError: The user insists on V2, and what was asked for needs V1.
    """
    from vllm.envs import VLLM_USE_V2_MODEL_RUNNER  # computed by vLLM each time

    reason = without_v2()
    if reason is not None:
        return RunnerChoice(False, reason)
    asked = bool(VLLM_USE_V2_MODEL_RUNNER)
    needs = list(_only_v1(args, parallel))
    if not needs:
        return RunnerChoice(True, f"{ENVIRONMENT}=1" if asked else "vLLM's default")
    if asked:
        raise UnsupportedError(
            f"{ENVIRONMENT}=1: found {method} with {' and '.join(needs)}, which this plugin runs "
            f"on vLLM's V1 model runner alone; unset {ENVIRONMENT}"
        )
    return RunnerChoice(False, f"{' and '.join(needs)} in V1 alone")
