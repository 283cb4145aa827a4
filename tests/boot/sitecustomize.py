# SPDX-License-Identifier: Apache-2.0
"""Every Python program of a test run imports this first: it collects garbage seldom.

Importing vLLM makes most of a million objects that stay, and vLLM looks through all of them when
an engine starts and ends. That is a quarter of the time that the start of a small one takes.
What tests themselves ask for is collected.
"""

import gc
import sys

_collect = gc.collect


def collect(generation: int = 2) -> int:
    """``gc.collect``, unless it is vLLM that asks."""
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return 0 if caller.startswith("vllm.") else _collect(generation)


gc.collect = collect
gc.set_threshold(100_000, 50, 100)
