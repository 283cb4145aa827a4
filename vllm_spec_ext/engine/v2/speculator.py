# SPDX-License-Identifier: Apache-2.0
"""What stands in the places of vLLM's own speculator and of its hand-over of drafts.

Our drafts are made on the host, once the step's tokens are there; vLLM asks its speculator before
that. So the speculator returns what is there already, and the drafts are written afterwards.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch


class HostSpeculator(BaseSpeculator):
    """Drafts nothing by itself."""

    supports_mm_inputs = False
    draft_logits = None
    pcp_manager = None

    def __init__(self, draft_tokens: torch.Tensor) -> None:
        """Stand in for a speculator.

        Args:
            draft_tokens: [max_num_reqs, k] int64 of vLLM's ``RequestState``.
        """
        self._draft_tokens = draft_tokens

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """There is nothing to capture."""

    def capture(self) -> None:
        """There is nothing to capture."""

    def propose(self, input_batch: "InputBatch", *args: Any, **kwargs: Any) -> torch.Tensor:
        """[num_reqs, k] the drafts of the last step; overwritten in this one."""
        return self._draft_tokens[: input_batch.num_reqs].clone()


class HostDraftTokens:
    """Tells the scheduler the drafts, each as long as it is (vLLM 0.32 ``DraftTokensHandler``)."""

    def __init__(self) -> None:
        """Nothing was drafted yet."""
        self._request_ids: Sequence[str] = ()
        self._drafts: Sequence[Sequence[int]] = ()

    def set_draft_tokens(self, input_batch: "InputBatch", draft_tokens: torch.Tensor) -> None:
        """Called before ours are there."""

    def keep(self, request_ids: Sequence[str], drafts: Sequence[Sequence[int]]) -> None:
        """The drafts of a step, in batch order."""
        self._request_ids, self._drafts = request_ids, drafts

    def get_draft_tokens(self) -> DraftTokenIds:
        """Those of the last step."""
        return DraftTokenIds(list(self._request_ids), [list(draft) for draft in self._drafts])
