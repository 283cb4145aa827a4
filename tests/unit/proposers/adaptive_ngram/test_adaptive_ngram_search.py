# SPDX-License-Identifier: Apache-2.0
"""Search against brute force on a tiny vocabulary; order and closure of what it returns."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from number_corpus import build_corpus

from vllm_spec_ext.proposers.adaptive_ngram.lookup import BACKOFF, MAX_ROW, Lookup, successors
from vllm_spec_ext.proposers.adaptive_ngram.overlay import OverlayPool, learn
from vllm_spec_ext.proposers.adaptive_ngram.search import (
    BEST_FIRST,
    CHAIN,
    MCTS,
    Results,
    Search,
    make_memory,
    search_batch,
    settings_array,
)
from vllm_spec_ext.proposers.adaptive_ngram.tree_order import depth_first, published_cut
from vllm_spec_ext.proposers.corpus.store import BaseArrays, empty_arrays

V = 8
Node = tuple[int, ...]  # the path of tokens from the root


class Model:
    """A request overlay, a shared one and optionally a store, with the kernels' settings."""

    def __init__(self, seed: int, base: BaseArrays | None = None, **lookup: object) -> None:
        rng = np.random.default_rng(seed)
        self.base = empty_arrays(V) if base is None else base
        self.request, self.shared = OverlayPool(1, 64), OverlayPool(1, 64)
        for pool in (self.request, self.shared):
            pool.acquire()
            tokens = rng.integers(0, V, 120).astype(np.int32)
            learn(pool.arrays, 0, tokens, 0, V, True, 60.0, 1.0, 3.0)
        settings: dict[str, object] = {
            "vocab_size": V,
            "backoff": BACKOFF["mix"],
            "backoff_weight": 0.6,
            "request_weight": 1.0,
            "shared_weight": 0.5,
            "request_half_life": 60.0,
            "shared_half_life": 60.0,
            "normalise": True,
            "unseen_weight": 0.0,
        }
        self.lookup = Lookup(**(settings | lookup))  # type: ignore[arg-type]

    def row(self, w1: int, w2: int) -> dict[int, float]:
        tokens, probs = np.zeros(MAX_ROW, np.int32), np.zeros(MAX_ROW, np.float32)
        n = successors(
            self.base,
            self.request.arrays,
            0,
            self.shared.arrays,
            self.lookup,
            w1,
            w2,
            tokens,
            probs,
        )
        assert len(set(tokens[:n].tolist())) == n
        return dict(zip(tokens[:n].tolist(), probs[:n].tolist(), strict=True))

    def search(self, w1: int, w2: int, budget: int, **how: object) -> dict[Node, float]:
        settings: dict[str, object] = {
            "mode": BEST_FIRST,
            "max_depth": 3,
            "min_confidence": 0.0,
            "iterations": 150,
            "max_sequences": 0,
            "greedy_extension": False,
        }
        search = Search(**(settings | how))  # type: ignore[arg-type]
        results = Results(
            np.zeros((1, budget), np.int32),
            np.zeros((1, budget), np.int32),
            np.zeros((1, budget), np.float32),
            np.zeros(1, np.int64),
        )
        search_batch(
            np.array([[w1, w2, 0, budget, 0]], np.int64),
            1,
            self.base,
            self.request.arrays,
            self.shared.arrays,
            settings_array(self.lookup, search),
            make_memory(budget),
            results,
        )
        n = int(results.counts[0])
        return tree_paths(results.tokens[0, :n], results.parents[0, :n], results.probs[0, :n])

    def brute_force(self, w1: int, w2: int, depth: int) -> dict[Node, float]:
        """Probability of every path up to a depth."""
        found: dict[Node, float] = {}
        for length in range(1, depth + 1):
            for path in itertools.product(range(V), repeat=length):
                history, prob = [w1, w2], 1.0
                for token in path:
                    prob *= self.row(*history[-2:]).get(token, 0.0)
                    if prob == 0.0:
                        break
                    history.append(token)
                if prob > 0.0:
                    found[path] = prob
        return found


