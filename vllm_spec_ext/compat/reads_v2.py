# SPDX-License-Identifier: Apache-2.0
"""Classes of vLLM's V2 model runner, and every attribute of them that we use."""

from functools import partial

from vllm_spec_ext.compat.entries import Reads

_V2 = partial(Reads, part="v2")

CLASSES_V2: tuple[Reads, ...] = (
    _V2(
        "vllm.engine.arg_utils",
        "EngineArgs",
        "what vLLM has on its V2 runner alone, and we must refuse",
        {
            "watermark_config": "dict[str, object] | None",
            "return_sampling_mask": "bool",
            "enable_trace_replay": "bool",
        },
    ),
    _V2(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner",
        "the state of the engine that our overrides read",
        {
            "attn_groups": "list[list[AttentionGroup]]",
            "block_tables": "BlockTables",
            "cache_config": "CacheConfig",
            "compilation_config": "CompilationConfig",
            "cudagraph_manager": "ModelCudaGraphManager",
            "device": "torch.device",
            "draft_tokens_handler": "object",
            "execute_model_state": "ExecuteModelState | None",
            "kv_cache_config": "KVCacheConfig",
            "get_kv_cache_spec": "Callable[[], dict[str, KVCacheSpec]]",
            "kernel_block_sizes": "list[int]",
            "max_model_len": "int",
            "model": "torch.nn.Module",
            "model_config": "ModelConfig",
            "model_state": "DefaultModelState",
            "parallel_config": "ParallelConfig",
            "rejection_sampler": "RejectionSampler",
            "req_states": "RequestState",
            "sampler": "Sampler",
            "speculative_config": "SpeculativeConfig | None",
            "speculator": "BaseSpeculator | None",
            "use_aux_hidden_state_outputs": "bool",
            "vllm_config": "VllmConfig",
        },
    ),
    _V2(
        "vllm.v1.worker.gpu.cudagraph_utils",
        "ModelCudaGraphManager",
        "the CUDA graphs of the target, which ours take the place of",
        {
            "vllm_config": "VllmConfig",
            "device": "torch.device",
            "cudagraph_mode": "CUDAGraphMode",
            "decode_query_len": "int",
            "lora_capture_cases": "list[int]",
            "ubatch_runner": "UBatchRunner | None",
        },
    ),
    _V2(
        "vllm.v1.worker.gpu.cudagraph_utils",
        "BatchExecutionDescriptor",
        "the graph that a step gets",
        {},
    ),
    _V2(
        "vllm.v1.worker.gpu.model_runner",
        "BatchReqState",
        "the requests of a step in their order, before its inputs are prepared",
        {
            "req_ids": "list[str]",
            "idx_mapping_np": "numpy.ndarray",
            "is_prefilling_np": "numpy.ndarray",
        },
    ),
    _V2(
        "vllm.v1.worker.gpu.model_runner",
        "ExecuteModelState",
        "what the target's forward left for sampling and drafting",
        {
            "input_batch": "InputBatch",
            "hidden_states": "torch.Tensor",
            "aux_hidden_states": "list[torch.Tensor] | None",
            "num_spec_tokens_to_schedule": "int",
        },
    ),
    _V2(
        "vllm.v1.worker.gpu.async_utils",
        "AsyncOutput",
        "what the runner returns while tokens are on their way to the host",
        {"get_output": "Callable[[], ModelRunnerOutput]"},
    ),
    _V2("vllm.v1.outputs", "DraftTokenIds", "how drafts are handed to the scheduler", {}),
    _V2(
        "vllm.v1.worker.gpu.input_batch",
        "InputBatch",
        "the requests of a step, row by row",
        {
            "num_reqs": "int",
            "req_ids": "list[str]",
            "idx_mapping": "torch.Tensor",
            "idx_mapping_np": "numpy.ndarray",
            "logits_indices": "torch.Tensor",
            "positions": "torch.Tensor",
        },
    ),
    _V2(
        "vllm.v1.worker.gpu.states",
        "RequestState",
        "drafts are written where the next step reads them",
        {
            "all_token_ids": "StagedWriteTensor",
            "draft_tokens": "torch.Tensor",
            "last_sampled_tokens": "torch.Tensor",
            "max_num_reqs": "int",
            "num_computed_tokens_np": "numpy.ndarray",
            "total_len": "StagedWriteTensor",
        },
    ),
    _V2(
        "vllm.v1.worker.gpu.buffer_utils",
        "StagedWriteTensor",
        "texts of all requests on the device, where drafts are looked up late",
        {"gpu": "torch.Tensor"},
    ),
    _V2(
        "vllm.v1.worker.gpu.block_table",
        "BlockTables",
        "tokens a block",
        {"block_sizes": "list[int]"},
    ),
    _V2(
        "vllm.v1.worker.gpu.model_states.default",
        "DefaultModelState",
        "the target's own state, into which draft trees are laid",
        {
            "prepare_attn": "Callable[..., dict[str, object]]",
            "postprocess_state": "Callable[..., None]",
        },
    ),
    _V2(
        "vllm.v1.worker.gpu.sample.sampler",
        "Sampler",
        "the target's own draws, and what they are drawn from",
        {
            "__call__": "Callable[..., SamplerOutput]",
            "sampling_states": "SamplingStates",
            "needs_logits_processing": "numpy.ndarray",
            "logits_processors": "list[LogitsProcessor]",
            "thinking_budget_state": "LogitsProcessor",
            "sample": "Callable[..., tuple[torch.Tensor, torch.Tensor]]",
            "_sample_random": "Callable[..., tuple[torch.Tensor, torch.Tensor]]",
        },
    ),
    _V2("vllm.v1.worker.gpu.sample.output", "SamplerOutput", "what a sampler returns", {}),
    _V2(
        "vllm.v1.worker.gpu.sample.states",
        "SamplingStates",
        "which requests are greedy",
        {"temperature": "UvaBackedTensor"},
    ),
    _V2(
        "vllm.v1.worker.gpu.buffer_utils",
        "UvaBackedTensor",
        "a value of each request, on the host too",
        {"np": "numpy.ndarray"},
    ),
    _V2(
        "vllm.v1.worker.gpu.sample.logits_processor.interface",
        "LogitsProcessor",
        "penalties, bad words and the like, before a relaxed rule looks",
        {"apply": "Callable[..., torch.Tensor]"},
    ),
    _V2(
        "vllm.v1.worker.gpu.sample.logits_processor.interface",
        "LogitsContext",
        "which rows of logits belong to what; laid out anew by the paths of a tree",
        {
            "expanded_idx_mapping": "torch.Tensor",
            "idx_mapping": "torch.Tensor",
            "idx_mapping_np": "numpy.ndarray",
            "expanded_local_pos": "torch.Tensor",
            "input_ids": "torch.Tensor",
            "pos": "torch.Tensor",
            "seq_lens_upper_bound_np": "numpy.ndarray",
        },
    ),
    _V2(
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler",
        "RejectionSampler",
        "the frame of verification, which ours extends",
        {"num_speculative_steps": "int"},
    ),
    _V2(
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "BaseSpeculator",
        "base class of what stands in the speculator's place",
        {},
    ),
)
