# SPDX-License-Identifier: Apache-2.0
"""What every node of a planned step can see, against a walk up its ancestors.

The step is played on a model of the cache that holds names instead of keys and values: which slot
holds whose KV follows from vLLM's own slot mapping, the plan's changes and its block copies.
"""

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_spec_ext.engine.trees.plan import (
    RequestRows,
    TreePlan,
    build_plan,
    fitting_prefix,
    num_scratch_blocks,
    segment_bounds,
)
from vllm_spec_ext.proposers.draft_tree import is_branching, node_depths

Name = tuple[str, int, int]  # ("old", request, position) or ("row", request, node); node -1 = root


def ancestors(parents: list[int], node: int) -> list[int]:
    """Nodes from the root's child to `node`, found by walking up; brute force."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12) -> list[int]:
    """Parents of a random tree; runs of children are common, as in real drafts."""
    size = draw(st.integers(1, max_nodes))
    parents = [-1]
    for i in range(1, size):
        follows = draw(st.booleans())
        parents.append(i - 1 if follows else draw(st.integers(-1, i - 1)))
    return parents


@dataclass
class Step:
    """A random batch: trees, chains and prefill chunks, over a shuffled block table."""

    block_size: int
    requests: list[RequestRows]
    table: np.ndarray  # [num_requests, width] int32
    scratch: list[int]


@st.composite
def steps(draw: st.DrawFn, plenty: bool = True) -> Step:
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    requests: list[RequestRows] = []
    row = 0
    for _ in range(draw(st.integers(1, 4))):
        computed = draw(st.integers(0, 3 * block_size + 2))
        parents = draw(trees())
        kind = draw(st.sampled_from(["tree", "tree", "chunk"]))
        if kind == "tree" and is_branching(parents):
            requests.append(RequestRows(row, len(parents) + 1, computed, parents))
        else:
            requests.append(RequestRows(row, draw(st.integers(1, 7)), computed))
        row += requests[-1].num_tokens
    width = max(r.num_computed + r.num_tokens for r in requests) // block_size + 2
    # Some slack behind the last block, as vLLM allocates for the longest chain.
    order = draw(st.permutations(range(len(requests) * width)))
    table = np.array(order, np.int32).reshape(len(requests), width)
    needed = sum(
        sum(
            num_scratch_blocks(node_depths(r.parents)[end - 1], r.num_computed, block_size)
            for _, end in segment_bounds(r.parents)[1:]
        )
        for r in requests
        if r.parents is not None
    )
    size = needed if plenty else draw(st.integers(0, needed))
    return Step(block_size, requests, table, list(range(len(order), len(order) + size)))


def play(step: Step, plan: TreePlan) -> tuple[dict[int, Name], dict[int, int]]:
    """Run the step's KV writes.

    Returns:
        What each slot holds afterwards, and each row's position.
    """
    size = step.block_size
    cache: dict[int, Name] = {}
    slots: dict[int, int] = {}
    positions: dict[int, int] = {}
    names: dict[int, Name] = {}
    for index, request in enumerate(step.requests):
        for position in range(request.num_computed):
            block = int(step.table[index, position // size])
            cache[block * size + position % size] = ("old", index, position)
        for i in range(request.num_tokens):  # vLLM's layout: one row behind the other
            position = request.num_computed + i
            block = int(step.table[index, position // size])
            slots[request.first_row + i] = block * size + position % size
            positions[request.first_row + i] = position
            names[request.first_row + i] = ("row", index, i - 1)
    positions.update(zip(plan.rows.tolist(), plan.positions.tolist(), strict=True))
    slots.update(zip(plan.rows.tolist(), plan.slots.tolist(), strict=True))
    tail_copies = plan.tail_copies.tolist()
    assert not {a for a, _ in tail_copies} & {b for _, b in tail_copies}
    copied = {
        b * size + i: cache[a * size + i]
        for a, b in tail_copies
        for i in range(size)
        if a * size + i in cache
    }
    cache.update(copied)
    shared_rows, shared_slots = plan.shared_rows.tolist(), plan.shared_slots.tolist()
    written = [*slots.values(), *shared_slots]
    assert len(set(written)) == len(written), "two rows write the same slot"
    cache.update({slot: names[row] for row, slot in slots.items()})
    cache.update({slot: names[row] for row, slot in zip(shared_rows, shared_slots, strict=True)})
    return cache, positions


def tables_of(step: Step, plan: TreePlan) -> np.ndarray:
    """[num_virtual, width] block table of each virtual request."""
    tables = step.table[plan.request_of].copy()
    places = zip(plan.table_rows.tolist(), plan.table_columns.tolist(), strict=True)
    assert len(set(places)) == len(plan.table_rows)
    tables[plan.table_rows, plan.table_columns] = plan.table_blocks
    return tables


def history(step: Step, index: int, node: int) -> list[Name]:
    """What a row of a request must see, by position: brute force."""
    request = step.requests[index]
    old: list[Name] = [("old", index, p) for p in range(request.num_computed)]
    if request.parents is None:
        return old + [("row", index, i) for i in range(-1, node + 1)]
    path = ancestors(list(request.parents), node)
    return [*old, ("row", index, -1), *(("row", index, i) for i in path)]


def check_visibility(step: Step, plan: TreePlan) -> int:
    """Every kept row sees exactly its history, at the right positions; returns rows checked."""
    cache, positions = play(step, plan)
    tables = tables_of(step, plan)
    size = step.block_size
    checked = 0
    query_lens = np.diff(plan.query_starts).tolist()
    assert query_lens.count(0) == 0
    assert plan.longest_query == max(query_lens)
    assert plan.longest_seq == max(plan.seq_lens.tolist())
    assert plan.query_starts[0] == 0, "rows must stay where vLLM put them"
    assert plan.query_starts[-1] == sum(r.num_tokens for r in step.requests)
    for virtual, index in enumerate(plan.request_of):
        request = step.requests[index]
        for i in range(query_lens[virtual]):
            row = int(plan.query_starts[virtual]) + i
            node = row - request.first_row - 1
            if request.parents is not None and node >= plan.kept[index]:
                continue  # dropped: no scratch was left
            # Causal attention: the i-th query of q sees the first seq_len - q + i + 1 keys.
            num_seen = int(plan.seq_lens[virtual]) - query_lens[virtual] + i + 1
            expected = history(step, index, node)
            assert num_seen == len(expected)
            assert positions[row] == len(expected) - 1
            seen = [
                cache.get(int(tables[virtual, p // size]) * size + p % size)
                for p in range(num_seen)
            ]
            assert seen == expected
            checked += 1
    return checked


@given(steps())
@settings(max_examples=300)
def test_every_node_sees_exactly_its_ancestors(step: Step) -> None:
    plan = build_plan(step.requests, step.table, step.block_size, step.scratch)
    assert plan.num_dropped == 0
    assert check_visibility(step, plan) == sum(r.num_tokens for r in step.requests)


@given(steps(plenty=False))
@settings(max_examples=300)
def test_with_too_few_scratch_blocks_a_prefix_is_kept(step: Step) -> None:
    plan = build_plan(step.requests, step.table, step.block_size, step.scratch)
    kept = check_visibility(step, plan)
    assert kept + plan.num_dropped == sum(r.num_tokens for r in step.requests)
    used = plan.table_blocks.tolist()
    assert len(set(used)) == len(used)
    assert set(used) <= set(step.scratch)
    for index, request in enumerate(step.requests):
        if request.parents is not None:
            first_run = segment_bounds(request.parents)[0][1]
            assert plan.kept[index] >= first_run
        else:
            assert plan.kept[index] == -1


def commits_of(step: Step, plan: TreePlan, index: int, path: list[int]) -> list[tuple[int, int]]:
    """Blocks (from, to) if a request's path is accepted, and nothing of the others."""
    accepted = np.full((len(step.requests), len(path) + 1), -1, np.int64)
    accepted[index, : len(path)] = path
    num_accepted = np.zeros(len(step.requests), np.int64)
    num_accepted[index] = len(path)
    found = zip(*(each.tolist() for each in plan.commits(accepted, num_accepted)), strict=True)
    return [(block, int(step.table[row, column])) for row, block, column in found]


