# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 ``Sampler`` with a look at its logits and distributions, and eta sampling in it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_spec_ext.engine.verifying.likeliest_tokens import LikeliestTokens
from vllm_spec_ext.scorers.eta import apply_eta, eta_parameters

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.logits_processor.interface import (
        LogitsContext,
        LogitsProcessor,
    )
    from vllm.v1.worker.gpu.sample.logprob import LogprobTokenIdsState
    from vllm.v1.worker.gpu.sample.output import SamplerOutput
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    from vllm_spec_ext.engine.v2.runner import SpecRunnerV2Mixin


class SpecSamplerMixin:
    """Mixed in front of vLLM's sampler by :func:`watch_sampler`."""

    # Attributes of vLLM's sampler that we read; listed in compat/reads.py.
    sampling_states: "SamplingStates"
    needs_logits_processing: np.ndarray
    logits_processors: "list[LogitsProcessor]"
    thinking_budget_state: "LogitsProcessor"
    sample: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    logprob_token_ids_state: "LogprobTokenIdsState"
    logprobs_mode: str

    def init_spec_ext(self, runner: "SpecRunnerV2Mixin") -> None:
        """State of our own; called once."""
        self.spec_runner = runner
        # Whether the next call's processed logits must be what is drawn from, exactly.
        self.keeps_distribution = False
        self._eta: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, logits: torch.Tensor, input_batch: "InputBatch") -> "SamplerOutput":
        """A step without drafts."""
        self.look_at(logits)
        self.set_eta(input_batch)
        return super().__call__(logits, input_batch)  # type: ignore[misc]

    def look_at(self, logits: torch.Tensor) -> None:
        """Keep the likeliest next tokens, if the proposer wants them.

        A grammar has cut the logits by now; other sampling parameters change them later.
        """
        runner = self.spec_runner
        count = runner.step_drafts.num_likeliest(runner.spec_step)
        if count and runner.drafter.ranks.leads:
            runner.spec_step.likeliest = LikeliestTokens.of(logits, count)

    def set_eta(self, input_batch: "InputBatch") -> None:
        """Eta of the step's requests, by vLLM's place of each."""
        runner, slots = self.spec_runner, input_batch.idx_mapping_np
        states = runner.spec_step.states
        self._eta = None
        if any(state.eta is not None for state in states):
            by_slot: list[Any] = [None] * runner.req_states.max_num_reqs
            for slot, state in zip(slots.tolist(), states, strict=True):
                by_slot[slot] = state.eta
            greedy = (self.sampling_states.temperature.np == 0.0).tolist()
            self._eta = eta_parameters(by_slot, [1] * len(by_slot), greedy, runner.device)

    def process(self, logits: torch.Tensor, context: "LogitsContext") -> torch.Tensor:
        """Penalties, bans, biases and the processors of third parties, before any temperature.

        vLLM calls each once for a step (0.32 ``LogitsProcessor.apply``), and one may keep state:
        what comes out is for all who need it, and :meth:`without_processors` samples from it.

        Returns:
            [num_rows, vocab] float32, a copy; the logits as they are where nothing changes them.
        """
        if not np.any(self.needs_logits_processing[context.idx_mapping_np]):
            return logits
        logits = logits.to(torch.float32, copy=True)
        for processor in self.logits_processors:
            logits = processor.apply(logits, context)
        return logits

    @contextmanager
    def without_processors(self) -> Iterator[None]:
        """The logits that are sampled from in the block come from :meth:`process`."""
        processors, self.logits_processors = self.logits_processors, []
        try:
            yield
        finally:
            self.logits_processors = processors

    def _sample_random(
        self,
        processed_logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        pos: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        *flags: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As vLLM's own; where a row asks for eta, improbable tokens are cut off first.

        ``flags`` is ``use_fused_sampler``; since vLLM 0.33 ``has_topp_only_rows`` before it.
        """
        sample = super()._sample_random  # type: ignore[misc]
        rest = (expanded_idx_mapping, idx_mapping_np, pos)
        if self._eta is None and not self.keeps_distribution:
            return sample(processed_logits, *rest, top_k, top_p, *flags)
        logits = apply_top_k_top_p(processed_logits, top_k, top_p)
        if self._eta is not None:
            epsilon, alpha = (values[expanded_idx_mapping] for values in self._eta)
            # Without any other constraint these are the target's own logits still.
            logits = apply_eta(logits.to(torch.float32, copy=True), epsilon, alpha)
        return sample(logits, *rest, None, None, *(False for _ in flags))


def watch_sampler(sampler: "Sampler | SpecSamplerMixin", runner: "SpecRunnerV2Mixin") -> None:
    """Give vLLM's sampler our overrides; it is built inside ``load_model``."""
    base = type(sampler)
    sampler.__class__ = type(f"Spec{base.__name__}", (SpecSamplerMixin, base), {})
    cast(SpecSamplerMixin, sampler).init_spec_ext(runner)
