# SPDX-License-Identifier: Apache-2.0
"""The occurrence index against a search by hand."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_spec_ext.proposers.text_index.occurrence_index import NO_POSITION, Match, OccurrenceIndex

tokens_lists = st.lists(st.integers(0, 3), max_size=60)


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def by_hand(tokens: list[int], suffix: list[int], max_ngram: int, hint: int, own: bool) -> Match:
    """Try every length, longest first, at every place."""
    end = len(tokens) - 1 if own else len(tokens)
    for length in range(min(len(suffix), max_ngram), 0, -1):
        wanted = suffix[-length:]
        ends = [i + 1 for i in range(end) if tokens[max(i - length + 1, 0) : i + 1] == wanted]
        if ends:
            behind = [place for place in ends if place > hint]
            return Match(length, len(ends), ends[-1], behind[0] if behind else NO_POSITION)
    return Match(0, 0, NO_POSITION, NO_POSITION)


@given(tokens_lists, tokens_lists, st.integers(1, 20), st.integers(-1, 60))
@settings(max_examples=400)
def test_longest_match_in_other_tokens(
    tokens: list[int], suffix: list[int], max_ngram: int, hint: int
) -> None:
    index = OccurrenceIndex()
    index.append(ids(tokens))
    found = index.longest(ids(suffix), max_ngram, hint=hint, need_all=True)
    expected = by_hand(tokens, suffix, max_ngram, hint, own=False)
    assert found._replace(num_places=0) == expected._replace(num_places=0)
    assert min(found.num_places, 2) == min(expected.num_places, 2)


@given(st.lists(tokens_lists, max_size=6), st.integers(1, 20))
@settings(max_examples=300)
def test_longest_match_of_its_own_end_while_it_grows(
    pieces: list[list[int]], max_ngram: int
) -> None:
    """Grown in pieces, past its first capacity; a match may overlap the suffix itself."""
    index = OccurrenceIndex()
    tokens: list[int] = []
    for piece in pieces:
        index.append(ids(piece))
        tokens += piece
        assert index.tokens.tolist() == tokens
        assert len(index) == len(tokens)
        found = index.longest(index.tokens[-max_ngram:], max_ngram, need_all=True, own=True)
        expected = by_hand(tokens, tokens[-max_ngram:], max_ngram, NO_POSITION, own=True)
        assert found == expected


@given(tokens_lists, tokens_lists, st.integers(1, 20))
@settings(max_examples=300)
def test_short_walk_agrees_where_it_promises_to(
    tokens: list[int], suffix: list[int], max_ngram: int
) -> None:
    """Without `need_all`: length and latest are exact, count says whether it is unique."""
    index = OccurrenceIndex()
    index.append(ids(tokens))
    found = index.longest(ids(suffix), max_ngram)
    expected = by_hand(tokens, suffix, max_ngram, NO_POSITION, own=False)
    assert (found.length, found.latest) == (expected.length, expected.latest)
    assert min(found.num_places, 2) == min(expected.num_places, 2)


def test_large_token_ids_and_growth_keep_every_link() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 2**31 - 2, 5000).astype(np.int32)
    index = OccurrenceIndex(16)
    for start in range(0, len(tokens), 7):
        index.append(tokens[start : start + 7])
    for place in (1, 2, 16, 17, 500, 4999):
        found = index.longest(tokens[:place], 16, need_all=True)
        assert found.length == min(place, 16)
        assert found.latest == place
    assert index.longest(ids([2**31 - 1]), 16).length == 0


def test_empty_index_and_empty_suffix() -> None:
    index = OccurrenceIndex()
    assert index.longest(ids([1]), 4).length == 0
    assert index.longest(ids([]), 4, own=True).length == 0
    index.append(ids([1]))
    assert index.longest(ids([1]), 4, own=True).length == 0


def longest_run_of_slots(index: OccurrenceIndex) -> int:
    """Of pairs, without a free one between them: what a look-up may have to walk through."""
    taken = index._keys[1] != -1
    ends = np.flatnonzero(np.diff(np.concatenate([[0], taken.astype(np.int8), [0]])))
    return int(np.diff(ends)[::2].max())


def test_texts_whose_pairs_look_alike_do_not_collide() -> None:
    """Tables of numbers have the same tokens between them; others are made up to collide."""
    numbers = np.arange(1500)
    for step in (1, 32, 4096, 2**20):
        index = OccurrenceIndex()
        index.append(np.stack([numbers * step + 7, np.full(1500, 5)], axis=1).ravel().astype("i4"))
        assert longest_run_of_slots(index) < 100
    again = OccurrenceIndex()
    again.append(index.tokens)
    assert (again._keys != index._keys).any(), "what collides cannot be foreseen"


def test_a_lookup_ends_in_a_long_text_that_repeats_itself() -> None:
    """What lies behind thousands of nearer places is not found; the nearest are."""
    near = np.tile(ids([3, 1, 2]), 40_000)
    index = OccurrenceIndex()
    index.append(np.concatenate([ids([8, 1, 2]), near]))
    for need_all, most in ((False, 4096), (True, 32768)):
        found = index.longest(ids([8, 1, 2]), 16, need_all=need_all)
        assert (found.length, found.num_places) == (2, most)
        assert found.latest == len(index)
    found = index.longest(ids([3, 1, 2]), 3, hint=len(index) - 10, need_all=True)
    assert (found.length, found.latest, found.following) == (3, len(index), len(index) - 9)
