# SPDX-License-Identifier: Apache-2.0
"""The draft tree as a PNG, by matplotlib, for places that show no SVG."""

from collections.abc import Sequence
from pathlib import Path

from vllm_spec_ext.draw_tree import check_tree, tree_rows, visible
from vllm_spec_ext.errors import SpecExtError

ACCEPTED, BONUS, OTHER = "#aceebb", "#fae17d", "#f6f8fa"


def write_png(
    path: Path,
    tokens_text: Sequence[str],
    parents: Sequence[int],
    accepted: Sequence[int],
    title: str,
    *,
    root: str = "",
    bonus: str | None = None,
) -> None:
    """Draw a tree into a file; arguments as :func:`vllm_spec_ext.draw_tree.draw_tree`.

    Raises:
        SpecExtError: matplotlib is not installed, or no tree.
    """
    check_tree(len(tokens_text), parents, accepted)
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise SpecExtError(
            "--png needs matplotlib; install it with `pip install 'vllm-spec-ext[report]'`, or "
            "use --svg, which needs nothing"
        ) from error
    texts = [visible(root or " "), *map(visible, tokens_text)]
    ups = [-1, *(parent + 1 for parent in parents)]
    colours = [ACCEPTED] + [OTHER] * len(tokens_text)
    for node in accepted:
        colours[node + 1] = ACCEPTED
    if bonus is not None:
        texts.append(visible(bonus))
        ups.append(accepted[-1] + 1 if accepted else 0)
        colours.append(BONUS)
    depths = [0] * len(texts)
    for node in range(1, len(texts)):
        depths[node] = depths[ups[node]] + 1
    rows = tree_rows(ups)
    figure, axes = pyplot.subplots(figsize=(2 + 1.3 * max(depths), 1 + 0.3 * (max(rows) + 1)))
    for node, text in enumerate(texts):
        if node:
            up = ups[node]
            axes.plot([depths[up], depths[node]], [rows[up], rows[node]], color="#8c959f", lw=1)
        box = {"boxstyle": "round", "facecolor": colours[node], "edgecolor": "#8c959f"}
        # "$" would start a formula.
        label = text.replace("$", r"\$")
        axes.text(depths[node], rows[node], label, bbox=box, ha="center", va="center", size=8)
    axes.set(title=title.replace("$", r"\$"), xlim=(-0.6, max(depths) + 0.6))
    axes.set_ylim(max(rows) + 0.7, -0.7)
    axes.axis("off")
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
