# SPDX-License-Identifier: Apache-2.0
"""Verification on the V2 runner: the target draws at every row, and the draft is followed.

vLLM's own rejection sampler tests draft tokens by other noise than it samples with. Noise in V2 is
a function of seed and position alone (vLLM 0.32 ``gumbel.py``), so what the target draws at a row
is what plain decoding would draw there: a seeded text does not depend on what was drafted, and a
token that was chosen, not drawn, is accepted as often as by vLLM's test.

Chains are verified on the device. Trees, relaxed rules and drawn drafts are verified by the walks
that the V1 runner has, on the host.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_spec_ext.engine.v2.chains import follow_chains
from vllm_spec_ext.engine.v2.path_rows import path_rows
from vllm_spec_ext.engine.verifying.draft_batch import DraftBatch
from vllm_spec_ext.engine.verifying.drawn_drafts import (
    DraftDistributions,
    verified_rows,
    verify_drawn,
)
from vllm_spec_ext.engine.verifying.node_sampling import emitting_rows
from vllm_spec_ext.engine.verifying.relaxed_rule import RelaxedRule
from vllm_spec_ext.engine.verifying.step_batch import drawn_of, step_batch
from vllm_spec_ext.scorers.walk.tree import Walk, walk, walk_samples

if TYPE_CHECKING:
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    from vllm_spec_ext.engine.v2.runner import SpecRunnerV2Mixin


@dataclass(frozen=True)
class HostPart:
    """Requests of a step that are verified together, on the host."""

    batch: DraftBatch
    distributions: dict[int, DraftDistributions]  # by number of the request
    start: int = 0  # number of the first one in the step

    @property
    def end(self) -> int:
        """Number of the one behind the last."""
        return self.start + self.batch.num_requests

    def part(self, start: int, end: int) -> "HostPart":
        """Of these requests, `end` not included."""
        drawn = {r - start: one for r, one in self.distributions.items() if start <= r < end}
        return HostPart(self.batch.part(start, end), drawn, start)


FORCED = 1e9
"""Logit of the token that ends a thought (vLLM 0.32 ``_thinking_budget_kernel``)."""


class WalkSampler(RejectionSampler):
    """In the place of vLLM's rejection sampler, whose frame it keeps."""

    def __init__(self, runner: "SpecRunnerV2Mixin") -> None:
        """Build the engine's rule."""
        super().__init__(runner.sampler, runner.speculative_config, runner.device)
        self._runner = runner
        settings = runner.speculative_config.spec_ext
        self._relaxed_rule: RelaxedRule | None = None
        if settings.rule is not None and not settings.rule.is_strict:
            vocab_size = runner.vllm_config.model_config.get_vocab_size()
            self._relaxed_rule = RelaxedRule(settings, vocab_size)
        # What processors of third parties look at is not known.
        theirs = (type(each).__module__ for each in runner.sampler.logits_processors)
        self._reads_history = not all(name.startswith("vllm.") for name in theirs)
        self._whole: HostPart | None = None  # a step that is verified on the host
        self._greedy: list[bool] = []  # its requests
        self._part: HostPart | None = None  # what of it is verified just now
        self._walks: list[Walk] = []  # of its parts, in order
        self._num_chosen = 0  # most tokens whose log-probabilities a request of the step chooses
        self._slots_of_rows: torch.Tensor | None = None  # of the part that is verified just now

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: "InputBatch",
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> "SamplerOutput":
        """The step's new tokens, those of accepted drafts included."""
        runner = self._runner
        step, sampler = runner.spec_step, runner.sampler
        sampler.look_at(logits)
        sampler.set_eta(input_batch)
        plan = None if runner.tree_attention is None else runner.tree_attention.plan
        greedy: list[bool] = []
        distributions = {}
        if self._relaxed_rule is not None or any(state.probs is not None for state in step.states):
            temperatures = sampler.sampling_states.temperature.np[input_batch.idx_mapping_np]
            greedy = (temperatures == 0.0).tolist()
            if self._relaxed_rule is None:
                distributions = drawn_of(step, greedy)
        self._whole, self._part, self._walks = None, None, []
        self._num_chosen = max([state.num_chosen_logprobs for state in step.states], default=0)
        if plan is not None or distributions or self._relaxed_rule is not None:
            batch = step_batch(step)
            if invalid_drafts is not None:  # rows behind which no grammar was asked
                batch = batch.without(invalid_drafts.cpu().numpy())
            self._whole, self._greedy = HostPart(batch, distributions), greedy
            output = super().__call__(logits, input_batch, None, invalid_drafts)
            step.walk = joined(self._walks)
            return output
        if runner.is_async and runner.late_steps is None:
            invalid_drafts = _or(invalid_drafts, _fillers(step.drafts, logits.device))
        return super().__call__(logits, input_batch, None, invalid_drafts)

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Processed logits [num_rows, vocab], tokens [num_reqs, k + 1], how many of them count."""
        self._slots_of_rows = expanded_idx_mapping
        if self._whole is not None:
            # vLLM takes huge steps in parts, one behind the other.
            start = 0 if self._part is None else self._part.end
            part = self._part = self._whole.part(start, start + len(idx_mapping_np))
            context = LogitsContext(
                expanded_idx_mapping=expanded_idx_mapping,
                idx_mapping=idx_mapping,
                idx_mapping_np=idx_mapping_np,
                expanded_local_pos=expanded_local_pos,
                input_ids=draft_sampled,
                pos=pos,
                seq_lens_upper_bound_np=seq_lens_upper_bound_np,
            )
            return self._verify_on_host(part, logits, context)
        sampled, processed = self._runner.sampler.sample(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
            return_logprobs=True,
        )
        tokens, num_sampled = follow_chains(
            sampled, verify_draft_sampled, cu_num_logits, self.num_speculative_steps
        )
        return processed, tokens, num_sampled

    def _verify_on_host(
        self, part: "HostPart", logits: torch.Tensor, context: LogitsContext
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sampler, device, batch = self._runner.sampler, logits.device, part.batch
        own = slice(part.start, part.end)
        states = self._runner.spec_step.states[own]
        layout = None
        reads = [state.reads_history or self._reads_history for state in states]
        if any(reads):
            layout = path_rows(batch, reads)
            context = layout.spread(context)
        rows = logits if layout is None else logits[layout.rows_on(device)]
        tolerated, draft_values = None, None
        sampling: AbstractContextManager[None] = nullcontext()
        if self._relaxed_rule is not None:
            rows, sampling = sampler.process(rows, context), sampler.without_processors()
            rule = self._relaxed_rule.of_step(batch, states, self._greedy[own], device)
            masked = self._masked(rows, context)
            if layout is not None:
                masked = masked[layout.places_on(device)]
            tolerated, draft_values = rule(masked)
            del masked  # as large as all rows of the part
        sampler.keeps_distribution = bool(part.distributions)
        with sampling:
            sampled, processed = sampler.sample(
                rows,
                context.expanded_idx_mapping,
                context.idx_mapping,
                context.idx_mapping_np,
                context.pos,
                context.input_ids,
                context.expanded_local_pos,
                context.seq_lens_upper_bound_np,
                return_logprobs=True,
            )
        sampler.keeps_distribution = False
        if layout is not None:
            places = layout.places_on(device)
            sampled, processed = sampled[places], processed[places]
        # The walk runs on the host, which waits for the step's tokens right after anyway.
        choices = sampled.cpu().numpy()
        nodes = (batch.parents, batch.tokens, batch.node_starts, choices)
        if tolerated is None or draft_values is None:
            taken = walk_samples(*nodes)
        else:
            taken = walk(*nodes, tolerated=tolerated, draft_logits=draft_values)
        if part.distributions:
            taken = self._walk_of_drawn(batch, part.distributions, processed, choices, taken)
        self._walks.append(taken)
        tokens = np.zeros((batch.num_requests, self.num_speculative_steps + 1), np.int64)
        width = min(tokens.shape[1], taken.emitted.shape[1])
        tokens[:, :width] = taken.emitted[:, :width]
        num_sampled = torch.from_numpy(taken.num_accepted.astype(np.int32) + 1).to(device)
        return processed, torch.from_numpy(tokens).to(device), num_sampled

    @staticmethod
    def _walk_of_drawn(
        batch: DraftBatch,
        distributions: dict[int, DraftDistributions],
        processed: torch.Tensor,
        choices: np.ndarray,
        taken: Walk,
    ) -> Walk:
        rows = torch.from_numpy(verified_rows(batch, distributions)).to(processed.device)
        target = processed[rows].softmax(dim=-1, dtype=torch.float32)
        return verify_drawn(batch, distributions, target, choices, taken)

    def _masked(self, logits: torch.Tensor, context: LogitsContext) -> torch.Tensor:
        """Processed logits as float32, after a budget that changes what the target would choose."""
        sampler = self._runner.sampler
        if not np.any(sampler.needs_logits_processing[context.idx_mapping_np]):
            return logits.to(torch.float32)
        masked = logits.to(torch.float32, copy=True)
        sampler.thinking_budget_state.apply(masked, context)
        # A budget that is used up raises one token and leaves the others as they are, where a rule
        # would tolerate them.
        is_forced = masked.amax(dim=-1, keepdim=True) >= FORCED
        return masked.masked_fill_(is_forced & (masked < FORCED), float("-inf"))

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        cu_num_logits_np: np.ndarray,
        max_num_logprobs: int,
    ) -> "LogprobsTensors | None":
        """Log-probabilities of the emitted tokens, each from the row that it came from."""
        if max_num_logprobs == NO_LOGPROBS and not self._num_chosen:
            return None
        if self._part is not None:
            order = chain_order(self._part.batch, self._walks[-1])
            logits = logits[torch.from_numpy(order).to(logits.device)]
        if not self._num_chosen:
            rest = (cu_num_logits, cu_num_logits_np, max_num_logprobs)
            return super()._get_logprobs_tensors(sampled, num_sampled, logits, *rest)
        # vLLM's own leaves out what requests choose (0.32 RejectionSampler._get_logprobs_tensors).
        sampler = self._runner.sampler
        return compute_topk_scores(
            logits,
            0 if max_num_logprobs == NO_LOGPROBS else max_num_logprobs,
            in_rows(sampled, num_sampled, cu_num_logits, len(logits)),
            cu_num_logits_np.tolist() if len(logits) != len(sampled) else None,
            logprob_token_ids_state=sampler.logprob_token_ids_state,
            expanded_idx_mapping=self._slots_of_rows,
            max_per_req_token_ids=self._num_chosen,
            logits_mode=sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )


def joined(walks: Sequence[Walk]) -> Walk:
    """Walks of requests one behind the other."""
    if len(walks) == 1:
        return walks[0]

    def rows(arrays: Sequence[np.ndarray]) -> np.ndarray:
        width = max(array.shape[1] for array in arrays)
        wide = [np.pad(a, ((0, 0), (0, width - a.shape[1])), constant_values=-1) for a in arrays]
        return np.concatenate(wide)

    return Walk(
        rows([walk.accepted for walk in walks]),
        rows([walk.emitted for walk in walks]),
        np.concatenate([walk.num_accepted for walk in walks]),
    )


def in_rows(
    sampled: torch.Tensor, num_sampled: torch.Tensor, starts: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """[num_rows] a step's new tokens in the first rows of their requests; 0 elsewhere.

    Args:
        sampled: [num_reqs, k + 1].
        num_sampled: [num_reqs] of which so many count.
        starts: [num_reqs + 1] first row of each request.
        num_rows: Of the step.
    """
    place = torch.arange(sampled.shape[1], device=sampled.device)
    rows = (starts[:-1, None] + place).where(place < num_sampled[:, None], num_rows)
    flat = sampled.new_zeros(num_rows + 1)  # the last one takes what does not count
    flat.scatter_(0, rows.flatten().long(), sampled.flatten())
    return flat[:num_rows]


def chain_order(batch: DraftBatch, taken: Walk) -> np.ndarray:
    """[num_rows] int64: rows ordered so that a request's first ones gave its emitted tokens."""
    width = taken.emitted.shape[1]
    emitting = emitting_rows(batch, taken).reshape(batch.num_requests, width)
    order = np.arange(len(batch.request_of_row))
    for request, root in enumerate(batch.root_rows.tolist()):
        count = int(taken.num_accepted[request]) + 1
        order[root : root + count] = emitting[request, :count]
    return order


def _fillers(drafts: Any, device: torch.device) -> torch.Tensor | None:
    """[num_rows] bool: rows that only fill a draft up; None where there are none."""
    if all(token >= 0 for draft in drafts for token in draft):
        return None
    rows = [flag for draft in drafts for flag in (False, *(token < 0 for token in draft))]
    return torch.tensor(rows).to(device, non_blocking=True)


def _or(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first | second
