# SPDX-License-Identifier: Apache-2.0
"""Eta sampling inside vLLM's ``Sampler``: after temperature, top-k and top-p, before the draw."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_spec_ext.config import EtaOptions
from vllm_spec_ext.scorers.eta import apply_eta, eta_parameters


class EtaSampler(torch.nn.Module):
    """Stands in front of vLLM's ``TopKTopPSampler``; passes through while no request uses eta."""

    def __init__(self, inner: torch.nn.Module) -> None:
        """Wrap the sampler's own last stage (vLLM 0.32 v1/sample/sampler.py:70)."""
        super().__init__()
        self.inner = inner
        self._parameters_of_rows: tuple[torch.Tensor, torch.Tensor] | None = None

    def use(
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
        self._parameters_of_rows = None
        if any(request is not None for request in requests):
            self._parameters_of_rows = eta_parameters(requests, num_rows, greedy, device)

    def forward(
        self,
        logits: torch.Tensor,  # [num_rows, vocab] after temperature
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> Any:
        """As vLLM's own, with improbable tokens cut off first where a row asks for it."""
        if self._parameters_of_rows is None:
            return self.inner(logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p)
        return self.inner(apply_eta(logits, *self._parameters_of_rows), generators, None, None)
