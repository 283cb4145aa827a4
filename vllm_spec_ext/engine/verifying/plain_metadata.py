# SPDX-License-Identifier: Apache-2.0
"""vLLM's metadata of steps in which nothing is verified, made once and not in every step."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


class PlainMetadata:
    """Of one runner."""

    def __init__(self) -> None:
        """None yet."""
        self._by_size: dict[int, SpecDecodeMetadata] = {}  # number of requests

    def of(
        self,
        num_draft_tokens: np.ndarray,
        cu_num_scheduled_tokens: np.ndarray,
        calculate: "Callable[[np.ndarray, np.ndarray], SpecDecodeMetadata]",
    ) -> "SpecDecodeMetadata":
        """As calculated, where each request decodes one token as it was before.

        Args:
            num_draft_tokens: [num_requests].
            cu_num_scheduled_tokens: [num_requests] running sums.
            calculate: vLLM's (0.32 ``GPUModelRunner._calc_spec_decode_metadata``).
        """
        num_requests = len(num_draft_tokens)
        if cu_num_scheduled_tokens[num_requests - 1] != num_requests:
            return calculate(num_draft_tokens, cu_num_scheduled_tokens)
        found = self._by_size.get(num_requests)
        if found is None:
            found = self._by_size[num_requests] = calculate(
                num_draft_tokens, cu_num_scheduled_tokens
            )
        return found
