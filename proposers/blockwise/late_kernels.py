# SPDX-License-Identifier: Apache-2.0
"""What heads are shown, found on the device: what followed where a text's end occurred before.

The same as ``text_index/copied_tokens.py`` finds on the host, in two launches: ``find_ends``
compares the end of each text with a block of its places, ``show_tokens`` puts the blocks together
and writes what the heads see. No index is kept: a text is read once, and places that do not end
like it are dropped after their first token.

Imports Triton, so it is imported when an engine asks for it.
"""

import triton
import triton.language as tl

# A place in one number: tokens that agree, then where the text goes on. The largest is the longest
# match, and of these the latest. 0 = none.
LENGTH_SHIFT = tl.constexpr(32)
CONTINUATION = tl.constexpr(2**32 - 1)


@triton.jit(do_not_specialize=["num_blocks"])
def find_ends(  # type: ignore[no-untyped-def]
    texts_ptr,  # [max_num_seqs, max_model_len] int32
    text_stride,
    places_ptr,  # [num_requests] int64
    lengths_ptr,  # [max_num_seqs] int32
    found_ptr,  # [num_requests, num_blocks] int64, written
    num_blocks,
    LONGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best place of one block of one text."""
    request, block = tl.program_id(0), tl.program_id(1)
    place = tl.load(places_ptr + request)
    size = tl.load(lengths_ptr + place)
    text = texts_ptr + place * text_stride
    at = block * BLOCK + tl.arange(0, BLOCK)
    agrees = at < size - 1  # the end itself is none
    agreeing = tl.zeros([BLOCK], tl.int32)
    num_left = tl.sum(agrees.to(tl.int32), axis=0)
    depth = 0
    while (depth < LONGEST) & (num_left > 0):
        wanted = tl.load(text + size - 1 - depth, mask=depth < size, other=-1)
        agrees = agrees & (at >= depth)
        agrees = agrees & (tl.load(text + at - depth, mask=agrees, other=-1) == wanted)
        agreeing += agrees.to(tl.int32)
        num_left = tl.sum(agrees.to(tl.int32), axis=0)
        depth += 1
    found = (agreeing.to(tl.int64) << LENGTH_SHIFT) + at + 1
    best = tl.max(tl.where(agreeing > 0, found, 0), axis=0)
    tl.store(found_ptr + request * num_blocks + block, best)


@triton.jit(do_not_specialize=["num_blocks", "vocab_size"])
def show_tokens(  # type: ignore[no-untyped-def]
    texts_ptr,  # [max_num_seqs, max_model_len] int32
    text_stride,
    places_ptr,  # [num_requests] int64
    lengths_ptr,  # [max_num_seqs] int32
    found_ptr,  # [num_requests, num_blocks] int64
    shown_ptr,  # [num_requests, 2 + NUM_HEADS] int64, written
    num_blocks,
    vocab_size,
    NUM_HEADS: tl.constexpr,
    PADDED: tl.constexpr,  # NUM_HEADS as a power of two
    CHUNK: tl.constexpr,  # blocks that are put together at once
):
    """A text's last token, the length of the match, and its continuation."""
    request = tl.program_id(0)
    place = tl.load(places_ptr + request)
    size = tl.load(lengths_ptr + place)
    text = texts_ptr + place * text_stride
    best = tl.zeros([CHUNK], tl.int64)
    for begin in range(0, num_blocks, CHUNK):
        block = begin + tl.arange(0, CHUNK)
        found = tl.load(found_ptr + request * num_blocks + block, mask=block < num_blocks, other=0)
        best = tl.maximum(best, found)
    match = tl.max(best, axis=0)
    length = match >> LENGTH_SHIFT
    behind = match & CONTINUATION
    head = tl.arange(0, PADDED)
    # A place close to the end goes on with its own continuation, again and again.
    period = tl.maximum(size - behind, 1)
    is_found = (head < NUM_HEADS) & (length > 0)
    token = tl.load(text + behind + head % period, mask=is_found, other=0)
    # What stands for a picture in a prompt is no token that heads can be shown.
    unsayable = (token < 0) | (token >= vocab_size)
    is_shown = tl.sum(unsayable.to(tl.int32), axis=0) == 0
    row = shown_ptr + request * (2 + NUM_HEADS)
    last = tl.load(text + size - 1)
    tl.store(row, tl.minimum(tl.maximum(last, 0), vocab_size - 1).to(tl.int64))
    tl.store(row + 1, tl.where(is_shown, length, 0))
    tl.store(row + 2 + head, tl.where(is_shown, token, 0).to(tl.int64), mask=head < NUM_HEADS)
