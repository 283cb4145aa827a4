# SPDX-License-Identifier: Apache-2.0
"""The method by itself; what the search finds is in ../candidates/test_search.py."""

from typing import Any

import numpy as np
import pytest

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import RequestOptions, parse_options
from vllm_spec_ext.proposers.base import (
    UNSALTED,
    Draft,
    EngineHandle,
    NextTokens,
    RequestStep,
    StepContext,
)
from vllm_spec_ext.proposers.recycling import Recycling
from vllm_spec_ext.proposers.recycling.options import RecyclingOptions


def started(**given: Any) -> Recycling:
    method = Recycling(parse_options(RecyclingOptions, given, "recycling"))
    method.start(EngineHandle(500, 4096, 8, 16, "none", lambda: None))
    return method


def rows(*contexts: tuple[int, int], first: int) -> NextTokens:
    """The likeliest behind each context: `first` and seven that follow it."""
    tokens = np.arange(first, first + 8, dtype=np.int32)
    probs = np.array([0.7, 0.1, *[0.01] * 6], np.float32)
    shape = (len(contexts), 8)
    return NextTokens(
        np.array(contexts, np.int32), np.broadcast_to(tokens, shape), np.broadcast_to(probs, shape)
    )


def drafted(
    method: Recycling, text: list[int], seen: NextTokens | None, name: str = "a", **given: Any
) -> Draft:
    given = {"share_group": UNSALTED, **given}
    step = RequestStep(
        name, np.array(text, np.int32), len(text) - 1, text[-1:], 6, next_tokens=seen, **given
    )
    (draft,) = method.propose(StepContext([step]))
    return draft


def test_rows_of_rejected_drafts_serve_where_the_text_comes_by() -> None:
    """The draft "30 31" was rejected; its row is there when the text says it after all."""
    method = started()
    drafted(method, [9, 20, 21], rows((20, 21), (30, 31), first=40))
    draft = drafted(method, [9, 20, 21, 30, 31], None)
    assert draft.tokens[0] == 40
    assert draft.sources is not None
    assert draft.sources[0] == ("recycled",)


def test_one_token_is_enough_where_two_are_not_known() -> None:
    method = started()
    drafted(method, [9, 20, 21], rows((20, 21), first=40))
    assert drafted(method, [9, 20, 21, 99, 21], None).tokens[0] == 40


def test_the_latest_row_counts() -> None:
    method = started()
    drafted(method, [9, 20, 21], rows((20, 21), first=40))
    drafted(method, [9, 20, 21, 20, 21], rows((20, 21), first=60))
    assert drafted(method, [9, 20, 21, 20, 21, 20, 21], None).tokens[0] == 60


@pytest.mark.parametrize(("group", "num_nodes"), [("one", 6), ("two", 0)])
def test_rows_serve_the_requests_of_one_cache_salt(group: str, num_nodes: int) -> None:
    method = started()
    seen = rows(*[(20 + i, 21 + i) for i in range(40)], first=40)
    drafted(method, [9, 20, 21], seen, share_group="one")
    draft = drafted(method, [8, 20, 21], None, "b", share_group=group)
    assert len(draft.tokens) == num_nodes


def test_more_cache_salts_at_once_than_are_kept_find_their_own_rows() -> None:
    method = started(max_cache_salts=2)
    for name in "abc" * 2:
        seen = rows(*[(20 + i, 21 + i) for i in range(40)], first=40)
        drafted(method, [9, 20, 21], seen, name, share_group=name)
    for name in "abc":
        assert len(drafted(method, [9, 20, 21, 22], None, name, share_group=name).tokens) == 6


def test_a_request_may_keep_its_rows_to_itself() -> None:
    """It finds them; of its group nobody else does."""
    for remember, num_nodes in ((True, 6), (False, 0)):
        method = started()
        options = RequestOptions(remember=remember)
        seen = rows(*[(20 + i, 21 + i) for i in range(40)], first=40)
        drafted(method, [9, 20, 21], seen, options=options)
        assert len(drafted(method, [9, 20, 21, 22], None, options=options).tokens) == 6
        assert len(drafted(method, [8, 20, 21], None, "b").tokens) == num_nodes


def test_text_that_repeats_itself_is_no_reason_to_draft() -> None:
    """It has the rows alone, unlike `suffix_tree`."""
    assert len(drafted(started(), [5, 6, 7] * 6, None).tokens) == 0


def test_it_asks_the_engine_for_the_rows() -> None:
    assert started().needs.next_tokens == 8


def test_wrong_options_are_refused() -> None:
    with pytest.raises(SpecExtError, match="contexts"):
        started(contexts=0)


def test_texts_are_not_kept_for_a_method_that_does_not_look_into_them() -> None:
    method = started()
    drafted(method, [9, 20, 21], rows((20, 21), first=40))
    assert len(method._lookup._texts) == 0
