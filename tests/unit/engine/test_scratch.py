# SPDX-License-Identifier: Apache-2.0
"""How many KV blocks are for drafts, and what is said where that leaves little."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm_spec_ext.engine.starting.scratch import ScratchNeed, check_room, most_used
from vllm_spec_ext.errors import SpecExtError

NEEDS = st.builds(
    lambda least, more: ScratchNeed(least + more, least), st.integers(0, 80), st.integers(0, 300)
)
BLOCKS = st.integers(1, 5000)


@pytest.mark.parametrize(
    ("tree", "tokens", "requests", "block_size", "expected"),
    [
        (False, 8, 64, None, 0),
        (True, 8, 4, None, 16),
        (True, 8, 64, None, 64),
        (True, 7, 1, None, 7),  # one request may draft a tree of nothing but branches
        (False, 4, 8, 32, 8),  # each request leaves its blocks by one block at most
        (False, 20, 2, 16, 4),
        (False, 4, 272, 16, 16 + 64),  # one in four requests leaves its blocks in a step
        (True, 8, 8, 32, 32 + 8),
    ],
)
def test_blocks_that_drafts_use(
    tree: bool, tokens: int, requests: int, block_size: int | None, expected: int
) -> None:
    assert most_used(tree, tokens, requests, block_size) == expected


def test_one_block_in_eight_is_for_drafts() -> None:
    """As the benchmark's engines had it: eight requests, trees of 32, 225 blocks of 32 tokens."""
    need = ScratchNeed.of_drafts(True, 32, 8)
    assert need == ScratchNeed(most=128, least=32)
    assert need.out_of(225) == 32
    assert need.out_of(800) == 100
    assert need.out_of(10_000) == 128


@given(need=NEEDS, ranks=st.lists(BLOCKS, min_size=1, max_size=4))
def test_all_ranks_set_enough_aside(need: ScratchNeed, ranks: list[int]) -> None:
    """Each from the memory it has; blocks are then as many as the poorest rank has for requests."""
    left = [num_blocks - need.out_of(num_blocks) for num_blocks in ranks]
    given_to_all = min(left)
    if given_to_all <= 0:
        return  # refused at start
    number = need.behind(given_to_all)
    assert all(given_to_all + number <= num_blocks for num_blocks in ranks)
    assert number >= min(need.out_of(min(ranks)) - 1, need.most)
    assert need.least <= number <= need.most


@given(need=NEEDS, for_requests=BLOCKS)
def test_the_fewest_blocks_that_leave_so_many(need: ScratchNeed, for_requests: int) -> None:
    fewest = need.with_requests(for_requests)
    assert fewest - need.out_of(fewest) >= for_requests
    assert fewest - 1 - need.out_of(fewest - 1) < for_requests


def test_too_little_room_beside_scratch_blocks() -> None:
    check_room(left=600, available=1000, needed=600, expected=1000, num_blocks=4)
    # vLLM's own message is right where a request would not fit without them either.
    check_room(left=100, available=500, needed=501, expected=901, num_blocks=4)
    with pytest.raises(SpecExtError, match=r"found 1000 bytes, expected at least 1001: 601 .*4 bl"):
        check_room(left=600, available=1000, needed=601, expected=1001, num_blocks=4)


def test_what_is_much_of_the_kv_cache_is_said(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("vllm.spec_ext")
    logger.addHandler(caplog.handler)  # vLLM's loggers hand nothing on
    check_room(left=750 << 20, available=1000 << 20, needed=1 << 20, expected=0, num_blocks=4)
    assert not caplog.messages
    check_room(left=700 << 20, available=1000 << 20, needed=1 << 20, expected=0, num_blocks=4)
    logger.removeHandler(caplog.handler)
    (message,) = set(caplog.messages)
    assert "300 of the 1000 MiB of KV cache are set aside for drafts (4 blocks)" in message
