# SPDX-License-Identifier: Apache-2.0
"""What our methods do not work with, each refused with its own reason before weights load."""

import logging
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from vllm_spec_ext.engine.starting.given_arguments import is_server
from vllm_spec_ext.engine.starting.runners import RunnerChoice, without_v2
from vllm_spec_ext.environment import is_set
from vllm_spec_ext.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig
    from vllm.config.parallel import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.spec_ext")

_NGRAM_EMBEDDINGS = "LongcatFlashNgramForCausalLM"  # vLLM 0.32 LongcatNgramModelState

CPU_WORKER = "vllm_spec_ext.engine.cpu_worker.SpecCPUWorker"
GPU_WORKER = "vllm_spec_ext.engine.gpu_worker.SpecGPUWorker"


def worker_class() -> str:
    """Qualified name of our worker for this platform.

    Raises:
        UnsupportedError: Neither a CPU nor a CUDA-like platform.
    """
    if current_platform.is_cpu():
        return CPU_WORKER
    if current_platform.is_cuda_alike():
        return GPU_WORKER
    raise UnsupportedError(
        f"vllm-spec-ext runs on vLLM's CPU and CUDA/ROCm platforms, not on "
        f"{current_platform.device_name!r}; leave speculative_config out on this machine"
    )


def _reasons(args: "EngineArgs", model: "ModelConfig", parallel: "ParallelConfig") -> Iterator[str]:
    """One line for each setting that cannot work (read in vLLM 0.32)."""
    if model.runner_type != "generate":
        yield f"runner type {model.runner_type!r}: it generates nothing; use a generative one"
    if model.is_encoder_decoder:
        yield "an encoder-decoder model: vLLM's V1 drafting hooks see decoder-only batches"
    if model.is_hybrid or model.is_attention_free:
        yield (
            "a hybrid or linear-attention model: its recurrent state cannot be rolled back to an "
            "accepted prefix by these hooks"
        )
    if _NGRAM_EMBEDDINGS in (getattr(model, "architectures", None) or ()):
        yield (
            f"{_NGRAM_EMBEDDINGS}: it embeds the tokens before each one as vLLM remembers them, "
            "refused draft tokens included, so its text would depend on the drafts"
        )
    if getattr(model, "is_diffusion", False):
        yield "a diffusion language model: it does not decode left to right"
    if parallel.pipeline_parallel_size > 1:
        yield (
            f"pipeline_parallel_size={parallel.pipeline_parallel_size}: drafts are not known on "
            "earlier stages; use tensor parallelism"
        )
    if parallel.decode_context_parallel_size > 1:
        yield f"decode_context_parallel_size={parallel.decode_context_parallel_size}; set it to 1"
    if parallel.prefill_context_parallel_size > 1:
        yield f"prefill_context_parallel_size={parallel.prefill_context_parallel_size}; set it to 1"
    ours = (CPU_WORKER, GPU_WORKER)
    if parallel.worker_cls != "auto" and parallel.worker_cls not in ours:
        yield (
            f"worker_cls={parallel.worker_cls!r}: this plugin needs its own worker class; "
            "leave --worker-cls out"
        )
    if args.async_scheduling and without_v2() is not None:
        yield (
            "async_scheduling forced on: it needs vLLM's V2 model runner, and this engine gets V1 "
            f"({without_v2()}); leave --async-scheduling out"
        )
    if getattr(args, "kv_transfer_config", None) is not None:
        yield "a KV connector (--kv-transfer-config): not tested with these hooks; leave it out"
    if getattr(args, "kv_offloading_size", None) is not None:
        # vLLM makes the connector only when its whole configuration is put together.
        yield (
            "KV offloading (--kv-offloading-size), which is a KV connector: not tested with these "
            "hooks; leave it out"
        )
    if getattr(parallel, "enable_dbo", False):
        yield "dual-batch overlap (--enable-dbo): attention metadata is split; leave it out"
    if getattr(parallel, "enable_batch_sharded_sampling", False):
        yield (
            "batch-sharded sampling (--enable-batch-sharded-sampling): each rank would verify a "
            "part of the batch alone; leave it out"
        )
    if getattr(args, "watermark_config", None):
        yield "a watermark (--watermark-config), a part of vLLM's own verification; leave it out"
    if getattr(args, "return_sampling_mask", False):
        yield "return_sampling_mask: not tested with these methods; leave it out"
    if args.aux_output_config.enable_return_routed_experts:
        yield (
            "returned experts (--enable-return-routed-experts): of a draft tree those of its first "
            "path are returned, whichever was accepted; leave it out"
        )
    if getattr(args, "enable_trace_replay", False):
        yield "a replayed trace (--enable-trace-replay): its tokens are given; leave it out"
    if getattr(args, "logits_processors", None):
        yield "custom logits processors: vLLM does not run them with speculative decoding"


