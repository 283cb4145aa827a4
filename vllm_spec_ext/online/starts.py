# SPDX-License-Identifier: Apache-2.0
"""What is known of a recorded text where drafts of several tokens started."""

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.online.trace import Trace
from vllm_spec_ext.proposers.text_index.copied_tokens import copied_tokens
from vllm_spec_ext.proposers.text_index.occurrence_index import OccurrenceIndex


def recorded_rows(
    trace: Trace, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where rows of the text are among the recorded ones, and whether they are at all.

    Args:
        trace: Of a request.
        rows: Of any shape; past the end of the text, or in a gap, they are not recorded.
    """
    places = np.searchsorted(trace.rows, rows).clip(max=max(0, len(trace.rows) - 1))
    return places, trace.rows[places] == rows


def copies_at(
    token_ids: NDArray[np.int32], starts: NDArray[np.integer], longest: int, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What a drafter was shown at each start, as in serving.

    Args:
        token_ids: The text.
        starts: [n] ascending.
        longest: Most tokens that are compared.
        count: Tokens that are shown.

    Returns:
        [n, count] tokens of :func:`copied_tokens`, and [n] tokens that agree there; 0 = none.
    """
    index, read = OccurrenceIndex(len(token_ids)), 0
    tokens, lengths = np.zeros((len(starts), count), np.int64), np.zeros(len(starts), np.int64)
    with np.errstate(over="ignore"):  # a hash is meant to overflow
        for i, start in enumerate(starts.tolist()):
            index.append(token_ids[read : start + 2])
            read = start + 2
            tokens[i], lengths[i] = copied_tokens(index, longest, count)
    return tokens, lengths
