# SPDX-License-Identifier: Apache-2.0
"""What a token is drawn from, inside vLLM's ``Sampler``: eta sampling, and a look at it."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_spec_ext.scorers.eta import apply_eta, eta_parameters
from vllm_spec_ext.scorers.options import EtaOptions


class DistributionSampler(torch.nn.Module):
    """Stands in front of vLLM's ``TopKTopPSampler``; passes through while nobody asks for more."""

    def __init__(self, inner: torch.nn.Module) -> None:
        """Wrap the sampler's own last stage (vLLM 0.32 ``Sampler.__init__``)."""
        super().__init__()
        self.inner = inner
        self._eta_of_rows: tuple[torch.Tensor, torch.Tensor] | None = None
        self._watched: torch.Tensor | None = None
        self._distributions: torch.Tensor | None = None

    def use_eta(
        self,
        requests: Sequence[EtaOptions | None],
        num_rows: Sequence[int],
        greedy: Sequence[bool],
        device: torch.device,
    ) -> None:
        """Set eta for the next call; all None switches it off.

        Args:
            requests: One entry a request.
            num_rows: Rows of logits of each request.
            greedy: Requests at temperature 0, which eta never touches.
            device: Of the logits.
        """
        self._eta_of_rows = None
        if any(request is not None for request in requests):
            self._eta_of_rows = eta_parameters(requests, num_rows, greedy, device)

    def watch(self, rows: torch.Tensor) -> None:
        """Keep those of these rows ([n] int64) at the next call, for :meth:`take_distributions`."""
        self._watched = rows

    def take_distributions(self) -> torch.Tensor:
        """[n, vocab] float32 distributions of the watched rows, each summing to 1."""
        assert self._distributions is not None
        distributions, self._distributions = self._distributions, None
        return distributions

    def forward(
        self,
        logits: torch.Tensor,  # [num_rows, vocab] after temperature
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> Any:
        """As vLLM's own; where a row asks for eta, improbable tokens are cut off first."""
        if self._eta_of_rows is None and self._watched is None:
            return self.inner(logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p)
        if self._eta_of_rows is not None:
            logits = apply_eta(logits, *self._eta_of_rows)
        if self._watched is not None:
            self._distributions = logits[self._watched].softmax(dim=-1, dtype=torch.float32)
            self._watched = None
        return self.inner(logits, generators, None, None)
