# SPDX-License-Identifier: Apache-2.0
"""Which rows are added to small steps, by a clock that the layers turn."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_spec_ext.engine.row_padding import Layer, RowPadding, linear_layers, may_pad


class Machine:
    """Time passes as its layers are run; a pause of a second hits one product of 97."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = seconds  # by rows
        self.now = 0.0
        self.num_products = 0
        self.noise: random.Random | None = None  # of another program
        self.is_busy = True

    def layer(self, num_inputs: int = 4096, num_outputs: int = 4096) -> Layer:
        def product(rows: torch.Tensor) -> torch.Tensor:
            assert rows.shape[1] == num_inputs
            self.num_products += 1
            self.now += self.seconds[len(rows)] * self.slowed() + (self.num_products % 97 == 0)
            return rows

        return Layer(product, num_inputs, num_outputs, torch.float32)

    def slowed(self) -> float:
        """It runs for a while, and does nothing for a while."""
        if self.noise is None:
            return 1.0
        if self.noise.random() < 0.05:
            self.is_busy = not self.is_busy
        return self.noise.uniform(1.0, 1.1) * (1.5 if self.is_busy else 1.0)

    def padding(self, num_layers: int = 2) -> RowPadding | None:
        return RowPadding.measured([self.layer()] * num_layers, lambda: self.now)


def test_each_step_has_the_rows_that_take_least_time() -> None:
    #             0    1    2    3    4    5    6    7    8
    machine = Machine([0.0, 25.0, 26.5, 21.8, 20.8, 20.4, 20.5, 24.5, 24.9])
    padding = machine.padding()
    assert padding is not None
    # Of 3: five rows are quicker by 6 %, then by less than 5 %.
    assert padding.quickest == (0, 5, 5, 5, 4, 5, 6, 7, 8)
    assert str(padding) == "5 for 1, 5 for 2, 5 for 3"


def test_nothing_is_padded_where_nothing_is_gained() -> None:
    assert Machine([float(rows) for rows in range(9)]).padding() is None
    assert Machine([1.0] * 9).padding() is None


def test_other_programs_make_no_gain_where_there_is_none() -> None:
    """As measured beside one: rows take a little longer each, and all of them swing."""
    mistaken = 0
    for seed in range(100):
        machine = Machine([0.0, 8.3, 8.8, 9.1, 9.0, 9.2, 9.5, 10.0, 10.1])
        machine.noise = random.Random(seed)
        padding = machine.padding()
        mistaken += padding is not None and padding.quickest[1] != 1
    assert mistaken == 0


def test_a_gain_is_found_beside_other_programs() -> None:
    for seed in range(20):
        machine = Machine([0.0, 25.0, 26.5, 21.8, 20.8, 20.4, 20.5, 24.5, 24.9])
        machine.noise = random.Random(seed)
        padding = machine.padding()
        assert padding is not None
        assert padding.quickest[1] in (4, 5, 6)


def test_small_models_are_not_measured_and_of_large_ones_a_part() -> None:
    slow_alone = [0.0, 2.0, *[1.0] * 7]
    small = Machine(slow_alone)
    assert RowPadding.measured([small.layer(64, 64)] * 30, lambda: small.now) is None
    assert not small.num_products
    large = Machine(slow_alone)
    assert large.padding(num_layers=400) is not None
    assert large.num_products <= 2 * 8 * 11  # 2 layers of 16 million weights


@dataclass(frozen=True)
class Batch:
    """As vLLM's BatchDescriptor."""

    num_tokens: int
    num_reqs: int | None = None


def test_only_the_rows_of_the_batch_change() -> None:
    padding = RowPadding((0, 4, 4, 4, 4))
    padded = padding.pad(("none", Batch(1, 1), False, None, None))
    assert padded == ("none", Batch(4, 1), False, None, None)
    for num_tokens in (4, 5, 300):
        decision = ("none", Batch(num_tokens), False, None, None)
        assert padding.pad(decision) == decision


def test_layers_that_were_prepared_for_a_cpu_are_found() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(3, 2) for _ in range(3)])
    for layer in (model[0], model[1]):
        layer.cpu_linear = torch.nn.functional.linear
    model[0].input_size_per_partition, model[0].output_size_per_partition = 3, 2
    model[0].params_dtype = torch.float32
    (found,) = linear_layers(model)  # one has no sizes, as embeddings have none, one no kernel
    assert found[1:] == (3, 2, torch.float32)
    rows = torch.rand(2, 3)
    torch.testing.assert_close(found.product(rows), rows @ model[0].weight.T)
    with_pictures = torch.nn.ModuleDict({"visual": model[0], "writes": torch.nn.Linear(3, 2)})
    with_pictures.get_language_model = lambda: with_pictures["writes"]
    assert not list(linear_layers(with_pictures))


def test_nothing_is_drawn() -> None:
    """vLLM's seed is set before that, and requests without one of their own draw from it."""
    before = torch.get_rng_state()
    assert Machine([0.0, 2.0, *[1.0] * 7]).padding() is not None
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"world": 2}, False),
        ({"lora": object()}, False),
        ({"moe": True}, False),
        ({"most": 7}, False),
    ],
)
def test_where_rows_may_be_added(changed: dict[str, Any], expected: bool) -> None:
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size_across_dp=changed.get("world", 1)),
        lora_config=changed.get("lora"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=changed.get("most", 8)),
        model_config=SimpleNamespace(is_moe=changed.get("moe", False)),
    )
    assert may_pad(config) == expected
