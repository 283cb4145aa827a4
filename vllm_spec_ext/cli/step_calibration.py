# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-spec explain-step`` says of the method's promises: expected and found, by source."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_spec_ext.cli.whole_table import WholeTable

if TYPE_CHECKING:
    from vllm_spec_ext.cli.explain_step import DraftStep


@dataclass
class Calibration:
    """What the proposer expected of tokens, and what was found."""

    nodes: int = 0
    expected: float = 0.0
    found: int = 0

    def add(self, expected: float, found: bool) -> None:
        """Count a token."""
        self.nodes += 1
        self.expected += expected
        self.found += found


def calibration(steps: "Sequence[DraftStep]") -> dict[str, Calibration]:
    """Of each source, over these steps; a token counts for all its sources.

    Without sources, of the whole method under its empty name; steps without probabilities are left
    out.
    """
    by_source: dict[str, Calibration] = {}
    for step in steps:
        for node, expected in enumerate(step.path_probs):
            for name in step.sources[node] if step.sources else [""]:
                by_source.setdefault(name, Calibration()).add(expected, node in step.accepted)
    return dict(sorted(by_source.items(), key=lambda pair: -pair[1].expected))


@dataclass
class StrengthCalibration(Calibration):
    """The same of a source's evidence of one strength."""

    source: str = ""
    strength: str = ""
    drafts: int = 0
    """In which there was such evidence."""


def calibration_by_strength(steps: "Sequence[DraftStep]") -> list[StrengthCalibration]:
    """Of each source's evidence by its strength: sources as above, the most promising first.

    Empty if drafts do not say how strong it is.
    """
    by_pair: dict[tuple[str, str], StrengthCalibration] = {}
    for step in steps:
        in_draft = set()
        named = zip(step.path_probs, step.sources, step.strengths, strict=False)
        for node, (expected, names, strengths) in enumerate(named):
            for source, strength in zip(names, strengths, strict=True):
                fresh = StrengthCalibration(source=source, strength=strength)
                one = by_pair.setdefault((source, strength), fresh)
                one.add(expected, node in step.accepted)
                in_draft.add((source, strength))
        for pair in in_draft:
            by_pair[pair].drafts += 1
    order = list(calibration(steps))
    return sorted(
        by_pair.values(), key=lambda one: (order.index(one.source), -one.expected / one.nodes)
    )


def calibration_table(
    method: str, answer: dict[str, Calibration], step: dict[str, Calibration]
) -> WholeTable:
    """Accepted tokens that were expected of each source, and found; in the answer and the step."""
    headings = ["named by", "tokens", "expected", "found", "expected here", "found here"]
    rows = [
        [
            name or method,
            f"{one.nodes}",
            f"{one.expected:.1f}",
            f"{one.found}",
            *([f"{step[name].expected:.2f}", f"{step[name].found}"] if name in step else "--"),
        ]
        for name, one in answer.items()
    ]
    return WholeTable(headings, rows, "accepted tokens, of the whole answer and of this step")


def strength_table(answer: Sequence[StrengthCalibration]) -> WholeTable:
    """What tokens of each source and strength were expected to be accepted of, and were."""
    headings = ["named by", "strength of its evidence", "drafts", "tokens", "expected", "found"]
    rows = [
        [
            *(one.source, one.strength, f"{one.drafts}", f"{one.nodes}"),
            *(f"{one.expected / one.nodes:.0%}", f"{one.found / one.nodes:.0%}"),
        ]
        for one in answer
    ]
    title = "share of these tokens that was accepted, of the whole answer"
    return WholeTable(headings, rows, title, left=2)
