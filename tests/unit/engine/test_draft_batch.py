# SPDX-License-Identifier: Apache-2.0
"""The row layout of a step's draft nodes, against the definition."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_spec_ext.engine.verifying.draft_batch import DraftBatch


@st.composite
def drafts(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int] | None]]:
    tokens: list[list[int]] = []
    parents: list[list[int] | None] = []
    for _ in range(draw(st.integers(1, 5))):
        size = draw(st.integers(0, 6))
        tokens.append(draw(st.lists(st.integers(-1, 9), min_size=size, max_size=size)))
        if size and draw(st.booleans()):
            # Longer than the draft: the scheduler may have cut it.
            parents.append([draw(st.integers(-1, i - 1)) for i in range(size + 2)])
        else:
            parents.append(None)
    return tokens, parents


@given(drafts())
def test_rows_follow_the_definition(
    given_drafts: tuple[list[list[int]], list[list[int] | None]],
) -> None:
    tokens, parents = given_drafts
    batch = DraftBatch.of(tokens, parents)
    assert batch.num_requests == len(tokens)
    request_of_row: list[int] = []
    depth_of_row: list[int] = []
    roots: list[int] = []
    flat_parents: list[int] = []
    for request, draft in enumerate(tokens):
        roots.append(len(request_of_row))
        request_of_row += [request] * (len(draft) + 1)
        own = parents[request]
        up = list(range(-1, len(draft) - 1)) if own is None else own[: len(draft)]
        flat_parents += up
        depths = [0]
        for parent in up:
            depths.append(depths[parent + 1] + 1)
        depth_of_row += depths
    assert batch.parents.tolist() == flat_parents
    assert batch.tokens.tolist() == [token for draft in tokens for token in draft]
    assert batch.root_rows.tolist() == roots
    assert batch.request_of_row.tolist() == request_of_row
    assert batch.depth_of_row.tolist() == depth_of_row
    assert batch.node_starts.tolist() == [
        0,
        *(sum(map(len, tokens[: i + 1])) for i in range(len(tokens))),
    ]


def test_batch_without_any_draft() -> None:
    batch = DraftBatch.of([[], []], [None, None])
    assert batch.root_rows.tolist() == [0, 1]
    assert batch.depth_of_row.tolist() == [0, 0]
    assert batch.parents.shape == (0,)


def test_some_rows_without_their_draft_tokens() -> None:
    batch = DraftBatch.of([[5, 6], [], [7, 8, 9]], [None, None, [-1, -1, 0]])
    rows = np.array([False, False, True, False, True, False, True, False])  # 4 is a root
    assert batch.without(rows).tokens.tolist() == [5, -1, 7, -1, 9]
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9]
