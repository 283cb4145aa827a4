# SPDX-License-Identifier: Apache-2.0
"""Decides how the drafts of a step are verified: by vLLM's sampler, or by our walk.

Chains go through vLLM's rejection sampler where that is right and enough. Everything else is
verified by the target's own draws at every node (:mod:`.node_sampling`): trees, relaxed rules, eta
sampling, thinking budgets, minimum lengths, log-probabilities of chosen tokens, seeded requests,
and sampled chains where the platform misreads them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_spec_ext.engine.requests.state import RequestState
from vllm_spec_ext.engine.starting.platform_bugs import chain_sampling_is_broken
from vllm_spec_ext.engine.step import Step
from vllm_spec_ext.engine.verifying.distribution_sampler import DistributionSampler
from vllm_spec_ext.engine.verifying.likeliest_tokens import LikeliestTokens
from vllm_spec_ext.engine.verifying.node_sampling import counts_tokens, verify
from vllm_spec_ext.engine.verifying.relaxed_rule import RelaxedRule
from vllm_spec_ext.engine.verifying.step_batch import drawn_of, step_batch
from vllm_spec_ext.engine.verifying.thinking_budgets import ThinkingBudgets

if TYPE_CHECKING:
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    from vllm_spec_ext.engine.runner import SpecRunnerMixin

GREEDY_BELOW = 1e-5  # vLLM's own threshold, v1/sample/sampler.py `_SAMPLING_EPS`

# vLLM's own ``_sample``: (logits, spec_decode_metadata or None) -> output
StockSample = Callable[
    [torch.Tensor | None, "SpecDecodeMetadata | None"],
    "SamplerOutput",
]


class Verifier:
    """Of one runner."""

    def __init__(self, runner: "SpecRunnerMixin") -> None:
        """Build the engine's rule, and put our sampler in front of vLLM's last stage."""
        self._runner = runner
        self.budgets = ThinkingBudgets()
        self._walk_sampled_chains = chain_sampling_is_broken(runner.device)
        settings = runner.speculative_config.spec_ext
        self._relaxed_rule: RelaxedRule | None = None
        if settings.rule is not None and not settings.rule.is_strict:
            vocab_size = runner.vllm_config.model_config.get_vocab_size()
            self._relaxed_rule = RelaxedRule(settings, vocab_size)
        self._distribution = DistributionSampler(runner.sampler.topk_topp_sampler)
        runner.sampler.topk_topp_sampler = self._distribution

    def sample(
        self,
        step: Step,
        logits: torch.Tensor | None,
        spec_decode_metadata: "SpecDecodeMetadata | None",
        stock: StockSample,
    ) -> "SamplerOutput":
        """The step's new tokens, those of accepted drafts included.

        A step without any draft is sampled plainly: vLLM sends it through its rejection sampler
        too, which fails on an empty batch of draft rows when a request asks for top-k on CPU
        (``apply_top_k_only``). A thinking budget makes us verify every step: vLLM loses count of it
        where drafts are rejected and where there are none.
        """
        runner = self._runner
        metadata = runner.input_batch.sampling_metadata
        num_likeliest = 0
        if logits is not None and runner.drafter.ranks.leads:
            num_likeliest = runner.step_drafts.num_likeliest(step)
        if num_likeliest and logits is not None:
            step.likeliest = LikeliestTokens.of(logits, num_likeliest)  # before sampling parameters
        states = step.states
        has_eta = any(state.eta is not None for state in states)
        self._use_eta(states, [1] * len(states))
        holder = metadata.thinking_budget_state_holder
        has_budget = holder is not None and holder.has_tracked_requests()
        has_draft = spec_decode_metadata is not None and spec_decode_metadata.max_spec_len > 0
        if not has_draft and not has_budget:
            return stock(logits, None)
        trees = runner.tree_attention
        has_trees = trees is not None and trees.plan is not None
        # Seeded requests draw the noise of plain decoding, which only a walk can give them.
        broken = self._walk_sampled_chains and not metadata.all_greedy
        must_walk = has_trees or broken or has_eta or has_budget or bool(metadata.generators)
        must_walk |= counts_tokens(metadata) or bool(metadata.logprob_token_ids)
        if self._relaxed_rule is None and not must_walk:
            return stock(logits, spec_decode_metadata)
        greedy = self._greedy_requests()
        batch = step_batch(step)
        self._use_eta(states, (np.diff(batch.node_starts) + 1).tolist())
        rule = None
        distributions = drawn_of(step, greedy)
        if holder is not None and has_budget:
            requests = [runner.requests[request_id] for request_id in step.request_ids]
            budgets = self.budgets.of_rows(holder, batch, requests, metadata.output_token_ids)
            metadata = replace(metadata, thinking_budget_state_holder=budgets)
        if self._relaxed_rule is not None and has_draft:
            rule = self._relaxed_rule.of_step(batch, states, greedy, runner.device)
            distributions = {}
        assert logits is not None
        output, step.walk = verify(batch, logits, metadata, runner.sampler, rule, distributions)
        if trees is not None and has_trees:
            trees.commit(step.walk)
        return output

    def draft_probs(self, step: Step) -> torch.Tensor | None:
        """Distributions of all draft rows for vLLM's rejection sampler; one-hot where none is."""
        runner = self._runner
        distributions = drawn_of(step, self._greedy_requests())
        if not distributions:
            return None
        vocab_size = runner.vllm_config.model_config.get_vocab_size()
        rows = []
        for row, draft in enumerate(step.drafts):
            if row in distributions:
                rows.append(distributions[row].probs.to(runner.device, torch.float32))
            elif draft:
                tokens = torch.tensor(draft, device=runner.device)
                one_hot = torch.nn.functional.one_hot(tokens.clamp(min=0), vocab_size).float()
                # A placeholder is rejected; what comes in its place is the target's own draw.
                rows.append(one_hot.masked_fill_((tokens < 0)[:, None], 0.0))
        return torch.cat(rows).contiguous()

    def _greedy_requests(self) -> list[bool]:
        batch = self._runner.input_batch
        if batch.sampling_metadata.all_greedy:
            return [True] * len(batch.req_ids)
        return (batch.temperature_cpu[: len(batch.req_ids)] < GREEDY_BELOW).tolist()

    def _use_eta(self, states: Sequence[RequestState], num_rows: Sequence[int]) -> None:
        etas = [state.eta for state in states]
        greedy = self._greedy_requests() if any(etas) else []
        self._distribution.use_eta(etas, num_rows, greedy, self._runner.device)
