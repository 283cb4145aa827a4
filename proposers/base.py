# SPDX-License-Identifier: Apache-2.0
"""What a proposer is; all that a method of one's own imports stands here.

A proposer never sees the engine. The adapter (:mod:`vllm_spec_ext.engine.drafting`) builds a
:class:`StepContext` after each target step and turns the returned drafts into scheduled tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import MethodOptions, RequestOptions
from vllm_spec_ext.proposers.description import Needs, ProposerInfo, proposer
from vllm_spec_ext.proposers.late_drafting import DeviceTexts, LateDrafter, why_on_host
from vllm_spec_ext.proposers.models import Branch, DraftModel, ModelSpec
from vllm_spec_ext.proposers.records import (
    EMPTY_DRAFT,
    UNSALTED,
    Draft,
    Drawn,
    EngineHandle,
    IntArray,
    NextTokens,
    RequestFacts,
    RequestLimits,
    RequestStep,
    StepContext,
    StepOutcome,
    TargetFacts,
    chain,
)
from vllm_spec_ext.proposers.views import TargetView, ViewRound, ViewSpec

__all__ = [
    "EMPTY_DRAFT",
    "UNSALTED",
    "BaseProposer",
    "Branch",
    "Continues",
    "DeviceTexts",
    "Draft",
    "DraftModel",
    "Drawn",
    "EngineHandle",
    "IntArray",
    "LateDrafter",
    "Learns",
    "ModelSpec",
    "Needs",
    "NextTokens",
    "Proposer",
    "ProposerInfo",
    "RequestFacts",
    "RequestLimits",
    "RequestStep",
    "StepContext",
    "StepOutcome",
    "TargetFacts",
    "TargetView",
    "ViewRound",
    "ViewSpec",
    "chain",
    "proposer",
]


class Proposer(Protocol):
    """A drafting method.

    Rules: at most ``RequestStep.room`` nodes; deterministic given inputs and seed; state only for
    requests that were seen in ``propose`` and not yet finished; on any doubt an empty draft.
    What was learned of a request's tokens serves requests of the same ``share_group`` alone.
    The class is built with the method's validated options as its only argument. Its module must
    import neither numba nor torch at the top: the front end and the command line load it for its
    ``info``, and vLLM's CPU worker cannot start once numba is loaded (see
    :mod:`vllm_spec_ext.proposers.text_index.occurrence_kernels`); import them in ``start``.
    """

    info: ClassVar[ProposerInfo]
    needs: Needs

    def start(self, engine: EngineHandle) -> None:
        """Called once, after the target is loaded: load weights, check them, warm up."""

    def propose(self, step: StepContext) -> list[Draft]:
        """One draft for each of ``step.requests``, in that order."""

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Called before ``propose`` with the outcomes of the previous drafts."""

    def finish(self, request_ids: Sequence[str]) -> None:
        """Free the state of these requests: finished, aborted or preempted ones, known or not."""


@runtime_checkable
class Continues(Protocol):
    """A proposer that can be asked again within a step, for a text that is not verified."""

    def continue_from(self, request_id: str, provisional: Sequence[int], most: int) -> IntArray:
        """What it foresees behind tokens that some draft level wrote, not the target.

        It must not learn from them, nor change in any way: they are mostly not what the text will
        say, and it may be asked for several of them in one step.

        Args:
            request_id: A request of the last :meth:`Proposer.propose`.
            provisional: What is written behind the request's verified tokens.
            most: Tokens wanted.

        Returns:
            [n] int32, n <= `most`; may be empty.
        """


@runtime_checkable
class Learns(Protocol):
    """A proposer whose weights can be exchanged while it serves (``online``)."""

    steps_a_turn: int
    """Steps that one version drafts before another may; more than 1 where an exchange is dear."""

    def read_weights(self, folder: Path) -> object:
        """Weights of a folder as the method serves it, ready for use; called by any thread.

        Raises:
            SpecExtError: They are not of this drafter's shape.
        """

    def use_weights(self, weights: object) -> None:
        """Draft with these from now on; called between two steps, and quick."""


