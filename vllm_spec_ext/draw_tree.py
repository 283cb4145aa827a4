# SPDX-License-Identifier: Apache-2.0
"""Draws a draft tree as an SVG: depth from left to right, the accepted path in colour.

Pure text in, text out. The picture follows the reader's light or dark theme.
"""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.draft_tree import is_path, node_depths, tree_problem

CHARACTER = 7.3  # width of a character of the 12 px monospaced font, in px
ROW, BOX, GAP, MARGIN = 26, 20, 34, 12  # px: line, box height, between columns, around
TITLE = 26
MAX_CHARACTERS = 18
NUM_COLOURS = 4  # of sources

_STYLE = """
  text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #1f2328; }
  .title { font: 600 13px system-ui, sans-serif; }
  .note { font-size: 10px; fill: #656d76; }
  rect { fill: #f6f8fa; stroke: #8c959f; }
  path { fill: none; stroke: #afb8c1; stroke-width: 1.2; }
  .accepted rect { fill: #aceebb; stroke: #1a7f37; } path.accepted { stroke: #1a7f37; }
  path.accepted { stroke-width: 2.4; }
  .bonus rect { fill: #fae17d; stroke: #9a6700; } path.bonus { stroke: #9a6700; }
  path.bonus { stroke-width: 2.4; stroke-dasharray: 4 3; }
  line { stroke-width: 3; }
  .source0 { stroke: #0969da; } .source1 { stroke: #bc4c00; }
  .source2 { stroke: #8250df; } .source3 { stroke: #bf3989; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .note { fill: #9198a1; }
    rect { fill: #21262d; stroke: #6e7681; } path { stroke: #484f58; }
    .accepted rect { fill: #0f5323; stroke: #3fb950; } path.accepted { stroke: #3fb950; }
    .bonus rect { fill: #5c4400; stroke: #d29922; } path.bonus { stroke: #d29922; }
  }
"""


def visible(text: str) -> str:
    """A token's text with its spaces and line ends shown, cut to a bearable length."""
    shown = text.replace("\n", "\u23ce").replace("\t", "\u21e5").replace(" ", "\u2423")
    shown = "".join(c if c.isprintable() else "\ufffd" for c in shown) or "\u2205"
    return shown if len(shown) <= MAX_CHARACTERS else shown[: MAX_CHARACTERS - 1] + "\u2026"


def check_tree(num_nodes: int, parents: Sequence[int], accepted: Sequence[int]) -> None:
    """Refuse what is no tree, or an accepted path that does not exist.

    Raises:
        SpecExtError: Parents that do not precede their children, or accepted nodes that are not
            a path from the root.
    """
    problem = tree_problem(parents, num_nodes)
    if problem is not None:
        raise SpecExtError(problem)
    if not is_path(accepted, parents):
        raise SpecExtError(f"accepted nodes {list(accepted)} are no path from the root")


