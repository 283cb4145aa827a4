# SPDX-License-Identifier: Apache-2.0
"""What ADED's published code does, as settings; ``preset="aded_reference"`` takes them."""

from collections.abc import Mapping
from typing import Any

ADED_REFERENCE: Mapping[str, Any] = {
    "overlay": "shared",
    "search": "mcts",
    "max_depth": 4,
    "iterations": 150,
    "max_sequences": 24,
    "adaptive_length": False,
    "greedy_extension": True,
    "min_confidence": 0.0,
    "backoff": "off",
    "learn_prompt": False,
    "relearn_window": 16,
    "increment": 0.04,
    "cap": 3.0,
    "half_life": 0.0,
    "shared_buckets": 1 << 16,
    "shared_weight": 1.0,
    "normalise": False,
    "unseen_weight": 0.0,
}
"""Options and internal settings; ADED's overlay is unbounded, ours is not."""

_MOVED = (
    "search",
    "iterations",
    "max_sequences",
    "greedy_extension",
    "relearn_window",
    "increment",
    "normalise",
)

INTERNAL: Mapping[str, str] = dict.fromkeys(
    _MOVED,
    'It belongs to ADED\'s published code and is set by "preset": "aded_reference" alone.',
)
"""Settings that are no options, with what to tell someone who gives one."""