class BaseProposer(ABC):
    """Convenience base: stores the options and does nothing in the optional calls."""

    info: ClassVar[ProposerInfo]
    needs: Needs = Needs()

    def __init__(self, options: MethodOptions) -> None:
        """Keep the method's validated options."""
        self.options = options

    @classmethod
    def check(cls, options: MethodOptions, target: TargetFacts) -> None:
        """Refuse files that do not belong to the target; raises SpecExtError.

        Called in the front end before any weight is loaded, where the reason is the last line that
        a user reads; a worker's error would end in "see root cause above". Import what it takes
        inside, and no numba: the front end may become a worker.
        """

    @classmethod
    def models(cls, options: MethodOptions) -> Sequence[ModelSpec]:
        """Draft models that the engine is to run beside the target; none."""
        return ()

    @classmethod
    def views(cls, options: MethodOptions) -> Sequence[ViewSpec]:
        """Views of its cache over which the target is to draft for itself; none."""
        return ()

    @classmethod
    def drafter_folder(cls, options: MethodOptions) -> Path:
        """Where the weights are that it starts with; for methods that learn (:class:`Learns`)."""
        raise SpecExtError(f"{cls.info.name} has no weights that could learn")

    @classmethod
    def drafter_files(cls, options: MethodOptions) -> Mapping[str, bytes]:
        """Content of the files of that folder that a version of the drafter has, by name."""
        raise SpecExtError(f"{cls.info.name} has no weights that could learn")

    @property
    def student_facts(self) -> Mapping[str, int]:
        """What a trainer has to know of how it drafts, if it learns; known when it has started."""
        return {}

    def start(self, engine: EngineHandle) -> None:
        """Nothing to load."""

    def loaded_models(self, engine: EngineHandle) -> Sequence[DraftModel]:
        """The draft models that it asked for; for :meth:`start`.

        Raises:
            SpecExtError: There is no engine that runs models, as in a replay of recorded texts.
        """
        wanted = len(self.models(self.options))
        if len(engine.models) != wanted:
            raise SpecExtError(
                f"{self.info.name}: found {len(engine.models)} loaded draft models, expected "
                f"{wanted}; only an engine runs them, so measure with `vllm-spec bench` or `plan`"
            )
        return engine.models

    def loaded_views(self, engine: EngineHandle) -> Sequence[TargetView] | None:
        """The views that it asked for, for :meth:`start`; None where one is not for this CPU.

        Then it drafts nothing, and the log says why.

        Raises:
            SpecExtError: There is no engine that runs a target, as in a replay of recorded texts.
        """
        wanted = self.views(self.options)
        on_cpu = engine.device is not None and engine.device.type == "cpu"
        if on_cpu and not all(spec.on_cpus for spec in wanted):
            import logging

            logging.getLogger("vllm.spec_ext").info(
                "vllm-spec-ext: %s drafts nothing on this CPU: %s",
                self.info.name,
                self.info.off_on_cpus,
            )
            return None
        if len(engine.views) != len(wanted):
            raise SpecExtError(
                f"{self.info.name}: found {len(engine.views)} views of a target, expected "
                f"{len(wanted)}; only an engine runs its target, so measure with `vllm-spec bench`"
            )
        return engine.views

    @abstractmethod
    def propose(self, step: StepContext) -> list[Draft]:
        """One draft for each of ``step.requests``, in that order."""

    @classmethod
    def drafts_late(cls, options: MethodOptions) -> bool:
        """Whether :meth:`late_drafter` gives one; asked before the engine starts.

        Such a method is scheduled asynchronously by default, on a GPU.
        """
        return False

    def late_drafter(self, engine: EngineHandle) -> LateDrafter | str:
        """What drafts on the device, where the scheduler does not wait for a step's tokens.

        Called once, after :meth:`start`. ``propose`` is called all the same, one step late: its
        drafts then only tell what was drafted.

        Returns:
            It; or why the method, or what its options ask for, drafts on the host alone.
        """
        return why_on_host(self.info.drafts_trees(self.options))

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Nothing to learn."""

    def finish(self, request_ids: Sequence[str]) -> None:
        """No state to free."""

    def close(self) -> None:
        """The end: nothing is called after this, so save what is to be kept.

        Called once, when the engine shuts down or a fresh proposer takes this one's place. Not
        part of :class:`Proposer`: a class without it is just dropped.
        """

    @staticmethod
    def check_request(options: RequestOptions, limits: RequestLimits) -> None:
        """Refuse what is wrong whatever the prompt is; raises RequestOptionError.

        Called in the front end before the answer begins, on its event loop, as of an answer that is
        streamed nothing can be HTTP 400 later; so it takes no time. Long options are not looked at
        there, but only before :meth:`resolve_request`, each time that this is called.
        """

    @staticmethod
    def resolve_request(options: RequestOptions, facts: RequestFacts) -> RequestOptions:
        """Check a request's options against its prompt and the model.

        Called in the front end, where a ``RequestOptionError`` still becomes the client's HTTP
        400; there it runs on a thread, so it may take long. What it returns travels to the engine,
        so text may be turned into token ids here. Called again in the engine, with what came and
        without a tokenizer: a request that went around the front end, and is wrong, runs with
        defaults.
        """
        return options
