# SPDX-License-Identifier: Apache-2.0
"""What stands in the places of vLLM's own speculator and of its hand-over of drafts.

Our drafts are made on the host, once the step's tokens are there; vLLM asks its speculator before
that. So the speculator returns what is there already, and the drafts are written afterwards.
"""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.utils.platform_utils import is_pin_memory_available
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
        self._nothing = torch.zeros_like(draft_tokens)  # which vLLM may write into

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """There is nothing to capture."""

    def capture(self) -> None:
        """There is nothing to capture."""

    def propose(self, input_batch: "InputBatch", *args: Any, **kwargs: Any) -> torch.Tensor:
        """[num_reqs, k] tokens that stand for drafts until those of the step are there."""
        return self._nothing[: input_batch.num_reqs]


class HostDraftTokens:
    """Gives drafts to the next step, in the place of vLLM 0.32 ``DraftTokensHandler``."""

    def __init__(self, draft_tokens: torch.Tensor, is_async: bool) -> None:
        """Nothing was drafted yet.

        Args:
            draft_tokens: [max_num_reqs, k] int64 of vLLM's ``RequestState``.
            is_async: The scheduler has every request draft as many tokens.
        """
        self._draft_tokens, self._is_async = draft_tokens, is_async
        # The device's tokens as they should be, by vLLM's place of each request. What was sent has
        # arrived when this is written again: the tokens of a step behind it are on the host then.
        on_device = draft_tokens.device.type != "cpu"
        self._on_host = torch.zeros_like(
            draft_tokens, device="cpu", pin_memory=on_device and is_pin_memory_available()
        )
        # Flat, as int64: a few short rows are written sooner without numpy.
        self._places = memoryview(self._on_host.numpy()).cast("B").cast("q")
        self._request_ids: Sequence[str] = ()
        self._drafts: Sequence[Sequence[int]] = ()

    def set_draft_tokens(self, input_batch: "InputBatch", draft_tokens: torch.Tensor) -> None:
        """Called before ours are there."""

    def hand_over(
        self,
        batch: "InputBatch",
        drafts: Sequence[Sequence[int]],
        new_tokens: Sequence[Sequence[int]],
        num_scheduled: int,
    ) -> None:
        """Drafts go to the device, where the next step reads them, and to the scheduler.

        For an asynchronous one short drafts are filled up with the last token, which is verified as
        no draft.

        Args:
            batch: The step's.
            drafts: Of each of its requests.
            new_tokens: Of each in this step.
            num_scheduled: That each drafts if the scheduler is asynchronous.
        """
        self._request_ids, self._drafts = batch.req_ids, drafts
        if not self._is_async and not any(drafts):
            return  # the next step reads nothing there
        width = self._draft_tokens.shape[1]
        rows = [
            [*draft, *(new[-1:] or [0]) * (width - len(draft))]
            for draft, new in zip(drafts, new_tokens, strict=True)
        ]
        for place, row in zip(batch.idx_mapping_np.tolist(), rows, strict=True):
            self._places[place * width : (place + 1) * width] = array("q", row)
        self._draft_tokens.copy_(self._on_host, non_blocking=True)
        if self._is_async:
            self._drafts = [row[:num_scheduled] for row in rows]

    def get_draft_tokens(self) -> DraftTokenIds:
        """Those of the last step."""
        return DraftTokenIds(list(self._request_ids), [list(draft) for draft in self._drafts])
