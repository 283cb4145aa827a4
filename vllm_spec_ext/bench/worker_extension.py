# SPDX-License-Identifier: Apache-2.0
"""Mixed into vLLM's worker (``worker_extension_cls``): resets and times a rival's drafter.

vLLM's ``suffix`` keeps the answers of earlier requests in a tree. Repeats ask the same questions,
so without a reset it would copy its own earlier answers from the second repeat on.
"""

import time
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class RivalWorker:
    """Methods that the benchmark calls by name through ``LLM.collective_rpc``."""

    model_runner: "GPUModelRunner"  # vLLM's, set by the worker this class is mixed into
    _propose_us: list[float] | None = None

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

    def spec_bench_propose_us(self) -> list[float] | None:
        """Microseconds of each call of the drafter since this was asked last; the first time none.

        None on a GPU: what the drafter starts there still runs when it returns.
        """
        runner = self.model_runner
        if runner.device.type != "cpu":
            return None
        if self._propose_us is None:
            times = self._propose_us = []
            propose = runner.propose_draft_token_ids

            @wraps(propose)
            def timed(*args: Any, **kwargs: Any) -> Any:
                start = time.perf_counter()
                drafts = propose(*args, **kwargs)
                times.append((time.perf_counter() - start) * 1e6)
                return drafts

            runner.propose_draft_token_ids = timed
        found = list(self._propose_us)
        self._propose_us.clear()
        return found
