# SPDX-License-Identifier: Apache-2.0
"""``input_copy`` on the device: the end of each text is looked up, and a draft is gathered.

Two launches: ``search_texts`` compares the end of the output with every place of a request's
texts, a block of places each; ``gather_drafts`` puts the blocks together, decides as
``late_reference.py`` does, and copies the tokens. No index is kept on the device: a text is read
once, its places that do not end like the output are dropped after their first token.

Imports Triton, so it is imported when an engine asks for it.
"""

import triton
import triton.language as tl

from vllm_spec_ext.proposers.late_kernels import column, write_draft
from vllm_spec_ext.proposers.text_index.answer_memory import NUM_MARKS

# Columns of a request's row; see late_copy.py.
PROMPT = tl.constexpr(0)
KNOWN = tl.constexpr(1)
CURSOR = tl.constexpr(2)
AGREEING = tl.constexpr(3)
LOST_AT = tl.constexpr(4)
NUM_LOST = tl.constexpr(5)
GUESSING = tl.constexpr(6)
MOST = tl.constexpr(7)
SAID = tl.constexpr(8)
SOURCE = tl.constexpr(9)
SOURCE_SIZE = tl.constexpr(10)
ANSWERS = tl.constexpr(11)
ANSWERS_SIZE = tl.constexpr(12)
MARK = tl.constexpr(13)
NUM_COLUMNS = tl.constexpr(14)
HEADING = tl.constexpr(NUM_MARKS + 1)  # of an answer: marks of its prompt, and a separator

# The texts that are searched, and what is found in a block of one.
IN_SOURCE = tl.constexpr(0)
IN_SAID = tl.constexpr(1)
IN_ANSWERS = tl.constexpr(2)
NUM_TEXTS = tl.constexpr(3)
NO_TEXT = tl.constexpr(-1)
LENGTH = tl.constexpr(0)
COUNT = tl.constexpr(1)
LATEST = tl.constexpr(2)
FOLLOWING = tl.constexpr(3)
NUM_FOUND = tl.constexpr(4)

NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def _text(row, number):  # type: ignore[no-untyped-def]
    return tl.load(row + number).to(tl.pointer_type(tl.int32))


@triton.jit
def _folded(tokens, folded, unsayable):  # type: ignore[no-untyped-def]
    """Tokens as they are compared; ids that the model does not have are all one."""
    return tl.load(folded + tl.minimum(tl.maximum(tokens, 0), unsayable))


@triton.jit
def _compared(tokens, folded, unsayable, which):  # type: ignore[no-untyped-def]
    """Tokens as they are compared in a text: in answers, marks of prompts as they are."""
    is_mark = (which == IN_ANSWERS) & (tokens > unsayable)
    return tl.where(is_mark, tokens, _folded(tokens, folded, unsayable))


