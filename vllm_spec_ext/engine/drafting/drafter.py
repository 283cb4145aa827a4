# SPDX-License-Identifier: Apache-2.0
"""What vLLM builds as its ``custom_class`` proposer: holds ours and keeps its books."""

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from vllm_spec_ext.engine.drafting.barrier import Barrier
from vllm_spec_ext.engine.drafting.ranks import Ranks
from vllm_spec_ext.engine.drafting.unread_tokens import UnreadSteps
from vllm_spec_ext.engine.models.batch_events import block_events
from vllm_spec_ext.engine.models.host import ModelHost
from vllm_spec_ext.engine.models.hosted_model import BatchRow
from vllm_spec_ext.engine.packed_projection import packed_projection
from vllm_spec_ext.engine.starting.scratch import NO_SCRATCH, ScratchNeed
from vllm_spec_ext.engine.starting.spec_config import SpecExtConfig
from vllm_spec_ext.engine.starting.target_tokenizer import load_tokenizer
from vllm_spec_ext.engine.v2.late_tables.design import scheduling, why_all_wait, why_waiting
from vllm_spec_ext.engine.views.view_host import ViewHost
from vllm_spec_ext.engine.watching.counts import WorkerCounts
from vllm_spec_ext.engine.watching.source_counters import SourceCounter
from vllm_spec_ext.environment import READ_ONLY, is_set
from vllm_spec_ext.online.session import OnlineSession, Origin
from vllm_spec_ext.online.target_ends import where_it_is
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.answer_ends import AnswerEnds
from vllm_spec_ext.proposers.base import (
    BaseProposer,
    DeviceTexts,
    Draft,
    EngineHandle,
    LateDrafter,
    Learns,
    RequestStep,
    StepContext,
    StepOutcome,
)
from vllm_spec_ext.proposers.late_drafting import why_on_host
from vllm_spec_ext.scorers.eta import warm_up as warm_up_eta
from vllm_spec_ext.scorers.walk.multi_step import warm_up as warm_up_multi_step
from vllm_spec_ext.scorers.walk.tree import warm_up as warm_up_walk
from vllm_spec_ext.top_columns import warm_up as warm_up_top_columns

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

logger = logging.getLogger("vllm.spec_ext")

_MAX_TIMINGS = 100_000


def _close(proposer: BaseProposer) -> None:
    """Let a proposer save what it keeps; those of third parties need no such method."""
    close = getattr(proposer, "close", None)
    if close is None:
        return
    try:
        close()
    except Exception:  # the engine ends, or goes on with a fresh proposer, all the same
        logger.exception("vllm-spec-ext: a proposer could not be closed")


