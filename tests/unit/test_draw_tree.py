# SPDX-License-Identifier: Apache-2.0
"""The picture of a draft tree is valid XML, holds every token and marks the accepted path."""

from xml.etree import ElementTree

import pytest

from vllm_spec_ext.draw_tree import draw_tree, tree_rows, visible
from vllm_spec_ext.errors import SpecExtError

SVG = "{http://www.w3.org/2000/svg}"


def test_every_token_is_drawn_and_the_accepted_path_marked() -> None:
    text = draw_tree(
        [" a", "<b>", "c&d", " e"],
        [-1, 0, -1, 2],
        [2, 3],
        'title "x" < y',
        root="\n",
        bonus="end",
        probs=[0.5, 0.25, 0.2, 0.1],
    )
    drawing = ElementTree.fromstring(text)
    groups = drawing.findall(f"{SVG}g")
    labels = {group.findtext(f"{SVG}text"): group.get("class") for group in groups}
    assert labels == {
        "⏎": "accepted",
        "␣a": None,
        "<b>": None,
        "c&d": "accepted",
        "␣e": "accepted",
        "end": "bonus",
    }
    edges = [path.get("class") for path in drawing.findall(f"{SVG}path")]
    assert edges == [None, None, "accepted", "accepted", "bonus"]
    assert "prefers-color-scheme: dark" in text
    assert [note.text for note in drawing.iter(f"{SVG}text") if note.get("class") == "note"] == [
        "0.50",
        "0.25",
        "0.20",
        "0.10",
    ]


def test_no_two_nodes_stand_in_the_same_place() -> None:
    parents = [-1, 0, 0, 1, -1, 4, 4]
    text = draw_tree([str(i) for i in range(7)], parents, [], "t")
    boxes = [(r.get("x"), r.get("y")) for r in ElementTree.fromstring(text).iter(f"{SVG}rect")]
    assert len(set(boxes)) == len(boxes) == 8


def test_the_first_child_stands_beside_its_parent() -> None:
    #  0 ─ 1 ─ 2
    #    │   └ 3
    #    └ 4
    assert tree_rows([-1, 0, 1, 1, 0]) == [0, 0, 0, 1, 2]


def test_an_empty_draft_shows_the_root_and_the_targets_token() -> None:
    drawing = ElementTree.fromstring(draw_tree([], [], [], "t", root="a", bonus="b"))
    assert len(list(drawing.iter(f"{SVG}rect"))) == 2


def test_each_source_has_a_colour_that_is_explained() -> None:
    sources = [["big", "small"], ["big"], ["small"]]
    text = draw_tree(["a", "b", "c"], [-1, 0, -1], [], "t", sources=sources, bonus="d")
    drawing = ElementTree.fromstring(text)
    stripes = [(line.get("class"), line.get("y1")) for line in drawing.iter(f"{SVG}line")]
    places = sorted({y for _, y in stripes}, key=lambda y: float(y or 0))
    by_line = [{kind for kind, y in stripes if y == place} for place in places]
    both = {"source0", "source1"}
    # The root's line with "a" and "b", the line of "c", and the names at the foot.
    assert by_line == [both, {"source1"}, both]
    assert [t.text for t in drawing.findall(f"{SVG}text")] == ["t", "big", "small"]
    one = draw_tree(["a"], [-1], [], "t")
    assert not list(ElementTree.fromstring(one).iter(f"{SVG}line"))


@pytest.mark.parametrize(
    ("parents", "accepted", "reason"),
    [([0], [], "expected -1"), ([-1, -1], [], "parents"), ([-1], [1], "no path")],
)
def test_what_is_no_tree_is_refused(parents: list[int], accepted: list[int], reason: str) -> None:
    with pytest.raises(SpecExtError, match=reason):
        draw_tree(["a"], parents, accepted, "t")


def test_visible_text() -> None:
    assert visible(" a\n") == "␣a⏎"
    assert visible("") == "∅"
    assert len(visible("x" * 100)) == 18
