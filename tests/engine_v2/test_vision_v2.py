# SPDX-License-Identifier: Apache-2.0
"""Targets that see pictures, on the V2 runner; the tests of V1."""

from typing import Any

import pytest
import test_vision
from test_vision import prompts, seeing

__all__ = ["prompts", "seeing"]


@pytest.fixture(scope="module")
def with_pictures(make_engine: Any, seeing: Any, prompts: Any) -> Any:
    return test_vision.answers(make_engine(**seeing), prompts)


@pytest.mark.parametrize("name", ["oracle_tree", "input_copy"])
def test_pictures(
    name: str, make_engine: Any, seeing: Any, prompts: Any, with_pictures: Any
) -> None:
    test_vision.test_same_tokens(name, make_engine, seeing, prompts, with_pictures)
