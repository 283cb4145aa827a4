# SPDX-License-Identifier: Apache-2.0
"""Several results of the same measurement side by side."""

from collections.abc import Sequence

from vllm_spec_ext.bench.report import Row
from vllm_spec_ext.bench.saved import SavedBench


def comparison(results: Sequence[SavedBench]) -> tuple[list[str], list[Row]]:
    """Headings and cells: tokens per step and speed-up of every method in each result.

    The last column is the last result's speed-up over the first's: the same ratio to plain decoding
    is compared, so a machine that was slower that day does not count as a change.
    """
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
