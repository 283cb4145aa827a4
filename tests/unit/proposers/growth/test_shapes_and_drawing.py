# SPDX-License-Identifier: Apache-2.0
"""Shapes of drawn trees, and the draws themselves."""

import itertools

import numpy as np
import pytest
import torch

from vllm_spec_ext.proposers.draft_tree import node_depths, tree_problem
from vllm_spec_ext.proposers.growth.drawing import distributions, draw, uniforms
from vllm_spec_ext.proposers.growth.shapes import best_shapes, expansion_size


def test_size_of_an_expansion_tree() -> None:
    assert expansion_size([1, 1, 3, 1, 1]) == 11
    assert expansion_size([1, 1, 3, 1, 1, 1, 1, 1]) == 2 + 6 * 3  # the paper's default
    assert expansion_size([2, 2]) == 6


def test_with_room_for_all_the_shape_is_the_expansion_tree() -> None:
    expansion = [1, 2, 2]
    rates = [0.6, 0.3, 0.1]
    (shape,) = best_shapes([rates], expansion.__getitem__, 3, 7)
    assert shape.parents == [-1, 0, 0, 1, 1, 2, 2]
    assert shape.ranks == [0, 0, 1, 0, 1, 0, 1]
    assert shape.depths == [0, 1, 1, 2, 2, 2, 2]
    expected = [0.6, 0.36, 0.18, 0.216, 0.108, 0.108, 0.054]
    assert shape.reach == pytest.approx(expected)
    assert shape.children(1) == [3, 4]


@pytest.mark.parametrize("budget", [1, 3, 5, 8])
def test_no_other_tree_of_that_size_is_accepted_further(budget: int) -> None:
    """Against all pairs of trees of two models, by brute force."""
    rates = [[0.5, 0.3, 0.1], [0.4, 0.05, 0.01]]
    depth = 3
    paths = [
        path for size in range(1, depth + 1) for path in itertools.product(range(3), repeat=size)
    ]
    reaches = [np.prod([own[rank] for rank in path]) for own in rates for path in paths]
    best = sorted(reaches, reverse=True)[:budget]  # closed under parents: rates are below 1
    shapes = best_shapes(rates, lambda _: 3, depth, budget)
    assert sum(map(len, shapes)) == budget
    assert sum(sum(shape.reach) for shape in shapes) == pytest.approx(sum(best))
    for shape in shapes:
        assert tree_problem(shape.parents, len(shape)) is None
        assert node_depths(shape.parents) == shape.depths


def test_what_is_not_worth_verifying_is_left_out() -> None:
    (shape,) = best_shapes([[0.5, 0.2]], lambda _: 2, 8, 100, min_reach=0.1)
    assert min(shape.reach) >= 0.1
    assert len(shape) == 6  # .5 .25 .125, .2, .5*.2, .2*.5


def test_draws_follow_their_distribution() -> None:
    probs = torch.tensor([[0.5, 0.0, 0.3, 0.2], [0.0, 0.0, 1.0, 0.0]])
    numbers = np.random.default_rng(0).random((2, 20_000))
    tokens = draw(probs, numbers)
    counts = np.bincount(tokens[0], minlength=4) / 20_000
    assert np.abs(counts - [0.5, 0.0, 0.3, 0.2]).max() < 0.015
    assert (tokens[1] == 2).all()


def test_the_ends_of_the_unit_interval_draw_possible_tokens() -> None:
    probs = torch.tensor([[0.0, 0.4, 0.6, 0.0]])
    assert draw(probs, np.array([[0.0, np.nextafter(1.0, 0.0)]])).tolist() == [[1, 2]]


def test_numbers_depend_on_request_position_and_model_alone() -> None:
    given = ("a", 7, 0)
    others = [("b", 7, 0), ("a", 8, 0), ("a", 7, 1), ("a 7", 7, 0)]
    numbers = uniforms(*given, 5)
    assert (uniforms(*given, 5) == numbers).all()
    assert (uniforms(*given, 9)[:5] == numbers).all()
    assert all((uniforms(*other, 5) != numbers).all() for other in others)


def test_distributions_are_the_requests_own() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.3, 0.2]]))

    def of(temperature: float, top_k: int = 0, top_p: float = 1.0) -> list[float]:
        return distributions(logits, [temperature], [top_k], [top_p])[0].tolist()

    assert of(1.0) == pytest.approx([0.1, 0.4, 0.3, 0.2])
    squares = np.array([0.01, 0.16, 0.09, 0.04])
    assert of(0.5) == pytest.approx(squares / squares.sum())
    assert of(1.0, top_k=2) == pytest.approx([0, 4 / 7, 3 / 7, 0])
    assert of(1.0, top_k=9) == pytest.approx([0.1, 0.4, 0.3, 0.2])
    assert of(1.0, top_p=0.65) == pytest.approx([0, 4 / 7, 3 / 7, 0])
    assert of(1.0, top_p=0.75) == pytest.approx([0, 4 / 9, 3 / 9, 2 / 9])
    assert of(1.0, top_k=1, top_p=0.9) == pytest.approx([0, 1, 0, 0])
    mixed = distributions(logits.repeat(2, 1), [1.0, 1.0], [1, 0], [1.0, 1.0])
    assert mixed.tolist() == [[0, 1, 0, 0], pytest.approx([0.1, 0.4, 0.3, 0.2])]