def tree_paths(tokens: np.ndarray, parents: np.ndarray, probs: np.ndarray) -> dict[Node, float]:
    """Paths of a draft; asserts that it is closed, without twins and in depth-first order."""
    paths: list[Node] = []
    for node, (token, parent) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
        assert -1 <= parent < node
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        if node:  # pre-order: the parent is the node before, or one of its ancestors
            before = paths[node - 1]
            assert parent < 0 or before[: len(paths[parent])] == paths[parent]
    assert len(set(paths)) == len(paths)
    return dict(zip(paths, probs.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [1, 7, 32])
def test_best_first_equals_brute_force(seed: int, budget: int) -> None:
    model = Model(seed)
    expected = sorted(model.brute_force(1, 2, 3).values(), reverse=True)[:budget]
    found = model.search(1, 2, budget)
    assert sorted(found.values(), reverse=True) == pytest.approx(expected, rel=1e-4)
    every = model.brute_force(1, 2, 3)
    for path, prob in found.items():
        assert every[path] == pytest.approx(prob, rel=1e-4)


def test_threshold_and_depth() -> None:
    model = Model(5)
    every = model.brute_force(1, 2, 3)
    wanted = {path for path, prob in every.items() if prob >= 0.05}
    assert set(model.search(1, 2, 512, min_confidence=0.05)) == wanted
    assert model.search(1, 2, 32, min_confidence=0.999) == {}
    assert max(map(len, model.search(1, 2, 64, max_depth=2))) == 2


@pytest.mark.parametrize("mode", [CHAIN, BEST_FIRST, MCTS])
def test_first_path_is_the_greedy_path(mode: int) -> None:
    for seed in range(5):
        model = Model(seed)
        history: list[int] = [1, 2]
        for path in model.search(1, 2, 200, mode=mode):
            if len(path) != len(history) - 1:
                break
            row = model.row(*history[-2:])
            assert row[path[-1]] == pytest.approx(max(row.values()))
            history.append(path[-1])
        assert len(history) > 3


def test_chain_is_cut_at_the_threshold() -> None:
    model = Model(2)
    full = model.search(1, 2, 16, mode=CHAIN, max_depth=16)
    cut = model.search(1, 2, 16, mode=CHAIN, max_depth=16, min_confidence=0.1)
    assert cut == {path: prob for path, prob in full.items() if prob >= 0.1}
    assert [len(path) for path in full] == list(range(1, len(full) + 1))


def test_mcts_equals_a_plain_python_rewrite() -> None:
    model = Model(3)
    visits: dict[Node, int] = {(): 0}
    children: dict[Node, dict[Node, float]] = {}

    def expand(path: Node) -> None:
        history = (1, 2, *path)
        row = sorted(model.row(*history[-2:]).items(), key=lambda item: -item[1])
        children[path] = {(*path, token): prob for token, prob in row}
        for child in children[path]:
            visits[child] = 0

    expand(())
    for _ in range(60):
        node: Node = ()
        while children.get(node):
            fresh = [child for child in children[node] if visits[child] == 0]
            scores = {
                c: np.float32(p) / np.float32(1 + visits[c]) for c, p in children[node].items()
            }
            node = fresh[0] if fresh else max(scores, key=lambda child: scores[child])
        if node not in children and len(node) < 3:
            expand(node)
        for length in range(len(node) + 1):
            visits[node[:length]] += 1
    ranked = sorted((path for path in visits if path), key=lambda path: -visits[path])
    found = model.search(1, 2, 20, mode=MCTS, iterations=60)
    assert sorted(visits[path] for path in found) == sorted(visits[path] for path in ranked[:20])


def test_published_settings() -> None:
    model = Model(4, normalise=False, backoff=BACKOFF["off"])
    found = model.search(1, 2, 64, mode=MCTS, max_depth=4, max_sequences=24, greedy_extension=True)
    assert 0 < len(found) <= 46  # 23 sequences, each with one more token
    assert max(map(len, found)) <= 4
    short = model.search(1, 2, 5, mode=MCTS, max_depth=4, max_sequences=24, greedy_extension=True)
    assert len(short) == 5


def test_published_cut_drops_the_longest_sequences() -> None:
    # 30 chains of three distinct tokens and one root-level node: 91 tokens counted, 64 allowed.
    tokens = np.arange(91, dtype=np.int32)
    parents = np.array([-1 if i % 3 == 0 else i - 1 for i in range(91)], np.int32)
    probs = np.linspace(1, 0.1, 91).astype(np.float32)
    # Only the leaves are sequences here.
    order = [*range(2, 90, 3), 90]
    work = np.zeros((4, 128), np.int32)
    work[0, : len(order)] = order
    left = published_cut(tokens, parents, probs, len(order), 91, work)
    assert left == 64
    assert tokens[left - 1] == 90  # the short sequence stays, the last long ones go
    assert (parents[:left] < np.arange(left)).all()


def test_depth_first_order_by_hand() -> None:
    tokens = np.array([10, 20, 11, 12, 21], np.int32)
    parents = np.array([-1, -1, 0, 0, 1], np.int32)
    out = (np.zeros(5, np.int32), np.zeros(5, np.int32))
    probs = np.linspace(1, 0.2, 5).astype(np.float32)
    out_probs = np.zeros(5, np.float32)
    depth_first(tokens, parents, probs, 5, np.zeros((4, 8), np.int32), out[0], out[1], out_probs)
    assert out[0].tolist() == [10, 11, 12, 20, 21]
    assert out[1].tolist() == [-1, 0, 0, -1, 3]
    assert out_probs.tolist() == probs[[0, 2, 3, 1, 4]].tolist()


def test_merge_by_hand() -> None:
    model = Model(0, backoff=BACKOFF["mix"], backoff_weight=0.5, shared_weight=0.0)
    model.request.clear(0)
    tokens = np.array([1, 2, 3, 0, 1, 2, 4, 0, 2, 5], np.int32)
    learn(model.request.arrays, 0, tokens, 0, V, True, 0.0, 0.25, 3.0)
    model.lookup = model.lookup._replace(request_half_life=0.0)
    # (1, 2): 3 and 4 at 0.25 each; the open half goes to 2's row (3, 4, 5 at 0.25), times 0.5.
    assert model.row(1, 2) == pytest.approx({3: 0.3125, 4: 0.3125, 5: 0.0625})
    assert model.row(7, 2) == pytest.approx({3: 0.125, 4: 0.125, 5: 0.125})
    model.lookup = model.lookup._replace(backoff=BACKOFF["off"])
    assert model.row(1, 2) == pytest.approx({3: 0.25, 4: 0.25})
    assert model.row(7, 2) == {}
    model.lookup = model.lookup._replace(request_weight=4.0)
    assert model.row(1, 2) == pytest.approx({3: 0.5, 4: 0.5})


def test_what_was_seen_once_is_not_certain() -> None:
    model = Model(0, backoff_weight=0.5, shared_weight=0.0, request_weight=4.0, unseen_weight=1.0)
    model.lookup = model.lookup._replace(request_half_life=0.0)
    model.request.clear(0)
    tokens = np.array([1, 2, 3, 0, 1, 2, 4, 0, 2, 5], np.int32)
    learn(model.request.arrays, 0, tokens, 0, V, True, 0.0, 0.25, 3.0)
    # (1, 2): 3, 4 and all else weigh 1 each; the third left goes to 2's row, (3, 4, 5, all else).
    third, twelfth = 1 / 3, 1 / 3 * 0.5 / 4
    expected = {3: third + twelfth, 4: third + twelfth, 5: twelfth}
    assert model.row(1, 2) == pytest.approx(expected)
    learn(model.request.arrays, 0, tokens, 0, V, True, 0.0, 0.25, 3.0)
    more = model.row(1, 2)
    assert more[3] == pytest.approx(0.4 + 0.2 * 0.5 * 2 / 7)


def test_fading_makes_nothing_more_certain() -> None:
    model = Model(0, backoff=BACKOFF["off"], shared_weight=0.0, unseen_weight=1.0)
    model.lookup = model.lookup._replace(request_half_life=0.0)
    model.request.clear(0)
    learn(model.request.arrays, 0, np.array([1, 2, 3], np.int32), 0, V, True, 0.0, 1.0, 3.0)
    weights = [2.0, 1.01, 0.99, 0.6, 0.5, 0.3]
    shares = []
    for weight in weights:
        model.lookup = model.lookup._replace(request_weight=weight)
        shares.append(model.row(1, 2)[3])
    assert shares == pytest.approx([2 / 3, 1.01 / 2.01, 0.5, 0.5, 0.5, 0.3])


def test_store_and_overlays_together_equal_brute_force(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    store = build_corpus(tmp_path, [rng.integers(0, V, 400)], V, top_k=3)
    model = Model(9, base=store.arrays)
    expected = sorted(model.brute_force(1, 2, 2).values(), reverse=True)[:24]
    assert sorted(model.search(1, 2, 24, max_depth=2).values(), reverse=True) == pytest.approx(
        expected, rel=1e-4
    )
    model.lookup = model.lookup._replace(request_weight=0.0, shared_weight=0.0, backoff=0)
    for w1, w2 in itertools.product(range(V), repeat=2):
        # Quantised probabilities may sum to a little over 1, and are scaled back then.
        assert model.row(w1, w2) == pytest.approx(dict(store.row(w1, w2)), rel=0.03)
    # A token that was never seen at all: the corpus's most frequent ones.
    blank = Model(9, base=store.arrays, request_weight=0.0, shared_weight=0.0)
    assert sum(blank.row(-1, 0).values()) <= 1.0001
