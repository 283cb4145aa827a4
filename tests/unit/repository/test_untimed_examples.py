# SPDX-License-Identifier: Apache-2.0
"""A machine that is busy fails no test of drawn examples."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st


def slowly(number: int) -> int:
    """Longer than hypothesis leaves an example, and in ten of them longer than it leaves draws."""
    time.sleep(0.25)
    return number


@settings(max_examples=10, database=None)
@given(st.integers().map(slowly))
def test_slow_examples(number: int) -> None:
    time.sleep(0.25)
