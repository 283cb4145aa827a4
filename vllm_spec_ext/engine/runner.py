# SPDX-License-Identifier: Apache-2.0
"""The runner mixin: turns vLLM's V1 model runner into one that feeds our proposers.

Every override calls ``super()`` or replaces a step that vLLM reserves for the drafter; none copies
vLLM code. Methods and line numbers are those of vLLM 0.32 v1/worker/gpu_model_runner.py.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

from vllm_spec_ext.config import RequestOptions
from vllm_spec_ext.engine.drafter import Drafter
from vllm_spec_ext.engine.request_options import parse_request
from vllm_spec_ext.errors import RequestOptionError
from vllm_spec_ext.proposers.base import RequestStep, StepContext, StepOutcome

logger = logging.getLogger("vllm.spec_ext")


class SpecRunnerMixin:
    """Mixed in front of ``CPUModelRunner`` or ``GPUModelRunner`` by :func:`specialise`."""

    # Attributes of vLLM's runner that the overrides read.
    drafter: Drafter
    input_batch: Any
    requests: dict[str, Any]
    max_model_len: int

    _request_options: dict[str, RequestOptions]

    def init_spec_ext(self) -> None:
        """State of our own; called once, right after the runner was specialised."""
        self._request_options = {}

    def _update_states(self, scheduler_output: Any) -> Callable[[], None] | None:
        """l.1172: requests come and go; free the proposer's state of those that went."""
        gone = set(scheduler_output.finished_req_ids)
        gone.update(scheduler_output.preempted_req_ids or ())
        if gone:
            self.drafter.finish(sorted(gone))
            for request_id in gone:
                self._request_options.pop(request_id, None)
        return super()._update_states(scheduler_output)  # type: ignore[misc]

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        """l.3437: a step without any draft is sampled plainly.

        vLLM sends such steps through its rejection sampler too, which on CPU fails on an empty
        batch of draft rows when a request asks for top-k (v1/sample/ops/topk_topp_sampler.py:529).
        """
        if spec_decode_metadata is not None and spec_decode_metadata.max_spec_len == 0:
            spec_decode_metadata = None
        return super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """l.4288: vLLM drops the drafts of *all* requests when one nears ``max_model_len``.

        Ours are limited request by request instead, see :meth:`_room`.
        """
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> list[list[int]]:
        """l.4748: draft tokens of each request of the batch, in batch order.

        Args:
            sampled_token_ids: New tokens of each request; empty for rows of an unfinished prefill.
            sample_hidden_states: [num_sampled_rows, hidden] of the target's final layer.
        """
        budget = scheduler_output.num_spec_tokens_to_schedule
        rows = [row for row, tokens in enumerate(sampled_token_ids) if tokens]
        steps = [self._request_step(row, sampled_token_ids[row], budget) for row in rows]
        hidden = None
        if self.drafter.needs.hidden_states and rows:
            last = self._last_rows(sampled_token_ids, spec_decode_metadata)
            hidden = sample_hidden_states[[last[row] for row in rows]]
        outcomes = self._outcomes(scheduler_output, sampled_token_ids)
        drafts = self.drafter.draft(StepContext(steps, hidden), outcomes)
        result: list[list[int]] = [[] for _ in sampled_token_ids]
        for row, step, draft in zip(rows, steps, drafts, strict=True):
            result[row] = draft.tokens[: step.room].tolist()
        return result

    def _request_step(self, row: int, new_tokens: list[int], budget: int) -> RequestStep:
        batch = self.input_batch
        request_id = batch.req_ids[row]
        num_tokens = int(batch.num_tokens_no_spec[row])
        num_prompt_tokens = int(batch.num_prompt_tokens[row])
        params = self.requests[request_id].sampling_params
        options = self._options_of(request_id, params)
        if options.max_draft_tokens is not None:
            budget = min(budget, options.max_draft_tokens)
        num_left = (params.max_tokens or self.max_model_len) - (num_tokens - num_prompt_tokens)
        return RequestStep(
            request_id=request_id,
            token_ids=batch.token_ids_cpu[row, :num_tokens],
            num_prompt_tokens=num_prompt_tokens,
            new_tokens=new_tokens,
            # The bonus token needs a place too, so one less than what is left.
            room=max(0, min(budget, num_left - 1, self.max_model_len - num_tokens - 1)),
            options=options,
            temperature=params.temperature,
        )

    def _options_of(self, request_id: str, params: Any) -> RequestOptions:
        options = self._request_options.get(request_id)
        if options is None:
            schema = self.drafter.info.request_options
            try:
                options = parse_request(schema, params.extra_args, self.drafter.info.name)
            except RequestOptionError as error:
                # The front end refuses these; only a request that went around it comes here.
                logger.warning("vllm-spec-ext: %s; drafting with defaults", error)
                options = schema()
            self._request_options[request_id] = options
        return options

    @staticmethod
    def _last_rows(sampled_token_ids: list[list[int]], spec_decode_metadata: Any) -> list[int]:
        """Row of `sample_hidden_states` that produced each request's last new token."""
        if spec_decode_metadata is None:
            return list(range(len(sampled_token_ids)))
        rows, offset = [], 0
        counts = spec_decode_metadata.num_draft_tokens
        for num_drafted, tokens in zip(counts, sampled_token_ids, strict=True):
            rows.append(offset + max(len(tokens), 1) - 1)
            offset += num_drafted + 1
        return rows

    def _outcomes(
        self, scheduler_output: Any, sampled_token_ids: list[list[int]]
    ) -> list[StepOutcome]:
        outcomes = []
        for request_id, tokens in scheduler_output.scheduled_spec_decode_tokens.items():
            # Placeholders (-1) are the scheduler's padding of a resumed request, not a draft.
            num_drafted = sum(token >= 0 for token in tokens)
            row = self.input_batch.req_id_to_index.get(request_id)
            if row is None or not num_drafted or not sampled_token_ids[row]:
                continue
            outcomes.append(StepOutcome(request_id, num_drafted, len(sampled_token_ids[row]) - 1))
        return outcomes


def specialise(runner: Any) -> None:
    """Give a freshly built V1 model runner our overrides.

    vLLM's CPU worker builds its runner in ``init_device`` and offers no factory to override
    (vLLM 0.32 v1/worker/cpu_worker.py:161), so the class is exchanged after construction.
    """
    base = type(runner)
    runner.__class__ = type(f"Spec{base.__name__}", (SpecRunnerMixin, base), {})
    runner.init_spec_ext()
