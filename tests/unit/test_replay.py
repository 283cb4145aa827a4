# SPDX-License-Identifier: Apache-2.0
"""Replay gives every method the requests it expects."""

from vllm_spec_ext.cli import simulate
from vllm_spec_ext.replay import Recording, replay


def test_input_copy_can_be_replayed() -> None:
    """Its requests have options of their own class."""
    text = list(range(20, 60))
    recordings = [Recording([1, 2, *text, 3], [*text[:30], 9])]
    (point,) = simulate.make_points("input_copy", [{"source": "prompt", "fold_case": False}])
    proposer, engine = simulate.start("input_copy", point, recordings, None, "", 1)
    result = replay(proposer, recordings, engine)
    assert result.num_tokens == 30
    assert result.num_steps < 10
    assert result.accepted_at_depth[0] > 0
