# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: rank 0 drafts and decides, the other ranks of its group follow.

If each rank drafted by itself, two that differ (a clock, a hash seed, a rounded logit) would lay
out different draft trees, and their parts of the KV cache would no longer belong together. So one
rank has the proposer. What it decides reaches the others through vLLM's own group; while it works
they wait, and take their part in the target's layers that it calls, as these are spread over all.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import numpy as np
import torch

from vllm_spec_ext.errors import RanksApartError

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

    from vllm_spec_ext.engine.models.paged_model import PagedModel
    from vllm_spec_ext.engine.models.replay import Work

logger = logging.getLogger("vllm.spec_ext")

ResultT = TypeVar("ResultT")


class SharedLayers(Protocol):
    """What a proposer may call of a target; all ranks compute it together."""

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor | None:
        """[n, vocab] of states [n, hidden]."""

    def embed_input_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """[n, hidden] of token ids [n]."""


@dataclass(frozen=True)
class Call:
    """A layer of the target that all ranks compute together."""

    is_embedding: bool
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Result(Generic[ResultT]):
    """What rank 0 decided, and the shapes of the tensors that follow."""

    value: ResultT
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()


@dataclass(frozen=True)
class Failure:
    """Rank 0 could not go on."""

    message: str


_OWN_SEEDS = 0x5DEECE66D  # keeps what proposers draw apart from what samplers do


