# SPDX-License-Identifier: Apache-2.0
"""What the kernels of late drafts have in common: how they read a request's row and give its draft.

A method's row is [num_columns] int64, made on the host (:mod:`.late_drafting`). Imports Triton.
"""

import triton
import triton.language as tl


@triton.jit
def column(row, number):  # type: ignore[no-untyped-def]
    """A number of 32 bits from a request's row."""
    return tl.load(row + number).to(tl.int32)


@triton.jit
def write_draft(  # type: ignore[no-untyped-def]
    drafts_ptr,  # [num_requests, NUM_DRAFTED] int64, written
    request,
    tokens,  # [PADDED]
    num_tokens,
    last,
    NUM_DRAFTED: tl.constexpr,
    PADDED: tl.constexpr,  # NUM_DRAFTED as a power of two
):
    """A request's draft, filled up with the last token of its text."""
    place = tl.arange(0, PADDED)
    tl.store(
        drafts_ptr + request * NUM_DRAFTED + place,
        tl.where(place < num_tokens, tokens, last).to(tl.int64),
        mask=place < NUM_DRAFTED,
    )
