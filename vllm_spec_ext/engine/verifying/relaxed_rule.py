# SPDX-License-Identifier: Apache-2.0
"""Runs the engine's relaxed acceptance rule, if it has one, on the rows of a step."""

import logging
from collections.abc import Sequence

import numpy as np
import torch

from vllm_spec_ext.engine.requests.state import RequestState
from vllm_spec_ext.engine.starting.spec_config import MethodSettings
from vllm_spec_ext.engine.verifying.draft_batch import DraftBatch
from vllm_spec_ext.engine.verifying.node_sampling import StepRule
from vllm_spec_ext.scorers.build import build_scorer, warm_up
from vllm_spec_ext.scorers.rules.base import Verification

logger = logging.getLogger("vllm.spec_ext")


class RelaxedRule:
    """The rule of one engine; built only where it is lossy."""

    def __init__(self, settings: MethodSettings, vocab_size: int) -> None:
        """Build and compile the rule, and warn once that output may differ."""
        self._scorer = build_scorer(settings.rule, allow_lossy=True, vocab_size=vocab_size)
        warm_up(self._scorer)
        logger.warning(
            "vllm-spec-ext: the acceptance rule is %s; the output may differ from the target's own",
            settings.rule,
        )

    def of_step(
        self,
        batch: DraftBatch,
        requests: Sequence[RequestState],
        greedy: Sequence[bool],
        device: torch.device,
    ) -> StepRule:
        """The rule for one step.

        Args:
            batch: Its rows and nodes.
            requests: The batch's requests, which may narrow the rule.
            greedy: Requests at temperature 0.
            device: Of the logits.
        """
        request_of_node = np.repeat(np.arange(batch.num_requests), np.diff(batch.node_starts))
        rows = batch.root_rows[request_of_node] + 1 + batch.parents
        exact_only = np.zeros(len(batch.tokens), bool)
        for request, state in enumerate(requests):
            first, end = batch.node_starts[request : request + 2]
            exact_only[first:end] = np.isin(batch.tokens[first:end], state.exact_ids)
        scorer = self._scorer
        if any(state.rule is not None for state in requests):
            scorer = scorer.for_batch([state.rule for state in requests], device)
        sampled = ~np.asarray(greedy, bool)[request_of_node]

        def tolerated(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            def on_device(values: np.ndarray) -> torch.Tensor:
                return torch.from_numpy(values).to(logits.device)

            verification = Verification(
                logits=logits,
                draft_token_ids=on_device(batch.tokens),
                depths=on_device(batch.depth_of_row[rows]),
                request_index=on_device(request_of_node),
                exact_only=on_device(exact_only),
                rows=on_device(rows),
                parents=on_device(batch.parents),
                sampled=on_device(sampled),
            )
            return scorer.tolerated(verification), verification.draft_logits

        return tolerated
