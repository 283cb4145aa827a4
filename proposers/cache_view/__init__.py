# SPDX-License-Identifier: Apache-2.0
"""Self-speculation over a part of the KV cache (the lower half of TriForce, Sun et al. 2024).

The target drafts for itself and sees only some pages of its cache: with long contexts a step takes
the time of reading KV, and a pass over a thousand tokens of it is much shorter. The full cache
verifies, so the text is the target's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np

from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers.base import (
    EMPTY_DRAFT,
    BaseProposer,
    Draft,
    EngineHandle,
    Needs,
    RequestStep,
    StepContext,
    StepOutcome,
    TargetView,
    ViewSpec,
    proposer,
)
from vllm_spec_ext.proposers.cache_view.gate import ViewGate
from vllm_spec_ext.proposers.cache_view.options import CacheViewOptions
from vllm_spec_ext.proposers.view_options import OFF_ON_CPUS

if TYPE_CHECKING:
    import torch

_VIEW_NUMBER = 64  # of the draws; draft models have smaller numbers


@dataclass
class _Chain:
    """The draft of one request."""

    request: RequestStep
    room: int
    is_drawn: bool
    tokens: list[int] = field(default_factory=list)
    probs: "list[torch.Tensor]" = field(default_factory=list)
    path_probs: list[float] = field(default_factory=list)
    is_open: bool = True

    @property
    def last(self) -> int:
        """The token behind which the next one is drafted."""
        return self.tokens[-1] if self.tokens else int(self.request.token_ids[-1])


@proposer(
    "cache_view",
    summary="The target drafts for itself, and sees only a part of its KV cache meanwhile.",
    options=CacheViewOptions,
    num_speculative_tokens=6,
    best_for="long contexts on GPUs, where reading KV takes most of a step: from about 27k tokens "
    "of a 7B model with full heads (predicted; not measured)",
    cost="a forward pass of the target for each draft token, over the weights and the KV in sight",
    off_on_cpus=OFF_ON_CPUS.format(what="it drafts"),
)
class CacheView(BaseProposer):
    """A chain that the target drafts over one view."""

    def __init__(self, options: MethodOptions) -> None:
        """Keep the options; the view comes with :meth:`start`."""
        super().__init__(options)
        self._options = cast(CacheViewOptions, options)
        self.needs = Needs(distributions=self._options.draw)
        self._view: TargetView | None = None

    @classmethod
    def views(cls, options: MethodOptions) -> Sequence[ViewSpec]:
        """The one that it drafts over."""
        asked = cast(CacheViewOptions, options)
        return [asked.spec("cache_view", on_cpus=asked.draft_on_cpu)]

    def start(self, engine: EngineHandle) -> None:
        """Take the view of the target.

        Raises:
            SpecExtError: There is no engine, as in a replay of recorded texts.
        """
        views = self.loaded_views(engine)
        if views is None:
            return
        (self._view,) = views
        depth = engine.num_speculative_tokens
        self._gate = ViewGate(self._view, depth, self._options.adaptive_length)

    def propose(self, step: StepContext) -> list[Draft]:
        """One chain a request; no pass where none pays."""
        import torch

        drafts = [EMPTY_DRAFT] * len(step.requests)
        if self._view is None:
            return drafts
        rows = [
            row
            for row, request in enumerate(step.requests)
            if request.room > 0 and len(request.token_ids) >= self._options.min_context
        ]
        kinds = [
            self._gate.kind(step.requests[row], self._draws(step.requests[row])) for row in rows
        ]
        for row in rows:
            self._gate.forget(step.requests[row].request_id)  # a draft that had no outcome
        decision = self._gate.decide(step, rows, kinds)
        if not decision.rows:
            return drafts
        with torch.inference_mode():
            made, num_passes = self._draft(step, decision.rows, decision.depth)
        drafts_of = dict(zip(rows, kinds, strict=True))
        for row, chain in made.items():
            drafts[row] = _as_draft(chain)
        self._gate.drafted(step, list(made), [drafts_of[row] for row in made], num_passes)
        return drafts

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Learn how far drafts are right."""
        if self._view is None:
            return
        for outcome in outcomes:
            self._gate.observe(outcome)

    def finish(self, request_ids: Sequence[str]) -> None:
        """Forget the outcomes that will not come."""
        if self._view is None:
            return
        for request_id in request_ids:
            self._gate.forget(request_id)

    def _draws(self, request: RequestStep) -> bool:
        return self._options.draw and request.may_be_drawn

    def _draft(
        self, step: StepContext, rows: Sequence[int], depth: int
    ) -> tuple[dict[int, _Chain], int]:
        """Chains of the requests that could take part, and the passes that they took."""
        assert self._view is not None
        round_ = self._view.begin(step.requests, rows)
        chains = [
            # The last token of a chain is drafted, and not read.
            _Chain(request, min(request.room, room + 1, depth), self._draws(request))
            for request, room in zip(
                (step.requests[row] for row in round_.rows), round_.rooms, strict=True
            )
        ]
        least = step.min_probability if self._options.adaptive_length else None
        num_passes = 0
        while True:
            going_on = [
                chain for chain in chains if chain.is_open and len(chain.tokens) < chain.room
            ]
            if not going_on:
                return dict(zip(round_.rows, chains, strict=True)), num_passes
            taking_part = set(map(id, going_on))
            logits = round_.run(
                [[chain.last] if id(chain) in taking_part else [] for chain in chains]
            )
            num_passes += 1
            _go_on(going_on, logits, least or 0.0)


