# SPDX-License-Identifier: Apache-2.0
"""Mixed into vLLM's worker (``worker_extension_cls``) to reset a rival's memory between runs.

vLLM's ``suffix`` keeps the answers of earlier requests in a tree. Repeats ask the same questions,
so without a reset it would copy its own earlier answers from the second repeat on.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class RivalReset:
    """Methods that the benchmark calls by name through ``LLM.collective_rpc``."""

    model_runner: "GPUModelRunner"  # vLLM's, set by the worker this class is mixed into

    def spec_bench_forget(self) -> bool:
        """Empty the drafter's cache of answers; ``False`` if there is none to empty."""
        drafter: SuffixDecodingProposer | None = getattr(self.model_runner, "drafter", None)
        if drafter is None or not hasattr(drafter, "suffix_cache"):
            return False
        cache = drafter.suffix_cache
        # As vLLM 0.32 SuffixDecodingProposer.__init__ builds it.
        drafter.suffix_cache = type(cache)(
            max_tree_depth=cache.max_tree_depth, max_cached_requests=cache.max_cached_requests
        )
        return True