def refuse_unsupported(
    args: "EngineArgs", method: str, model: "ModelConfig", parallel: "ParallelConfig"
) -> None:
    """Refuse a configuration that cannot work.

    Args:
        args: ``EngineArgs``.
        method: Our method, for the message.
        model: Target ``ModelConfig``.
        parallel: Target ``ParallelConfig``.

    Raises:
        UnsupportedError: With every reason found, not only the first.
    """
    reasons = list(_reasons(args, model, parallel))
    if reasons:
        raise UnsupportedError(f"{method} does not work with " + "; nor with ".join(reasons))


def refuse_installed_processors(method: str, runner: RunnerChoice) -> None:
    """With speculation the V1 runner leaves out logits processors that packages install.

    Plain decoding has them (vLLM 0.32 ``build_logitsprocs``), so the text would be another one.

    Raises:
        UnsupportedError: There are some, and the engine runs on V1.
    """
    installed = sorted(point.value for point in entry_points(group="vllm.logits_processors"))
    if installed and not runner.is_v2:
        raise UnsupportedError(
            f"{method} does not work with logits processors of installed packages, which vLLM's V1 "
            f"model runner leaves out with speculative decoding: found {', '.join(installed)}, and "
            f"this engine gets {runner}; uninstall them, or leave speculative_config out"
        )


def refuse_short_prefills(args: "EngineArgs", method: str, num_draft_tokens: int) -> None:
    """A request with one token left to read takes as many rows as a draft may have.

    vLLM fills it up (0.32 ``Scheduler.schedule``, "pad new decode requests"), and where that many
    are never scheduled its scheduler waits for ever, or fails.

    Raises:
        UnsupportedError: A limit that is not above the longest draft.
    """
    for name in (
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "long_prefill_token_threshold",
    ):
        found = getattr(args, name, None)
        if found and found <= num_draft_tokens:
            raise UnsupportedError(
                f"{method} with drafts of up to {num_draft_tokens} tokens needs steps of more: "
                f"found {name}={found}, expected at least {num_draft_tokens + 1}; raise it, or set "
                f"num_speculative_tokens below {found}"
            )


def warn_of_requests(args: "EngineArgs", model: "ModelConfig") -> None:
    """Say so if requests will be refused, or not be checked, whatever they ask for.

    vLLM refuses ``min_p`` with speculative decoding (0.32 ``SamplingParams._validate_spec_decode``)
    also where it is the default, of a model's ``generation_config.json`` or the operator's.
    """
    min_p = model.get_diff_sampling_param().get("min_p")
    if min_p:
        logger.warning(
            "vllm-spec-ext: the default sampling parameters of %s set min_p to %s, which vLLM "
            "refuses with speculative decoding: requests that keep this default fail. Add "
            '"min_p": 0 to --override-generation-config',
            model.model,
            min_p,
        )
    if is_set("VLLM_USE_RUST_FRONTEND") and is_server(args):
        logger.warning(
            "vllm-spec-ext: VLLM_USE_RUST_FRONTEND is set, and that front end does not know this "
            "plugin: options of requests are not checked, nothing is shared between requests, and "
            "there are no spec_ext metrics (docs: serving)"
        )


def refuse_async(args: "EngineArgs", method: str, runner: RunnerChoice) -> None:
    """Asynchronous scheduling needs the V2 runner.

    Raises:
        UnsupportedError: It was forced on, and the engine runs on V1.
    """
    if args.async_scheduling and not runner.is_v2:
        raise UnsupportedError(
            f"{method} does not work with async_scheduling forced on: it needs vLLM's V2 model "
            f"runner, and this engine gets {runner}; leave --async-scheduling out"
        )


def refuse_processed_logprobs(model: "ModelConfig") -> None:
    """A relaxed rule reports the untouched target's log-probabilities, or none at all.

    Raises:
        UnsupportedError: ``logprobs_mode`` asks for log-probabilities after sampling constraints.
    """
    mode = str(getattr(model.logprobs_mode, "value", model.logprobs_mode))
    if mode.startswith("processed"):
        raise UnsupportedError(
            f"logprobs_mode={mode!r} does not work with a relaxed acceptance rule, whose tokens "
            "are not drawn from that distribution; use raw_logprobs or the rule exact"
        )