def _go_on(chains: Sequence[_Chain], logits: "torch.Tensor", least: float) -> None:
    """Add a token to each chain.

    Args:
        chains: One for each row of logits.
        logits: [len(chains), vocab].
        least: A chosen token whose path is less likely ends its chain, and is left out. A drawn
            one stays: whether it is drafted must not depend on what was drawn.
    """
    import torch

    from vllm_spec_ext.proposers.growth.drawing import distributions, draw, uniforms

    drawn = [row for row, chain in enumerate(chains) if chain.is_drawn]
    chosen = [row for row, chain in enumerate(chains) if not chain.is_drawn]
    if drawn:
        requests = [chains[row].request for row in drawn]
        probs = distributions(
            logits[drawn],
            [request.temperature for request in requests],
            [request.top_k for request in requests],
            [request.top_p for request in requests],
        )
        numbers = np.stack(
            [
                uniforms(
                    chain.request.request_id,
                    len(chain.request.token_ids) + len(chain.tokens),
                    _VIEW_NUMBER,
                    1,
                )
                for chain in (chains[row] for row in drawn)
            ]
        )
        tokens = draw(probs, numbers)[:, 0].tolist()
        own = probs.gather(1, torch.tensor(tokens, device=probs.device)[:, None])[:, 0].tolist()
        for row, token, row_probs, share in zip(drawn, tokens, probs, own, strict=True):
            _add(chains[row], token, share)
            chains[row].probs.append(row_probs)
    if chosen:
        best = logits[chosen].softmax(dim=-1).max(dim=-1)
        for row, token, share in zip(
            chosen, best.indices.tolist(), best.values.tolist(), strict=True
        ):
            chain = chains[row]
            path = share * (chain.path_probs[-1] if chain.path_probs else 1.0)
            if path < least:
                chain.is_open = False
            else:
                _add(chain, token, share)


def _add(chain: _Chain, token: int, share: float) -> None:
    before = chain.path_probs[-1] if chain.path_probs else 1.0
    chain.tokens.append(token)
    chain.path_probs.append(before * share)


def _as_draft(chain: _Chain) -> Draft:
    import torch

    if not chain.tokens:
        return EMPTY_DRAFT
    return Draft(
        np.array(chain.tokens, np.int32),
        probs=torch.stack(chain.probs) if chain.is_drawn else None,
        path_probs=np.array(chain.path_probs, np.float32),
    )
