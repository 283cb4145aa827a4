# SPDX-License-Identifier: Apache-2.0
"""The target's likeliest next tokens at every row of a step, from logits that are there anyway."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_spec_ext.proposers.base import NextTokens
from vllm_spec_ext.top_columns import top_log_probs

_NONE = -1
_MOST_ENTRIES = 1 << 26  # 256 MiB; vLLM 0.32 bounds its own at 1 GiB (get_max_chunk_logits)


@dataclass(frozen=True)
class LikeliestTokens:
    """Of the rows of a step, still on the target's device."""

    tokens: torch.Tensor  # [num_rows, m] int32
    probs: torch.Tensor  # [num_rows, m] float32

    @classmethod
    def of(cls, logits: torch.Tensor, count: int) -> "LikeliestTokens":
        """The `count` likeliest tokens of each row, and their probabilities.

        Args:
            logits: [num_rows, vocab]; not modified.
            count: Of tokens.
        """
        # In parts: they are computed in float32, for which nobody has set memory aside.
        size = max(1, _MOST_ENTRIES // logits.shape[-1])
        parts = [top_log_probs(part, count) for part in logits.split(size)]
        log_probs, tokens = (
            parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        )
        return cls(tokens.to(torch.int32), log_probs.exp())

    def on_host(
        self, rows: torch.Tensor | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Tokens and probabilities in one copy, as each copy from a GPU is waited for.

        Args:
            rows: Those that are wanted, on the device; None = all.
        """
        both = torch.cat([self.tokens, self.probs.view(torch.int32)], dim=1)
        tokens, probs = np.split((both if rows is None else both[rows]).cpu().numpy(), 2, axis=1)
        return tokens, probs.view(np.float32)

    def of_requests(
        self,
        histories: Sequence[tuple[int, int]],
        drafts: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int] | None],
    ) -> list[NextTokens | None]:
        """The rows of each request, in batch order; None where there are none.

        Args:
            histories: The last two verified tokens before the step; -1 = there is none.
            drafts: Scheduled draft tokens of each; -1 = a placeholder, whose row says nothing.
            parents: Of each draft; None = a chain. A tree's may end before the placeholders that
                fill it up.
        """
        tokens, probs = self.on_host()
        found: list[NextTokens | None] = []
        start = 0
        for history, draft, up in zip(histories, drafts, parents, strict=True):
            contexts, rows = [history], [start]
            for node, token in enumerate(draft):
                if token < 0:
                    continue
                above = node - 1 if up is None else up[node]
                before = history[1] if above < 0 else draft[above]
                if before >= 0:
                    contexts.append((before, token))
                    rows.append(start + 1 + node)
            start += 1 + len(draft)
            if history[1] == _NONE:
                found.append(None)
                continue
            found.append(NextTokens(np.array(contexts, np.int32), tokens[rows], probs[rows]))
        return found
