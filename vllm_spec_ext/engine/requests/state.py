# SPDX-License-Identifier: Apache-2.0
"""What the engine keeps of a request while it runs: its own options, and its next draft."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_spec_ext.engine.drafting.scheduled_draft import ScheduledDraft
from vllm_spec_ext.engine.requests.options import (
    check_options,
    has_options,
    is_session,
    parse_eta,
    parse_share_group,
)
from vllm_spec_ext.engine.starting.spec_config import MethodSettings
from vllm_spec_ext.engine.verifying.drawn_drafts import DraftDistributions
from vllm_spec_ext.options import RequestOptions
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import RequestFacts
from vllm_spec_ext.proposers.draft_tree import is_branching
from vllm_spec_ext.scorers.narrow import EXACT, narrow
from vllm_spec_ext.scorers.options import EtaOptions, ScorerOptions

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from vllm_spec_ext.engine.spec_runner import SpecRunner

logger = logging.getLogger("vllm.spec_ext")


class Sampling(NamedTuple):
    """Of a request, as :class:`RequestStep` tells it, and in that order."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None


_GREEDY = Sampling()


@dataclass(slots=True)
class RequestState:
    """What a request asks for, read once, and the draft that waits for its step."""

    options: RequestOptions
    rule: ScorerOptions | None  # None: the server's own
    eta: EtaOptions | None
    exact_ids: NDArray[np.int64]  # stop and EOS ids: only an exact match accepts these
    share_group: str | None = None  # see RequestStep
    reads_history: bool = False  # its sampling parameters look at the tokens before a row
    ends: frozenset[int] = frozenset()  # stop tokens, with which an answer ends
    is_session: bool = False  # its input comes in pieces
    sampling: Sampling = _GREEDY
    max_tokens: int | None = None  # of its answer
    has_grammar: bool = False
    num_chosen_logprobs: int = 0  # tokens whose log-probabilities it chose to have
    over_at: int | None = None  # tokens up to the end of its answer, once that was seen
    draft: ScheduledDraft | None = None
    probs: torch.Tensor | None = None  # [num_nodes, vocab] that the draft was drawn from

    def most_drafted(self, max_draft_tokens: int) -> int:
        """Most draft tokens by the request's options, where the engine allows so many."""
        own = self.options.max_draft_tokens
        if not self.options.enabled:
            return 0
        return max_draft_tokens if own is None else min(max_draft_tokens, own)

    def _draft_of(self, scheduled: Sequence[int]) -> tuple[ScheduledDraft | None, int]:
        """The draft and how much of it is scheduled; None if it is not what was scheduled.

        vLLM also schedules placeholders (-1): alone, or behind a draft that is too short.
        """
        draft, size = self.draft, len(scheduled)
        while size and scheduled[size - 1] < 0:
            size -= 1
        if draft is None or not size or draft.tokens[:size] != list(scheduled[:size]):
            return None, 0
        return draft, size

    def parents_of(self, scheduled: Sequence[int]) -> list[int] | None:
        """Parents of the scheduled part of the draft; None if that part is a chain."""
        if self.draft is None or self.draft.parents is None:
            return None
        draft, size = self._draft_of(scheduled)
        if draft is None or draft.parents is None:
            return None
        if size == len(draft.parents):
            return draft.parents  # which has branches, or it would be kept as a chain
        parents = draft.parents[:size]
        return parents if is_branching(parents) else None

    def distributions_of(self, scheduled: Sequence[int]) -> DraftDistributions | None:
        """What the scheduled part of the draft was drawn from; None if it was chosen."""
        draft, size = self._draft_of(scheduled)
        if draft is None or draft.drawn is None or self.probs is None:
            return None
        return DraftDistributions(self.probs[:size], draft.drawn)


class KnownRequest(NamedTuple):
    """A request of the batch, as its runner knows it."""

    token_ids: NDArray[np.int32]  # [num_tokens] verified so far, the prompt first
    num_prompt_tokens: int
    params: "SamplingParams"


class RequestStates:
    """The states of all requests that the runner knows."""

    def __init__(self, settings: MethodSettings) -> None:
        """Start without any; `settings` are the engine's."""
        self._settings = settings
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def of(self, request_id: str, runner: "SpecRunner") -> RequestState:
        """The state of a request, read from its parameters at first."""
        state = self._states.get(request_id)
        if state is None:
            request = runner.known(request_id)
            facts = RequestFacts(
                prompt=request.token_ids[: request.num_prompt_tokens],
                vocab_size=runner.vllm_config.model_config.get_vocab_size(),
                max_model_len=runner.max_model_len,
                is_session=is_session(request.params.extra_args),
            )
            state = self._states[request_id] = read_request(request.params, self._settings, facts)
        return state

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests that are gone."""
        for request_id in request_ids:
            self._states.pop(request_id, None)


def read_request(
    params: "SamplingParams", settings: MethodSettings, facts: RequestFacts
) -> RequestState:
    """Parse a request's ``SamplingParams``.

    The front end has refused bad options already; what went around it runs with defaults. Nothing
    a request says may raise here: that would end the engine, and all other requests with it. One
    that may have asked for less than a relaxed rule is verified exactly.
    """
    options, rule, eta = registry.info(settings.method).request_options(), None, None
    if has_options(params.extra_args):
        try:
            options, rule = _read_options(params, settings, facts)
        except Exception as error:
            rule = EXACT
            logger.warning("vllm-spec-ext: %s; the request runs with defaults", error)
        try:
            eta = parse_eta(params.extra_args)
        except Exception as error:
            logger.warning("vllm-spec-ext: %s; the request runs without", error)
    if params.max_tokens == 1:
        # No answer to draft from later. Beam search sends such a request for each token of each
        # beam, without the options of the user's own (vLLM 0.32 entrypoints/generate/beam_search).
        options = options.model_copy(update={"remember": False})
    exact = set(params.all_stop_token_ids)
    if params.eos_token_id is not None:
        exact.add(params.eos_token_id)
    exact_ids = np.array(sorted(exact), np.int64)
    reads_history = bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.bad_words
        or params.thinking_token_budget is not None
    )
    share_group = parse_share_group(params.extra_args)
    ends = frozenset({*(params.stop_token_ids or ()), params.eos_token_id} - {None})
    in_pieces = is_session(params.extra_args)
    if in_pieces and params.repetition_detection is not None:  # where that ends it, vLLM knows
        options = options.model_copy(update={"enabled": False})
    return RequestState(
        options,
        rule,
        eta,
        exact_ids,
        share_group,
        reads_history,
        ends,
        in_pieces,
        Sampling(params.temperature, params.top_k, params.top_p, params.seed),
        params.max_tokens,
        params.structured_outputs is not None,
        len(params.logprob_token_ids or ()),
    )


def _read_options(
    params: "SamplingParams", settings: MethodSettings, facts: RequestFacts
) -> tuple[RequestOptions, ScorerOptions | None]:
    options = check_options(settings, params.extra_args, facts)
    rule = None if options.scorer is None else narrow(settings.rule, options.scorer)
    return options, rule
