# SPDX-License-Identifier: Apache-2.0
"""Parts of the V2 adapter that need no engine: layouts by path, requests, filled-up trees."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm_spec_ext.engine.step import Step
from vllm_spec_ext.engine.trees.plan import RequestRows, build_plan
from vllm_spec_ext.engine.v2.batch_rows import batch_rows
from vllm_spec_ext.engine.v2.chains import follow_chains
from vllm_spec_ext.engine.v2.known_requests import KnownRequests
from vllm_spec_ext.engine.v2.path_rows import path_rows
from vllm_spec_ext.engine.verifying.draft_batch import DraftBatch
from vllm_spec_ext.scorers.walk.tree import Walk

TREES = st.integers(0, 9).flatmap(
    lambda n: st.tuples(*(st.integers(-1, node - 1) for node in range(n)))
)


@given(st.lists(TREES, min_size=1, max_size=4))
def test_every_row_stands_behind_its_ancestors(trees: list[tuple[int, ...]]) -> None:
    batch = DraftBatch.of([[1] * len(tree) for tree in trees], [list(tree) for tree in trees])
    layout = path_rows(batch, [True] * len(trees))
    num_rows = len(batch.request_of_row)
    assert layout.rows[layout.places].tolist() == list(range(num_rows))
    assert layout.depths[layout.places].tolist() == batch.depth_of_row.tolist()
    for place, (row, depth) in enumerate(zip(layout.rows, layout.depths, strict=True)):
        request = batch.request_of_row[row]
        root = int(batch.root_rows[request])
        expected = [int(row)]
        while expected[0] != root:
            node = expected[0] - root - 1 + int(batch.node_starts[request])
            expected.insert(0, root + 1 + int(batch.parents[node]))
        assert layout.rows[place - depth : place + 1].tolist() == expected


def test_only_requests_that_read_what_came_before_have_rows_repeated() -> None:
    """A trunk of two and three leaves, twice."""
    tree = [-1, 0, 1, 1, 1]
    batch = DraftBatch.of([[7, 8, 9, 10, 11]] * 2, [tree, tree])
    layout = path_rows(batch, [True, False])
    assert layout.rows.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 5, *range(6, 12)]
    assert layout.rows[layout.places].tolist() == list(range(12))
    assert layout.drafted[12:].tolist() == [-1, 7, 8, 9, 10, 11]


def picture(offset: int) -> Any:
    return SimpleNamespace(mm_position=SimpleNamespace(offset=offset))


def new(
    request_id: str,
    tokens: list[int],
    prompt: int,
    blocks: list[int],
    pictures: tuple[Any, ...] = (),
) -> Any:
    return SimpleNamespace(
        req_id=request_id,
        prefill_token_ids=tokens,
        prompt_len=prompt,
        sampling_params=SimpleNamespace(),
        block_ids=(blocks,),
        prompt_embeds=None,
        mm_features=pictures,
    )


def scheduled(news: list[Any], cached: dict[str, list[int] | None]) -> Any:
    blocks = [None if own is None else (own,) for own in cached.values()]
    return SimpleNamespace(
        scheduled_new_reqs=news,
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(cached), new_block_ids=blocks),
    )


def test_tokens_and_blocks_follow_the_scheduler() -> None:
    known = KnownRequests()
    known.schedule(scheduled([new("a", [1, 2, 3], 3, [7])], {}))
    before = known.get("a").token_ids
    known.append(["a"], [[4, 5]])
    known.schedule(scheduled([], {"a": [9], "unknown": [1]}))
    known.append(["a"], [[]])
    found = known.get("a")
    assert found.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert found.num_prompt_tokens == 3
    assert before.tolist() == [1, 2, 3]
    assert known.blocks("a").tolist() == [7, 9]
    # Preempted, it comes back with all it had said, in other blocks.
    known.forget(["a"])
    assert "a" not in known
    known.schedule(scheduled([new("a", [1, 2, 3, 4, 5], 3, [2, 3])], {}))
    known.append(["a"], [[6]])
    assert known.get("a").token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert known.num_tokens("a") == 6
    assert known.blocks("a").tolist() == [2, 3]


def test_rows_of_draft_models() -> None:
    """A prompt in pieces, its last piece, and drafts of which the second one was taken."""
    known = KnownRequests()
    prompt = list(range(10, 20))
    known.schedule(
        scheduled(
            [
                new("long", prompt, 10, [1, 2, 3]),
                new("seen", [5, 6, 7], 3, [4], pictures=(picture(2), picture(1))),
                new("old", [30, 31, 32], 3, [6]),
            ],
            {},
        )
    )
    known.append(["old"], [[33]])
    step = Step(("long", "seen", "old"), [[], [], [40, 41, 42]], [4, 3, 4])
    step.walk = Walk(
        emitted=np.array([[-1] * 4, [8, -1, -1, -1], [41, 50, -1, -1]]),
        num_accepted=np.array([0, 0, 1]),
        accepted=np.array([[-1] * 3, [-1] * 3, [1, -1, -1]]),
    )
    new_tokens = [[], [8], [41, 50]]
    known.append(step.request_ids, new_tokens)
    long, seen, old = batch_rows(known, step, [2, 0, 3], new_tokens, group=0)
    assert (long.is_prefill, seen.is_prefill, old.is_prefill) == (True, False, False)
    assert (long.num_ids, seen.num_ids, old.num_ids) == (None, 1, None)
    assert long.tokens.tolist() == prompt[:6]
    assert long.following is not None
    assert long.following.tolist() == prompt[1:7]  # the token behind the piece is known
    assert seen.tokens.tolist() == [5, 6, 7, 8]
    assert old.tokens.tolist() == [30, 31, 32, 33, 41, 50]
    assert old.following is not None
    assert old.following.tolist() == [31, 32, 33, 41, 50]
    assert [row.computed for row in (long, seen, old)] == [2, 0, 3]
    assert [row.blocks.tolist() for row in (long, seen, old)] == [[1, 2, 3], [4], [6]]
    found = [row.state_rows for row in (long, seen, old)]
    assert [None if rows is None else rows.tolist() for rows in found] == [
        [0, 1, 2, 3],
        [4, 5, 6],
        [7, 9],  # that of the root, and of the second draft token
    ]


def test_rows_that_fill_a_tree_up_are_a_virtual_request_of_their_own() -> None:
    """All rows of the step belong to one, in order, and no scratch block is spent on fillers."""
    tree = RequestRows(first_row=2, num_tokens=8, num_computed=37, parents=[-1, 0, -1, 2])
    requests = [RequestRows(0, 2, 10), tree]
    plan = build_plan(requests, np.arange(8).reshape(2, 4), 16, range(50, 60))
    assert plan.query_starts.tolist() == [0, 2, 5, 7, 10]
    assert plan.seq_lens[-1] == 37 + 8
    assert plan.kept.tolist() == [-1, 4]
    assert plan.num_dropped == 0
    assert plan.table_blocks.tolist() == [50]
    assert plan.table_rows.tolist() == [2]


CHAINS = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 2)), min_size=1, max_size=6),
    min_size=1,
    max_size=5,
)


@given(CHAINS)
def test_chains_are_followed_as_far_as_the_draws_agree(chains: list[list[Any]]) -> None:
    """Each row: the target's draw there, and the row's own token; -1 is no draft."""
    starts = np.cumsum([0, *map(len, chains)])
    sampled = torch.tensor([draw for chain in chains for draw, _ in chain])
    drafted = torch.tensor([token for chain in chains for _, token in chain], dtype=torch.int32)
    tokens, counts = follow_chains(sampled, drafted, torch.from_numpy(starts.astype(np.int32)), 5)
    assert tokens.shape == (len(chains), 6)
    for row, chain in enumerate(chains):
        emitted = [chain[0][0]]
        for draw, token in chain[1:]:
            if token != emitted[-1]:
                break
            emitted.append(draw)
        assert tokens[row, : counts[row]].tolist() == emitted