@given(steps(plenty=False))
@settings(max_examples=300)
def test_commit_leaves_the_accepted_path_in_the_requests_own_blocks(step: Step) -> None:
    """After the copies, and for every node that may be the last accepted one."""
    plan = build_plan(step.requests, step.table, step.block_size, step.scratch)
    before, _ = play(step, plan)
    size = step.block_size
    for index, request in enumerate(step.requests):
        if request.parents is None:
            assert commits_of(step, plan, index, list(range(request.num_tokens - 1))) == []
            continue
        assert commits_of(step, plan, index, []) == []
        for node in range(int(plan.kept[index])):
            expected = history(step, index, node)
            copies = commits_of(step, plan, index, ancestors(list(request.parents), node))
            assert not {a for a, _ in copies} & {b for _, b in copies}
            cache = dict(before)
            for a, b in copies:
                for i in range(size):
                    cache.pop(b * size + i, None)
                    if a * size + i in before:
                        cache[b * size + i] = before[a * size + i]
            found = [
                cache.get(int(step.table[index, p // size]) * size + p % size)
                for p in range(len(expected))
            ]
            assert found == expected


@given(trees(20), st.integers(0, 70), st.sampled_from([1, 2, 4, 16, 32]), st.integers(0, 30))
@settings(max_examples=300)
def test_fitting_prefix_is_what_build_plan_keeps(
    parents: list[int], computed: int, block_size: int, num_free: int
) -> None:
    size, used = fitting_prefix(parents, computed, block_size, num_free)
    assert used <= num_free
    width = (computed + len(parents)) // block_size + 2
    table = np.arange(width, dtype=np.int32)[None]
    request = RequestRows(0, len(parents) + 1, computed, parents)
    plan = build_plan([request], table, block_size, list(range(width, width + num_free)))
    if not is_branching(parents):
        assert (size, used) == (len(parents), 0)
    assert plan.kept[0] == size
    assert len(plan.table_blocks) == used
    if size < len(parents):
        # The longest prefix: one node more needs at least one block that is not there.
        longer = build_plan(
            [RequestRows(0, size + 2, computed, parents[: size + 1])],
            table,
            block_size,
            list(range(width, width + num_free)),
        )
        starts = {first for first, _ in segment_bounds(parents)}
        assert size in starts
        assert (
            longer.num_dropped == 1
            or fitting_prefix(parents[: size + 1], computed, block_size, num_free)[0] == size + 1
        )


@given(trees(20))
def test_segments_and_depths(parents: list[int]) -> None:
    bounds = segment_bounds(parents)
    assert [i for first, end in bounds for i in range(first, end)] == list(range(len(parents)))
    for first, end in bounds:
        assert all(parents[i] == i - 1 for i in range(first + 1, end))
        assert first == 0 or parents[first] != first - 1
    assert node_depths(parents) == [len(ancestors(parents, i)) - 1 for i in range(len(parents))]
    assert is_branching(parents) == (len(bounds) > 1)


def test_a_chain_needs_nothing() -> None:
    assert segment_bounds([-1, 0, 1]) == [(0, 3)]
    assert fitting_prefix([-1, 0, 1], 5, 4, 0) == (3, 0)
    assert not is_branching([])