class Ranks:
    """The workers of one tensor-parallel group."""

    _target: SharedLayers

    def __init__(self, group: "GroupCoordinator", device: torch.device) -> None:
        """Join the group.

        Args:
            group: vLLM's ``GroupCoordinator`` (vLLM 0.32 ``get_tp_group``).
            device: Of this rank's tensors.
        """
        self._group = group
        self._device = device
        self._models: Sequence[PagedModel] = ()
        self._failures: set[str] = set()  # kinds that were logged
        self._next_seed = (torch.initial_seed() ^ _OWN_SEEDS) % 2**63  # of what proposers draw

    @property
    def is_alone(self) -> bool:
        """No tensor parallelism: nothing is sent."""
        return bool(self._group.world_size == 1)

    @property
    def leads(self) -> bool:
        """Whether this rank drafts."""
        return bool(self._group.rank_in_group == 0)

    def share_target(self, target: torch.nn.Module) -> Any:
        """What a proposer sees of the target: its shared layers are computed by all ranks."""
        self._target = cast(SharedLayers, target)
        return target if self.is_alone else SharedTarget(self, target)

    def share_models(self, models: "Sequence[PagedModel]") -> None:
        """This rank's parts of the draft models."""
        self._models = models

    def lead(
        self, work: Callable[[], tuple[ResultT, Sequence[torch.Tensor]]]
    ) -> tuple[ResultT, Sequence[torch.Tensor]]:
        """On rank 0 do the work, on the others wait for it; all return what rank 0 decided.

        Args:
            work: Runs on rank 0 only. Returns plain data, which can be pickled, and the tensors
                that belong to it, which are sent from device to device.

        Raises:
            RuntimeError: On the other ranks, if the work raised on rank 0.
        """
        if self.is_alone:
            return work()
        if not self.leads:
            return self._follow()
        try:
            value, tensors = self.drawing_apart(work)
        except BaseException as error:
            self._group.broadcast_object(Failure(f"{type(error).__name__}: {error}"))
            raise
        tensors = [tensor.to(self._device).contiguous() for tensor in tensors]
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        self._group.broadcast_object(Result(value, shapes))
        for tensor in tensors:
            self._group.broadcast(tensor)
        return value, tensors

    def drawing_apart(self, work: Callable[[], ResultT]) -> ResultT:
        """Do work of one rank alone; what it draws moves no global generator of torch and numpy.

        From these the ranks draw the same samples and seeds. And what a proposer draws is never
        drawn again, by verification, which would not be independent of its drafts.
        """
        if self.is_alone:
            return work()
        numpys = np.random.get_state()  # vLLM draws seeds from it (0.32 SamplingStates)
        try:
            with torch.random.fork_rng([] if self._device.type == "cpu" else [self._device]):
                self._seed()
                return work()
        finally:
            np.random.set_state(numpys)

    def _seed(self) -> None:
        """Other numbers than before; ``torch.manual_seed`` asks every platform, for 0.3 ms."""
        np.random.seed(self._next_seed % 2**32)
        torch.default_generator.manual_seed(self._next_seed)
        if self._device.type == "cuda":
            index = (
                torch.cuda.current_device() if self._device.index is None else self._device.index
            )
            torch.cuda.default_generators[index].manual_seed(self._next_seed)
        self._next_seed += 1

    def spread(
        self, make: Callable[[], torch.Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """What rank 0 makes on its device, on all of them; no rank waits for a host.

        Args:
            make: Runs on rank 0 only; if it raises, the engine ends.
            shape: Of what is made; known on every rank.
            dtype: Of it.
        """
        if self.is_alone:
            return make()
        if not self.leads:
            return self._receive(tuple(shape), dtype)
        made = self.drawing_apart(make)
        return self._group.broadcast(made.to(dtype).contiguous())

    def call(self, argument: torch.Tensor, *, is_embedding: bool) -> torch.Tensor | None:
        """On rank 0: compute a shared layer of the target together with the other ranks.

        Raises:
            RanksApartError: There is no memory for it, on this rank.
        """
        argument = argument.to(self._device).contiguous()  # what fails here is told to nobody
        self._group.broadcast_object(Call(is_embedding, tuple(argument.shape), argument.dtype))
        self._group.broadcast(argument)
        with _together():
            return self._compute(argument, is_embedding)

    def work_together(self, work: "Work[ResultT]") -> ResultT:
        """On rank 0: run a draft model together with the other ranks; this rank's result.

        Raises:
            RanksApartError: There is no memory for it, on this rank.
        """
        self._group.broadcast_object(work)
        with _together():
            return work.run(self._models)

    def _compute(self, argument: torch.Tensor, is_embedding: bool) -> torch.Tensor | None:
        layer = self._target.embed_input_ids if is_embedding else self._target.compute_logits
        return layer(argument)

    def _follow(self) -> tuple[Any, Sequence[torch.Tensor]]:
        while True:
            message: Call | Result[Any] | Failure | Work[object] = self._group.broadcast_object()
            if isinstance(message, Call):
                argument = self._receive(message.shape, message.dtype)
                self._take_part(partial(self._compute, argument, message.is_embedding))
            elif isinstance(message, Result):
                received = [self._receive(shape, dtype) for shape, dtype in message.tensors]
                return message.value, received
            elif not isinstance(message, Failure):
                self._take_part(partial(message.run, self._models))
            else:
                raise RuntimeError(f"rank 0 of this worker's group failed: {message.message}")

    def _take_part(self, work: Callable[[], object]) -> None:
        """This rank's part of what rank 0 computes; it goes on even if that fails.

        What cannot be computed (a shape that no layer takes) cannot be on rank 0 either, whose
        proposer loses the drafts of the step for it. The step is decided all the same: a rank that
        left here would take the next step's messages for those of this one. Without memory a rank
        may be alone, and rank 0 waits for it in vain: then the engine ends.
        """
        try:
            with torch.inference_mode():
                work()
        except Exception as error:
            if _wants_memory(error):
                raise
            kind = type(error).__name__
            if kind not in self._failures:
                self._failures.add(kind)
                logger.exception("vllm-spec-ext: what rank 0 drafts by failed; logged once a kind")

    def _receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        return self._group.broadcast(tensor)


@contextmanager
def _together() -> Iterator[None]:
    """What fails for want of memory may do so on this rank alone, and the others wait for it."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _wants_memory(error):
            raise
        raise RanksApartError(f"no memory for what all ranks compute together: {error}") from error


def _wants_memory(error: Exception) -> bool:
    """Torch has no class of its own for memory of a CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


class SharedTarget:
    """The target as the proposer of rank 0 sees it; everything else is the module's own."""

    def __init__(self, ranks: Ranks, target: torch.nn.Module) -> None:
        self._ranks = ranks
        self._target = target

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)  # AttributeError where the target has no such layer
        if name not in ("compute_logits", "embed_input_ids"):
            return found
        return partial(self._ranks.call, is_embedding=name == "embed_input_ids")
