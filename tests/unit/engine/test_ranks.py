# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a tensor-parallel group tell each other, also where something fails."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import Queue
from typing import Any, cast

import numpy as np
import pytest
import torch

from vllm_spec_ext.engine.drafting.barrier import Barrier
from vllm_spec_ext.engine.drafting.ranks import Ranks
from vllm_spec_ext.errors import RanksApartError

CPU = torch.device("cpu")
WIDTH = 4


class Group:
    """One rank of two, in threads, with the methods of vLLM's ``GroupCoordinator``."""

    world_size = 2

    def __init__(self, rank: int, messages: "Queue[Any]") -> None:
        self.rank_in_group = rank
        self._messages = messages

    def broadcast_object(self, message: Any = None) -> Any:
        return self._pass(message)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        received = self._pass(tensor)
        assert received.shape == tensor.shape
        return tensor.copy_(received)

    def _pass(self, message: Any) -> Any:
        if self.rank_in_group == 0:
            self._messages.put(message)
            return message
        return self._messages.get(timeout=100)


class Target(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_computed = 0

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        logits = states @ torch.ones(WIDTH, 7)
        self.num_computed += 1
        return logits

    def embed_input_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(ids, torch.ones(7, WIDTH))


class Pass:
    """Stands for a pass of a draft model."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def run(self, models: Sequence[Any]) -> int:
        if self.error is not None:
            raise self.error
        return len(models)


class Filling(Pass):
    """A pass for which there is no memory."""

    def __init__(self, fill: Callable[[], None]) -> None:
        super().__init__()
        self.fill = fill

    def run(self, models: Sequence[Any]) -> int:
        self.fill()
        return super().run(models)


def both(steps: Sequence[Callable[[Ranks, Any], Any]]) -> tuple[list[Any], list[Any], int]:
    """What two ranks decide in these steps, and how often the other one computed a layer.

    Args:
        steps: Each is what rank 0 does, with the target as its proposer sees it.
    """
    messages: Queue[Any] = Queue()
    targets = [Target(), Target()]
    ranks = [Ranks(cast(Any, Group(rank, messages)), CPU) for rank in range(2)]
    shown = [one.share_target(target) for one, target in zip(ranks, targets, strict=True)]
    found: list[list[Any]] = [[], []]

    def work(step: Callable[[Ranks, Any], Any]) -> tuple[Any, list[torch.Tensor]]:
        return step(ranks[0], shown[0]), []

    def run(rank: int) -> None:
        for step in steps:
            value, tensors = ranks[rank].lead(partial(work, step))
            found[rank].append((value, *tensors))

    other = threading.Thread(target=run, args=(1,))
    other.start()
    run(0)
    other.join(10)
    assert not other.is_alive()
    assert messages.empty()
    return found[0], found[1], targets[1].num_computed


def logits_of(width: int) -> Callable[[Ranks, Any], str]:
    def step(_: Ranks, target: Any) -> str:
        try:
            return f"{tuple(target.compute_logits(torch.ones(2, width)).shape)}"
        except RuntimeError:  # as the barrier of the proposer does
            return "no drafts"

    return step


def test_all_ranks_compute_a_shared_layer() -> None:
    first, second, num_computed = both([logits_of(WIDTH), logits_of(WIDTH)])
    assert first == second == [("(2, 7)",), ("(2, 7)",)]
    assert num_computed == 2


def test_a_layer_that_fails_on_all_ranks_costs_the_drafts_of_its_step_alone() -> None:
    first, second, num_computed = both([logits_of(9), logits_of(WIDTH), logits_of(9)])
    assert first == second == [("no drafts",), ("(2, 7)",), ("no drafts",)]
    assert num_computed == 1


def test_a_draft_model_that_fails_on_all_ranks_does_so_too() -> None:
    def failing(ranks: Ranks, _: Any) -> str:
        with pytest.raises(ValueError, match="no such rows"):
            ranks.work_together(Pass(ValueError("no such rows")))
        return "no drafts"

    def working(ranks: Ranks, _: Any) -> str:
        return f"models: {ranks.work_together(Pass())}"

    first, second, _ = both([failing, working])
    assert first == second == [("no drafts",), ("models: 0",)]


def test_what_is_no_tensor_reaches_no_other_rank() -> None:
    def step(_: Ranks, target: Any) -> str:
        with pytest.raises(AttributeError):
            target.compute_logits([1.0])
        return "no drafts"

    first, second, num_computed = both([step])
    assert first == second == [("no drafts",)]
    assert num_computed == 0


def test_the_other_ranks_end_where_the_first_one_does() -> None:
    def step(*_: Any) -> str:
        raise KeyError("lost")

    messages: Queue[Any] = Queue()
    first, second = (Ranks(cast(Any, Group(rank, messages)), CPU) for rank in range(2))
    with pytest.raises(KeyError):
        first.lead(lambda: (step(), []))
    with pytest.raises(RuntimeError, match="rank 0 of this worker's group failed: KeyError"):
        second.lead(lambda: (step(), []))


@pytest.mark.parametrize("draw", [lambda: float(torch.rand(1)), lambda: float(np.random.rand())])
@pytest.mark.parametrize("late", [False, True])
def test_what_a_proposer_draws_is_not_drawn_again_by_verification(
    draw: Callable[[], float], late: bool
) -> None:
    """And it draws other numbers in each step, while the ranks go on drawing the same."""
    leader = Ranks(cast(Any, Group(0, Queue())), CPU)
    drawn: list[float] = []

    def draft() -> torch.Tensor:
        drawn.append(draw())
        return torch.zeros(1)

    def step() -> object:
        return (
            leader.spread(draft, (1,), torch.int64) if late else leader.lead(lambda: (0, [draft()]))
        )

    def start() -> None:
        torch.manual_seed(5)
        np.random.seed(5)

    start()
    expected = [draw(), draw()]
    start()
    step()
    step()
    assert [draw(), draw()] == expected
    assert len({*drawn, *expected}) == 4


def of_a_gpu() -> None:
    raise torch.OutOfMemoryError("full")


def of_a_cpu() -> None:
    torch.empty(10**14)


@pytest.mark.parametrize("fill", [of_a_gpu, of_a_cpu])
def test_a_rank_without_memory_ends_the_engine(fill: Callable[[], None]) -> None:
    """The others wait inside of the pass; the next message would be taken for a part of it."""
    leader = Ranks(cast(Any, Group(0, Queue())), CPU)
    barrier = Barrier("test", 7)

    def run() -> None:
        leader.work_together(Filling(fill))

    with pytest.raises(RanksApartError, match="no memory for what all ranks compute"):
        barrier.call("propose", run, None)
