# SPDX-License-Identifier: Apache-2.0
"""What Triton's interpreter needs to run vLLM's kernels; a vLLM plugin, so in every process."""

import os
from typing import Any

from . import quick_interpreter

ASYNC = "TRITON_CPU_STUB_ASYNC"
"""Environment: ``1`` lets ``async_scheduling=True`` stand, which vLLM switches off on CPUs."""


def register() -> None:
    """Patch Triton and vLLM, once a process."""
    import vllm.triton_utils

    if vllm.triton_utils.HAS_TRITON and not getattr(register, "done", False):
        register.done = True  # type: ignore[attr-defined]
        _accept_masks_of_numbers()
        _keep_what_was_compared_apart()
        _patch_language_once()
        quick_interpreter.register()
        _top_k_top_p_by_torch()
        if os.environ.get(ASYNC) == "1":
            _keep_async_scheduling()


def _accept_masks_of_numbers() -> None:
    """The interpreter takes masks of type bool alone; vLLM's n-gram kernel has other ones."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        mask.data = mask.data.astype(np.bool_, copy=False)
        return load(self, ptrs, mask, *rest)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        mask.data = mask.data.astype(np.bool_, copy=False)
        return store(self, ptrs, value, mask, *rest)

    InterpreterBuilder.create_masked_load = create_masked_load
    InterpreterBuilder.create_masked_store = create_masked_store


def _keep_what_was_compared_apart() -> None:
    """A comparison of float64 counts as float64 itself, and is no mask once it is broadcast."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    splat = InterpreterBuilder.create_splat

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        if arg.data.dtype == np.bool_:
            arg = TensorHandle(arg.data, tl.int1)
        return splat(self, ret_ty, arg)

    InterpreterBuilder.create_splat = create_splat


def _patch_language_once() -> None:
    """The interpreter patches ``triton.language`` at every launch; that is most of their time."""
    from triton.runtime import interpreter

    patch_language, patched = interpreter._patch_lang, set()

    class NothingToUndo:
        def restore(self) -> None:
            pass

    def patch_once(function: Any) -> Any:
        module = function.__globals__["__name__"]
        if module not in patched:
            patched.add(module)
            patch_language(function)
        return NothingToUndo()

    interpreter._patch_lang = patch_once


def _top_k_top_p_by_torch() -> None:
    """This kernel fails in the interpreter, for the V1 runner too."""
    from vllm.v1.sample.ops import topk_topp_sampler

    def by_torch(logits: Any, k: Any, p: Any, **other: Any) -> Any:
        return topk_topp_sampler.apply_top_k_top_p_pytorch(logits, k, p)

    topk_topp_sampler.apply_top_k_top_p_triton = by_torch


def _keep_async_scheduling() -> None:
    """Give back what the user asked for after vLLM's CPU platform has taken it away."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
