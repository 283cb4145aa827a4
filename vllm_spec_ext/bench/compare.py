# SPDX-License-Identifier: Apache-2.0
"""Several results of the same measurement side by side."""

from collections.abc import Sequence
from typing import Any

from vllm_spec_ext.bench.report import Row
from vllm_spec_ext.bench.saved import SavedBench
from vllm_spec_ext.errors import SpecExtError


def comparison(results: Sequence[SavedBench]) -> tuple[list[str], list[Row]]:
    """Headings and cells: tokens per step and speed-up of every method in each result.

    The last column is the last result's speed-up over the first's: the same ratio to plain decoding
    is compared, so a machine that was slower that day does not count as a change.

    Raises:
        SpecExtError: A method has other settings in one result than in another.
    """
    _require_same_settings(results)
    headings = ["method", "batch"]
    for saved in results:
        headings += [f"{saved.name}: tokens/step", f"{saved.name}: speed-up"]
    found = [{(s.method, s.batch_size): s for s in saved.result.summaries()} for saved in results]
    rows = []
    for key in dict.fromkeys(key for one in found for key in one):
        row = [key[0], str(key[1])]
        speed_ups = []
        for one in found:
            summary = one.get(key)
            speed_up = summary.speed_up.median if summary and summary.speed_up else None
            speed_ups.append(speed_up)
            row.append("-" if summary is None else f"{summary.tokens_per_step:.2f}")
            row.append("-" if speed_up is None else f"{speed_up:.2f}x")
        first, last = speed_ups[0], speed_ups[-1]
        row.append(f"{last / first - 1:+.1%}" if first and last else "-")
        rows.append(row)
    return [*headings, "change"], rows


def _require_same_settings(results: Sequence[SavedBench]) -> None:
    """A row's change must be the code's, not that of a setting behind the same name."""
    first: dict[str, tuple[str, dict[str, Any]]] = {}  # method -> result it was seen in, settings
    for saved in results:
        for method in saved.result.methods:
            settings = method.config or {}
            where, expected = first.setdefault(method.name, (saved.name, settings))
            unlike = [
                f"{key}: {expected.get(key)!r} and {settings.get(key)!r}"
                for key in dict.fromkeys([*expected, *settings])
                if expected.get(key) != settings.get(key)
            ]
            if unlike:
                raise SpecExtError(
                    f"method {method.name!r} of {where} and {saved.name} cannot be compared; its "
                    f"settings differ in {'; '.join(unlike)}. Measure it alike, give one of the "
                    "two another name (LABEL=JSON), or make a report of each (--separate)"
                )