@triton.jit
def _follow(row, num_said, folded, unsayable, NEW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The state behind the tokens that it does not know: cursor, agreeing, lost at, tokens since.

    A request with more such tokens than a step can give has none that may be used.
    """
    known = column(row, KNOWN)
    cursor = column(row, CURSOR)
    lost_at = column(row, LOST_AT)
    num_lost = column(row, NUM_LOST)
    said = _text(row, SAID)
    source = _text(row, SOURCE)
    size = column(row, SOURCE_SIZE)
    num_new = num_said - known
    at = tl.arange(0, NEW)
    is_new = at < num_new
    new = _folded(tl.load(said + known + at, mask=is_new, other=0), folded, unsayable)
    exists = is_new & (cursor >= 0) & (cursor + at < size)
    copied = _folded(tl.load(source + cursor + at, mask=exists, other=0), folded, unsayable)
    differs = is_new & ((exists == 0) | (new != copied))
    num_followed = tl.minimum(tl.min(tl.where(differs, at, NEW), axis=0), num_new)
    goes_on = (cursor >= 0) & (num_followed == num_new)
    failed_guess = (column(row, GUESSING) != 0) & (num_followed == 0)
    stops = (cursor >= 0) & (goes_on == 0) & (failed_guess == 0)
    num_lost = tl.where(stops, 0, num_lost) + tl.where(goes_on, 0, num_new - num_followed)
    lost_at = tl.where(stops, cursor + num_followed, lost_at)
    agreeing = tl.where(goes_on, column(row, AGREEING) + num_new, 0)
    cursor = tl.where(goes_on, cursor + num_new, -1)
    return cursor, agreeing, lost_at, num_lost


@triton.jit(do_not_specialize=["num_blocks"])
def search_texts(  # type: ignore[no-untyped-def]
    rows_ptr,  # [num_requests, NUM_COLUMNS] int64
    places_ptr,  # [num_requests] int64
    lengths_ptr,  # [max_num_seqs] int32
    folded_ptr,  # [vocab_size + 1] int32
    found_ptr,  # [num_requests, NUM_TEXTS, num_blocks, NUM_FOUND] int32, written
    unsayable,
    num_blocks,
    MAX_NGRAM: tl.constexpr,
    NEW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The longest end of the output in one block of one text, and where it stands there."""
    request, which, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = rows_ptr + request * NUM_COLUMNS
    num_said = tl.load(lengths_ptr + tl.load(places_ptr + request)) - column(row, PROMPT)
    cursor, agreeing_before, lost_at, _ = _follow(row, num_said, folded_ptr, unsayable, NEW)
    said = _text(row, SAID)
    is_lost = cursor < 0
    # A text that cannot matter has no places.
    text, size, limit = said, tl.where(is_lost, num_said - 1, 0), tl.minimum(num_said, MAX_NGRAM)
    if which == IN_SOURCE:
        text = _text(row, SOURCE)
        size = tl.where(is_lost, column(row, SOURCE_SIZE), 0)
    if which == IN_ANSWERS:
        text = _text(row, ANSWERS)
        size = tl.where(agreeing_before < MAX_NGRAM, column(row, ANSWERS_SIZE), 0)
        limit = tl.minimum(num_said + HEADING, MAX_NGRAM)  # a short output begins behind it
    at = block * BLOCK + tl.arange(0, BLOCK)
    agrees = at < size
    agreeing = tl.zeros([BLOCK], tl.int32)
    num_left = tl.sum(agrees.to(tl.int32), axis=0)
    depth = 0
    while (depth < limit) & (num_left > 0):
        before = tl.where(depth == num_said, unsayable, column(row, MARK))
        newest = tl.load(said + num_said - 1 - depth, mask=depth < num_said, other=before)
        wanted = _compared(newest, folded_ptr, unsayable, which)
        agrees = agrees & (at >= depth)
        token = tl.load(text + at - depth, mask=agrees, other=0)
        agrees = agrees & (_compared(token, folded_ptr, unsayable, which) == wanted)
        agreeing += agrees.to(tl.int32)
        num_left = tl.sum(agrees.to(tl.int32), axis=0)
        depth += 1
    length = tl.max(agreeing, axis=0)
    is_best = (agreeing == length) & (length > 0)
    behind = at + 1
    follows = is_best & (behind > tl.maximum(lost_at, 0))
    found = found_ptr + ((request * NUM_TEXTS + which) * num_blocks + block) * NUM_FOUND
    tl.store(found + LENGTH, length)
    tl.store(found + COUNT, tl.sum(is_best.to(tl.int32), axis=0))
    tl.store(found + LATEST, tl.max(tl.where(is_best, behind, -1), axis=0))
    tl.store(found + FOLLOWING, tl.min(tl.where(follows, behind, NOWHERE), axis=0))


@triton.jit
def _best(found, num_blocks, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of all blocks of a text: length, number of places, latest place, first behind the hint."""
    block = tl.arange(0, CHUNK)
    lengths = tl.zeros([CHUNK], tl.int32)
    for start in range(0, num_blocks, CHUNK):
        each = found + (start + block) * NUM_FOUND
        exists = start + block < num_blocks
        lengths = tl.maximum(lengths, tl.load(each + LENGTH, mask=exists, other=0))
    length = tl.max(lengths, axis=0)
    counts = tl.zeros([CHUNK], tl.int32)
    latests = tl.full([CHUNK], -1, tl.int32)
    followings = tl.full([CHUNK], NOWHERE, tl.int32)
    for start in range(0, num_blocks, CHUNK):
        each = found + (start + block) * NUM_FOUND
        exists = start + block < num_blocks
        is_best = exists & (tl.load(each + LENGTH, mask=exists, other=0) == length) & (length > 0)
        counts += tl.load(each + COUNT, mask=is_best, other=0)
        latests = tl.maximum(latests, tl.load(each + LATEST, mask=is_best, other=-1))
        following = tl.load(each + FOLLOWING, mask=is_best, other=NOWHERE)
        followings = tl.minimum(followings, following)
    return length, tl.sum(counts, axis=0), tl.max(latests, axis=0), tl.min(followings, axis=0)


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    row,
    found,
    num_said,
    folded,
    unsayable,
    num_blocks,
    MAX_NGRAM: tl.constexpr,
    MIN_NGRAM: tl.constexpr,
    OWN_NGRAM: tl.constexpr,
    TAKES_LATEST: tl.constexpr,
    TAKES_BEST: tl.constexpr,
    NEAR: tl.constexpr,
    REALIGNS: tl.constexpr,
    NEW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The text to draft from, the place in it, and how many tokens agree before that; NO_TEXT if
    nothing is foreseen."""
    cursor, agreeing, lost_at, num_lost = _follow(row, num_said, folded, unsayable, NEW)
    source_size = column(row, SOURCE_SIZE)
    per_text = num_blocks * NUM_FOUND
    length, count, latest, following = _best(found + IN_SOURCE * per_text, num_blocks, CHUNK)
    own_length, _, own_latest, _ = _best(found + IN_SAID * per_text, num_blocks, CHUNK)

    # Where in the source the output is, if copying stopped.
    was_lost = cursor < 0
    follows = following != NOWHERE
    if TAKES_LATEST:
        position = latest
    elif TAKES_BEST:
        position = tl.where((count == 1) | (follows == 0), latest, following)
    else:
        is_near = follows & (lost_at >= 0) & (following - lost_at <= NEAR)
        position = tl.where(count == 1, latest, tl.where(is_near, following, -1))
    is_found = was_lost & (length >= MIN_NGRAM) & (position >= 0) & (position < source_size)
    takes_own = was_lost & (OWN_NGRAM > 0) & (own_length >= OWN_NGRAM)
    lead = own_length - length
    takes_own = takes_own & ((is_found == 0) | (lead > 0) | ((lead == 0) & (num_lost >= 2)))
    can_realign = (num_lost == 1) & (lost_at >= 0) & (lost_at < source_size - 1)
    realigns = was_lost & (is_found == 0) & REALIGNS & can_realign
    cursor = tl.where(is_found, position, tl.where(realigns, lost_at + 1, cursor))
    agreeing = tl.where(is_found, length, agreeing)
    agreeing = tl.where(takes_own, own_length, agreeing)

    # An earlier answer that agrees in more tokens, and goes on.
    length, _, latest, _ = _best(found + IN_ANSWERS * per_text, num_blocks, CHUNK)
    takes_answer = (agreeing < MAX_NGRAM) & (length >= MIN_NGRAM) & (length > agreeing)
    takes_answer = takes_answer & (latest < column(row, ANSWERS_SIZE))
    behind = tl.load(_text(row, ANSWERS) + latest, mask=takes_answer, other=unsayable)
    takes_answer = takes_answer & (behind < unsayable)

    which = tl.where(takes_own, IN_SAID, tl.where(cursor >= 0, IN_SOURCE, NO_TEXT))
    begin = tl.where(takes_own, own_latest, cursor)
    which = tl.where(takes_answer, IN_ANSWERS, which)
    return which, tl.where(takes_answer, latest, begin), tl.where(takes_answer, length, agreeing)


@triton.jit(do_not_specialize=["num_blocks"])
def gather_drafts(  # type: ignore[no-untyped-def]
    rows_ptr,  # [num_requests, NUM_COLUMNS] int64
    places_ptr,  # [num_requests] int64
    lengths_ptr,  # [max_num_seqs] int32
    folded_ptr,  # [vocab_size + 1] int32
    found_ptr,  # [num_requests, NUM_TEXTS, num_blocks, NUM_FOUND] int32
    drafts_ptr,  # [num_requests, NUM_DRAFTED] int64, written
    copied_ptr,  # [num_requests, 2] int32 tokens, and those that agree before them; written
    unsayable,
    num_blocks,
    MAX_NGRAM: tl.constexpr,
    MIN_NGRAM: tl.constexpr,
    OWN_NGRAM: tl.constexpr,  # least in the output itself; 0 = it is not copied from
    TAKES_LATEST: tl.constexpr,  # match="latest"
    TAKES_BEST: tl.constexpr,  # match="best"; neither: "unique"
    NEAR: tl.constexpr,
    REALIGNS: tl.constexpr,
    NUM_DRAFTED: tl.constexpr,
    PADDED: tl.constexpr,  # NUM_DRAFTED as a power of two
    NEW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A request's draft: from its source, its output, or an earlier answer."""
    request = tl.program_id(0)
    row = rows_ptr + request * NUM_COLUMNS
    num_said = tl.load(lengths_ptr + tl.load(places_ptr + request)) - column(row, PROMPT)
    which, begin, agreeing = _choose(
        row,
        found_ptr + request * NUM_TEXTS * num_blocks * NUM_FOUND,
        num_said,
        folded_ptr,
        unsayable,
        num_blocks,
        MAX_NGRAM,
        MIN_NGRAM,
        OWN_NGRAM,
        TAKES_LATEST,
        TAKES_BEST,
        NEAR,
        REALIGNS,
        NEW,
        CHUNK,
    )
    said = _text(row, SAID)
    place = tl.arange(0, PADDED)
    in_source = (which == IN_SOURCE) & (begin + place < column(row, SOURCE_SIZE))
    tokens = tl.load(_text(row, SOURCE) + begin + place, mask=in_source, other=unsayable)
    in_answers = (which == IN_ANSWERS) & (begin + place < column(row, ANSWERS_SIZE))
    earlier = tl.load(_text(row, ANSWERS) + begin + place, mask=in_answers, other=unsayable)
    tokens = tl.where(which == IN_ANSWERS, earlier, tokens)
    # A repetition shorter than the draft repeats itself, as a loop would.
    repeated = begin + place % tl.maximum(num_said - begin, 1)
    in_said = (which == IN_SAID) & (place >= 0)
    own = tl.load(said + repeated, mask=in_said, other=unsayable)
    tokens = tl.where(which == IN_SAID, own, tokens)
    # Up to the first token that the model cannot say, which separators are, too.
    end = tl.min(tl.where(tokens >= unsayable, place, PADDED), axis=0)
    num_new = num_said - column(row, KNOWN)
    most = tl.where((num_new >= 0) & (num_new <= NEW), column(row, MOST), 0)
    last = tl.load(said + num_said - 1)
    num_tokens = tl.minimum(end, most)
    write_draft(drafts_ptr, request, tokens, num_tokens, last, NUM_DRAFTED, PADDED)
    tl.store(copied_ptr + 2 * request, num_tokens)
    tl.store(copied_ptr + 2 * request + 1, agreeing)