class Drafter:
    """Owns the proposer of one engine; the runner mixin is its only caller.

    With tensor parallelism rank 0 alone has a proposer, see :mod:`.ranks`.
    """

    ranks: Ranks
    _engine: EngineHandle
    _barrier: Barrier

    def __init__(self, vllm_config: "VllmConfig") -> None:
        """Called by vLLM's ``create_custom_proposer`` while the runner is being built."""
        spec_config = vllm_config.speculative_config
        assert isinstance(spec_config, SpecExtConfig)
        settings = spec_config.spec_ext
        self._vllm_config = vllm_config
        self._settings = settings
        self.info = registry.info(settings.method)
        self._num_draft_tokens = spec_config.num_speculative_tokens
        self._proposer = self._new_proposer()
        self._close_proposer: weakref.finalize[Any, Any] | None = None
        self.needs = self._proposer.needs
        self.models = ModelHost(spec_config.draft_models)
        self.views = ViewHost(spec_config.cache_views)
        self._chains_alone = False  # drafts late, whatever the options say of trees
        self.propose_us: deque[float] = deque(maxlen=_MAX_TIMINGS)
        parallel = vllm_config.parallel_config
        self._leads_replica = parallel.rank == 0 and not is_set(READ_ONLY)
        # The one that writes files.
        self._is_first_process = self._leads_replica and parallel.data_parallel_index == 0
        self.counts = WorkerCounts()
        """What the worker tells the front end, see :mod:`..watching.stat_channel`."""
        self._sources = SourceCounter(self.counts)
        self._ends = AnswerEnds()
        self.online: OnlineSession | None = None
        """Of rank 0, if the drafter learns while it serves."""
        self._close_online: weakref.finalize[Any, Any] | None = None
        self.late: LateDrafter | None = None
        """What drafts on the device, where the scheduler is asynchronous and the method can."""
        self.is_late = False
        """Drafts are looked up on the device, see :meth:`start_late`."""
        self.not_late_because: str | None = why_on_host(self.drafts_trees)
        self._is_async = bool(vllm_config.scheduler_config.async_scheduling)

    @property
    def drafts_trees(self) -> bool:
        """Whether drafts may branch, with the method's options; those made late do not."""
        return self._settings.drafts_trees and not self._chains_alone

    @property
    def scratch_need(self) -> ScratchNeed:
        """KV blocks beside those of requests; vLLM fixes the size of a block behind
        :meth:`load_model`."""
        if self._chains_alone:
            return NO_SCRATCH
        config = self._vllm_config
        return ScratchNeed.of_drafts(
            self.drafts_trees,
            self._num_draft_tokens,
            config.scheduler_config.max_num_seqs,
            config.cache_config.block_size if self.models or self.views else None,
        )

    @property
    def waits_because(self) -> str | None:
        """Why drafts are made behind each step's tokens; None: they are looked up late."""
        return why_waiting(self, self._settings)

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Called by vLLM once the target's weights are loaded."""
        model = self._vllm_config.model_config
        device = next(target_model.parameters()).device
        self.ranks = Ranks(get_tp_group(), device)
        self.models.load(
            self._vllm_config,
            self.ranks,
            target_model,
            device,
            self.counts,
            weights_change=self._settings.online is not None,
        )
        self.views.load(
            self._vllm_config, self.ranks, target_model, device, self.models.paged, self.counts
        )
        self._engine = EngineHandle(
            vocab_size=model.get_vocab_size(),
            max_model_len=model.max_model_len,
            max_num_seqs=self._vllm_config.scheduler_config.max_num_seqs,
            num_speculative_tokens=self._num_draft_tokens,
            model=model.model,
            load_tokenizer=partial(load_tokenizer, self._vllm_config.model_config),
            target=self.ranks.share_target(target_model),
            device=device,
            may_write_files=self._is_first_process,
            may_write_own_files=self._leads_replica,
            models=self.models.models,
            block_drafters=self.models.block_models,
            views=self.views.views,
            pack=packed_projection,
        )
        self._barrier = Barrier(self.info.name, self._engine.vocab_size)
        self.not_late_because, _ = self.ranks.lead(self._start_proposer)
        if self._is_async and self.waits_because is None:
            self._chains_alone = True
        warm_up_walk()
        if device.type == "cpu":
            warm_up_eta()
            warm_up_top_columns()
        if self.needs.distributions:
            warm_up_multi_step()
        if not self.ranks.leads:
            return
        logger.info(
            "vllm-spec-ext: method %s, up to %d draft tokens a step, %s, drafts %s, on %s, %s",
            self.info.name,
            self._num_draft_tokens,
            "lossless" if self._settings.lossless else f"NOT lossless ({self._settings.rule})",
            "trees" if self.drafts_trees else "chains",
            self._settings.runner,
            scheduling(
                None if self._is_async else self._settings.synchronous_because or "vLLM's choice",
                self.waits_because,
                may_be_async=device.type != "cpu" and self._vllm_config.use_v2_model_runner,
            ),
        )

    def warm_up(self) -> None:
        """The KV cache is there: run what would be slow in the first request."""
        model, device = self._vllm_config.model_config, self._engine.device
        states = torch.zeros(1, model.get_hidden_size(), dtype=model.dtype, device=device)
        self.models.warm_up(self.ranks, states)

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """vLLM checks that this exists; the runner mixin calls :meth:`draft` instead."""
        raise RuntimeError(
            "vllm-spec-ext: the engine runs without this plugin's worker class; "
            "leave --worker-cls out and start it again"
        )

    def draft(
        self,
        step: StepContext,
        outcomes: Sequence[StepOutcome],
        shadow_outcomes: Sequence[StepOutcome] = (),
    ) -> list[Draft]:
        """Report the last outcomes, then ask for drafts; on rank 0 only.

        Args:
            step: The requests.
            outcomes: Of the drafts that were verified in this step.
            shadow_outcomes: Of some that never were, see :mod:`.shadow_drafts`.

        Returns:
            One draft a request that the engine can schedule, whatever the proposer did.
        """
        start = time.perf_counter()
        refused_before = self._barrier.num_refused
        # Whatever the proposer writes into its step.
        requests, is_shadow = step.requests, step.is_shadow
        told = self._ends.restored([*outcomes, *shadow_outcomes])
        self._barrier.call("observe", lambda: self._proposer.observe(told), None)
        online = self.online
        if online is not None:
            self._barrier.call("online", lambda: online.verified(outcomes), None)
            self._barrier.call("online", online.begin_step, None)
        drafts: list[Draft] = []
        if requests:
            drafts = self._barrier.drafts(self._proposer.propose, step)
        drafts = self._ends.cut(requests, drafts)
        if online is not None and not is_shadow:
            self._barrier.call("online", lambda: online.drafted(requests, drafts), None)
            if self._is_first_process:
                self.counts.online(online.gauges())
        elapsed_us = (time.perf_counter() - start) * 1e6
        self.propose_us.append(elapsed_us)
        self._count(requests, outcomes, self._barrier.num_refused - refused_before)
        self._sources.verified(outcomes)
        num_drafted = sum(map(len, drafts))
        if is_shadow:
            self.counts.add(shadow_nodes=num_drafted)
        else:
            self._sources.drafted(requests, drafts)
            num_branching = sum([draft.parents is not None for draft in drafts])
            self.counts.add(drafted_nodes=num_drafted, branching_drafts=num_branching)
        self.counts.time(elapsed_us)
        return drafts

    def start_late(self) -> None:
        """Drafts are made on the device from now on; takes the memory that it needs there.

        With tensor parallelism that of rank 0, which has the proposer.
        """
        self.is_late = True
        if not self.ranks.leads:
            return
        assert self.late is not None
        assert self._engine.device is not None
        self.late.start(self._engine.device)
        self.needs = self._proposer.needs  # of what it drafts late

    def draft_late(
        self, requests: Sequence[RequestStep], texts: DeviceTexts
    ) -> torch.Tensor | None:
        """Ask for drafts behind tokens that only the device has; None if that failed; on rank 0.

        Args:
            requests: As far as the host knows them.
            texts: On the device.
        """
        late, device = self.late, self._engine.device
        assert late is not None
        assert device is not None
        refused_before = self._barrier.num_refused
        shape = len(requests), self._num_draft_tokens
        found = self._barrier.late_drafts(lambda: late.draft(requests, texts), shape, device)
        if found is None:
            self.counts.add(refused_drafts=self._barrier.num_refused - refused_before)
        return found

    def _count(
        self,
        requests: Sequence[RequestStep],
        outcomes: Sequence[StepOutcome],
        num_refused: int,
    ) -> None:
        # The drafts made now are of the next step, which a request's last one never has.
        verified: set[str] = set()
        num_steps = num_tokens = num_drafted = num_verified = num_accepted = 0
        for outcome in outcomes:
            verified.add(outcome.request_id)
            num_verified += outcome.num_drafted
            num_accepted += outcome.num_accepted
        for request in requests:
            num_new = len(request.new_tokens)
            if request.num_output_tokens > num_new:  # a prefill's step gives one token anyway
                num_steps += request.num_steps
                num_tokens += num_new
                num_drafted += request.request_id in verified
        self.counts.add(
            steps=num_steps,
            emitted_tokens=num_tokens,
            empty_drafts=num_steps - num_drafted,
            verified_drafts=len(verified),
            verified_nodes=num_verified,
            accepted_nodes=num_accepted,
            refused_drafts=num_refused,
        )

    def count_unread(self, num_tokens: int) -> None:
        """Count steps of requests that left before they were read; each gave one token."""
        if num_tokens:
            self.counts.add(steps=num_tokens, emitted_tokens=num_tokens, empty_drafts=num_tokens)

    def count_held_back(self, num_requests: int) -> None:
        """Count requests that may draft less than they have room for, to save time."""
        self.counts.add(held_back=num_requests)

    def guarded(self, what: str, call: Callable[[], None]) -> None:
        """Do something for the proposer whose failure must not end the engine."""
        self._barrier.call(what, call, None)

    def begin_models(self, rows: Sequence[BatchRow], unread: UnreadSteps) -> None:
        """The target ran these rows, and models and views may read them.

        Args:
            rows: Of the step that is read.
            unread: Those that went by before.
        """
        self.guarded("reading", lambda: self.models.begin_step(rows, unread))
        self.guarded("reading", lambda: self.views.begin_step(rows))

    def end_models(self, could_draft: bool) -> float:
        """Drafting is over: models read along, and what was used for drafts is free again.

        Args:
            could_draft: Whether any request had room for a draft, whatever they may cost.

        Returns:
            Seconds that went into unfinished prompts, which are no cost of drafts.
        """
        try:
            return self._barrier.call("reading", lambda: self.models.end_step(could_draft), 0.0)
        finally:
            self.views.end_step()

    def blocks_change(self, scheduler_output: "SchedulerOutput", gone: Sequence[str]) -> None:
        """Tell draft models and views which KV blocks get other contents in the step to come.

        Args:
            scheduler_output: Of that step.
            gone: Requests that finished, were preempted, or go on with other tokens.
        """
        if (self.models or self.views) and self.ranks.leads:
            events = block_events(scheduler_output, gone, self.models.group)
            if events.change_hands:
                self.guarded("reading", self.models.settle)
            self.models.update(events)
            self.views.update(events)

    def finish(self, request_ids: Sequence[str]) -> None:
        """Free the proposer's state of these requests."""
        if self.ranks.leads:
            self._sources.forget(request_ids)
            self._ends.forget(request_ids)
            online = self.online
            if online is not None:
                self._barrier.call("online", lambda: online.finish(request_ids), None)
            self._barrier.call("finish", lambda: self._proposer.finish(request_ids), None)

    def reset(self) -> None:
        """Forget everything learned from requests: a fresh proposer, warmed up anew.

        As after a restart: what the old one saved when it was closed, the new one may read. But
        one that learned online drafts with the weights that it was started with.
        """
        self.close()
        self._proposer = self._new_proposer()
        self.not_late_because, _ = self.ranks.lead(partial(self._start_proposer, fresh=True))

    def close(self) -> None:
        """End the proposer's life; calls after the first do nothing."""
        if self._close_online is not None:
            self._close_online()
            self.online = self._close_online = None
        if self._close_proposer is not None:
            self._close_proposer()

    def _new_proposer(self) -> BaseProposer:
        return registry.load(self._settings.method)(self._settings.options)

    def _start_proposer(self, fresh: bool = False) -> tuple[str | None, list[torch.Tensor]]:
        """Returns why it does not draft late, None if it does, for all ranks; and no tensors."""
        not_late_because = self.not_late_because
        self._proposer.start(self._engine)
        self._start_online(fresh)
        make_late = getattr(self._proposer, "late_drafter", None)  # not all are BaseProposers
        may_be_late = self._is_async and why_all_wait(self, self._settings) is None
        if may_be_late and make_late is not None:
            made = make_late(self._engine) or not_late_because
            self.late = None if isinstance(made, str) else made
            not_late_because = made if isinstance(made, str) else None
            if self.is_late:  # a fresh proposer in the place of one that did
                self.start_late()
        # Where nobody calls close(), when this object goes or the interpreter ends.
        self._close_proposer = weakref.finalize(self, _close, self._proposer)
        return not_late_because, []

    def _start_online(self, fresh: bool) -> None:
        """Open the folder in which the drafter learns, if it does; on rank 0."""
        settings, proposer = self._settings, self._proposer
        if settings.online is None:
            return
        assert isinstance(proposer, Learns)
        origin = Origin(
            method=settings.method,
            target=self._target_name(),
            vocab_size=self._engine.vocab_size,
            folder=proposer.drafter_folder(settings.options),
            read_files=partial(proposer.drafter_files, settings.options),
            drafting=proposer.student_facts,
        )
        first = self._is_first_process
        self.online = OnlineSession(settings.online, origin, proposer, is_first=first, fresh=fresh)
        self._close_online = weakref.finalize(self, self.online.close)

    def _target_name(self) -> str:
        """From which a trainer reads."""
        config = self._vllm_config
        revision, cache = config.model_config.revision, config.load_config.download_dir
        return where_it_is(self._engine.model, revision, cache)