def draw_tree(
    tokens_text: Sequence[str],
    parents: Sequence[int],
    accepted: Sequence[int],
    title: str,
    *,
    root: str = "",
    bonus: str | None = None,
    probs: Sequence[float] = (),
    sources: Sequence[Sequence[str]] = (),
) -> str:
    """An SVG document.

    Args:
        tokens_text: [n] text of each draft node.
        parents: [n] parent of each node, -1 = the root; parents come before children.
        accepted: Nodes on the accepted path, in order.
        title: Headline.
        root: Text of the last verified token.
        bonus: Text of the token that the target added behind the accepted path.
        probs: [n] path probabilities, shown above the boxes; empty = unknown.
        sources: [n] names of those that drafted each node: a stripe in the box for each, with a
            line that explains the colours; empty = one source.

    Raises:
        SpecExtError: As :func:`check_tree`.
    """
    check_tree(len(tokens_text), parents, accepted)
    texts = [visible(root or " "), *map(visible, tokens_text)]
    ups = [-1, *(parent + 1 for parent in parents)]
    classes = ["accepted"] + [""] * len(tokens_text)
    for node in accepted:
        classes[node + 1] = "accepted"
    notes = ["", *(f"{prob:.2f}" for prob in probs)] if len(probs) else [""] * len(texts)
    if bonus is not None:
        texts.append(visible(bonus))
        ups.append(accepted[-1] + 1 if accepted else 0)
        classes.append("bonus")
        notes.append("")
    depths = node_depths(ups)
    rows = tree_rows(ups)
    widths = [CHARACTER * len(text) + 12 for text in texts]
    lefts = [float(MARGIN)]
    for depth in range(max(depths) + 1):
        widest = max(widths[node] for node in range(len(texts)) if depths[node] == depth)
        lefts.append(lefts[-1] + widest + GAP)
    width = max(lefts[-1] - GAP, 7.4 * len(title)) + MARGIN
    names = sorted({name for own in sources for name in own})
    width = max([width, *(2 * MARGIN + x for x in _legend_ends(names))])
    height = TITLE + MARGIN + ROW * (max(rows) + 1 + bool(names)) + MARGIN
    edges, boxes = [], _legend(names, height - MARGIN - BOX / 2)
    for node, text in enumerate(texts):
        x, y = lefts[depths[node]], TITLE + MARGIN + ROW * rows[node] + ROW / 2
        kind = f' class="{classes[node]}"' if classes[node] else ""
        if node:
            up = ups[node]
            x0 = lefts[depths[up]] + widths[up]
            y0 = TITLE + MARGIN + ROW * rows[up] + ROW / 2
            bend = (x + lefts[depths[up] + 1] - GAP) / 2
            edge = f"M{x0:.0f} {y0:.0f}H{x - GAP:.0f}C{bend:.0f} {y0:.0f} {bend:.0f} {y:.0f}"
            edges.append(f'<path{kind} d="{edge} {x:.0f} {y:.0f}"/>')
        note = f'<text class="note" x="{x - 24:.0f}" y="{y - 3:.0f}">{notes[node]}</text>'
        boxes.append(
            f'<g{kind}><rect x="{x:.0f}" y="{y - BOX / 2:.0f}" width="{widths[node]:.0f}" '
            f'height="{BOX}" rx="4"/><text x="{x + 6:.0f}" y="{y + 4:.0f}">{escape(text)}</text>'
            f"{note if notes[node] else ''}</g>"
        )
        if sources and 0 < node <= len(sources):
            boxes += _stripes([names.index(name) for name in sources[node - 1]], x, y)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" height="{height:.0f}" role="img">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style>",
            f'<text class="title" x="{MARGIN}" y="{TITLE - 6}">{escape(title)}</text>',
            *edges,
            *boxes,
            "</svg>\n",
        ]
    )


def _legend_ends(names: Sequence[str]) -> list[float]:
    """Right end of each name in the line that explains the colours, from its start."""
    ends: list[float] = []
    for name in names:
        ends.append((ends[-1] if ends else 0.0) + CHARACTER * len(name) + 30)
    return ends


def _legend(names: Sequence[str], y: float) -> list[str]:
    """The line that explains the colours."""
    starts = [MARGIN + x for x in (0.0, *_legend_ends(names))]
    shown = []
    for source, (x, name) in enumerate(zip(starts, names, strict=False)):
        shown += _stripes([source], x, y)
        shown.append(f'<text x="{x + 10:.0f}" y="{y + 4:.0f}">{escape(name)}</text>')
    return shown


def _stripes(sources: Sequence[int], x: float, y: float) -> list[str]:
    """Stripes at the left edge of a box, one for each source."""
    return [
        f'<line class="source{source % NUM_COLOURS}" x1="{x + 2 + 3 * place:.0f}" '
        f'x2="{x + 2 + 3 * place:.0f}" y1="{y - BOX / 2:.0f}" y2="{y + BOX / 2:.0f}"/>'
        for place, source in enumerate(sources)
    ]


def tree_rows(parents: Sequence[int]) -> list[int]:
    """Line of each node: the first child stands beside its parent, the others below it."""
    children: list[list[int]] = [[] for _ in parents]
    for node in range(1, len(parents)):
        children[parents[node]].append(node)
    rows = [0] * len(parents)
    free = 0
    stack = [(0, True)]
    while stack:
        node, beside = stack.pop()
        if node and beside:
            rows[node] = rows[parents[node]]
        elif node:
            free += 1
            rows[node] = free
        stack += [(child, place == 0) for place, child in enumerate(children[node])][::-1]
    return rows
