# SPDX-License-Identifier: Apache-2.0
"""What vLLM builds as its ``custom_class`` proposer: holds ours and keeps its books."""

import logging
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from vllm_spec_ext.engine.shared_counters import CounterWriter
from vllm_spec_ext.engine.spec_config import SpecExtConfig
from vllm_spec_ext.engine.target_tokenizer import load_tokenizer
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import Draft, EngineHandle, StepContext, StepOutcome

logger = logging.getLogger("vllm.spec_ext")

_MAX_TIMINGS = 100_000
_MAX_TREES = 16  # requests that may draft branches in the same step before trees get smaller


def num_scratch_blocks(tree: bool, num_draft_tokens: int, max_num_seqs: int) -> int:
    """KV blocks set aside for the branches of draft trees.

    A segment of a tree needs one block, two if it crosses a block border, and a tree rarely has
    more than half as many segments as nodes. Where the blocks do not suffice, trees are cut.
    """
    return min(max_num_seqs, _MAX_TREES) * num_draft_tokens if tree else 0


class Drafter:
    """Owns the proposer of one engine; the runner mixin is its only caller."""

    def __init__(self, vllm_config: Any) -> None:
        """Called by vLLM's ``create_custom_proposer`` while the runner is being built."""
        spec_config = vllm_config.speculative_config
        assert isinstance(spec_config, SpecExtConfig)
        settings = spec_config.spec_ext
        self._vllm_config = vllm_config
        self._settings = settings
        self.info = registry.info(settings.method)
        self._num_draft_tokens = spec_config.num_speculative_tokens
        self._options = settings.options
        self._proposer = registry.load(settings.method)(settings.options)
        self._engine: EngineHandle | None = None
        self.needs = self._proposer.needs
        self.num_scratch_blocks = num_scratch_blocks(
            self.info.tree,
            self._num_draft_tokens,
            vllm_config.scheduler_config.max_num_seqs,
        )
        self.propose_us: deque[float] = deque(maxlen=_MAX_TIMINGS)
        parallel = vllm_config.parallel_config
        # All ranks of a group draft alike; one of them counts.
        folder = settings.counter_folder if parallel.rank == 0 else None
        self._counters = CounterWriter(folder, parallel.data_parallel_index)

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Called by vLLM once the target's weights are loaded."""
        model = self._vllm_config.model_config
        self._engine = EngineHandle(
            vocab_size=model.get_vocab_size(),
            max_model_len=model.max_model_len,
            max_num_seqs=self._vllm_config.scheduler_config.max_num_seqs,
            num_speculative_tokens=self._num_draft_tokens,
            model=model.model,
            load_tokenizer=partial(load_tokenizer, self._vllm_config.model_config),
            target=target_model,
            device=next(target_model.parameters()).device,
        )
        self._proposer.start(self._engine)
        logger.info(
            "vllm-spec-ext: method %s, up to %d draft tokens a step, %s, drafts %s",
            self.info.name,
            self._num_draft_tokens,
            "lossless" if self._settings.lossless else f"NOT lossless ({self._settings.rule})",
            "trees" if self.info.tree else "chains",
        )

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """vLLM checks that this exists; the runner mixin calls :meth:`draft` instead."""
        raise RuntimeError(
            "vllm-spec-ext: the engine runs without this plugin's worker class; "
            "leave --worker-cls out and start it again"
        )

    def draft(self, step: StepContext, outcomes: Sequence[StepOutcome]) -> list[Draft]:
        """Report the last outcomes, then ask for drafts; every draft is cut to its room."""
        start = time.perf_counter()
        self._proposer.observe(outcomes)
        drafts = self._proposer.propose(step) if step.requests else []
        elapsed_us = (time.perf_counter() - start) * 1e6
        self.propose_us.append(elapsed_us)
        if len(drafts) != len(step.requests):
            raise RuntimeError(
                f"proposer {self.info.name!r} returned {len(drafts)} drafts for "
                f"{len(step.requests)} requests; expected one for each"
            )
        self._check_laws(drafts)
        self._count(step, outcomes, drafts)
        self._counters.time(elapsed_us)
        return drafts

    def _check_laws(self, drafts: Sequence[Draft]) -> None:
        assert self._engine is not None
        for draft in drafts:
            expected = (len(draft), self._engine.vocab_size)
            if draft.probs is not None and tuple(draft.probs.shape) != expected:
                raise RuntimeError(
                    f"proposer {self.info.name!r} returned probs of shape "
                    f"{tuple(draft.probs.shape)}; expected {expected}, one law for each node"
                )

    def _count(
        self, step: StepContext, outcomes: Sequence[StepOutcome], drafts: Sequence[Draft]
    ) -> None:
        decoded = [  # not the prefill's step, which gives one token anyway
            request
            for request in step.requests
            if request.num_output_tokens > len(request.new_tokens)
        ]
        # The drafts made now are of the next step, which a request's last one never has.
        judged = {outcome.request_id for outcome in outcomes}
        self._counters.add(
            steps=len(decoded),
            emitted_tokens=sum(len(request.new_tokens) for request in decoded),
            empty_drafts=sum(request.request_id not in judged for request in decoded),
            verified_drafts=len(judged),
            drafted_nodes=sum(map(len, drafts)),
            verified_nodes=sum(outcome.num_drafted for outcome in outcomes),
            accepted_nodes=sum(outcome.num_accepted for outcome in outcomes),
            branching_drafts=sum(draft.parents is not None for draft in drafts),
        )

    def count_held_back(self, num_requests: int) -> None:
        """Count requests that may draft less than they have room for, to save time."""
        self._counters.add(held_back=num_requests)

    def finish(self, request_ids: Sequence[str]) -> None:
        """Free the proposer's state of these requests."""
        self._proposer.finish(request_ids)

    def reset(self) -> None:
        """Forget everything learned from requests: a fresh proposer, warmed up anew."""
        assert self._engine is not None
        self._proposer = registry.load(self.info.name)(self._options)
        self._proposer.start(self._engine)
