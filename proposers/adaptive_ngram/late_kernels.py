# SPDX-License-Identifier: Apache-2.0
"""The greedy path of ``adaptive_ngram`` on the device, from copies of its tables.

One launch, a program for each request: it takes the two last tokens of the text and follows the
likeliest successors, as ``lookup.py`` and ``search.search_chain`` do. Successors of a context stand
side by side, the corpus's first, then those of the request's overlay and of the shared one. Numbers
are as wide as on the host, so that equals stay equal and the first of them is taken. A draft may
begin with what was copied (``BEHIND``), as ``late_copies.py`` says.

Imports Triton, so it is imported when an engine asks for it.
"""

import triton
import triton.language as tl

from vllm_spec_ext.proposers.late_kernels import column, write_draft

# Columns of a request's row; see late_ngram.py.
MOST = tl.constexpr(0)
OWN_BEGIN = tl.constexpr(1)
OWN_GENERATION = tl.constexpr(2)
OWN_CLOCK = tl.constexpr(3)
SHARED_BEGIN = tl.constexpr(4)
SHARED_GENERATION = tl.constexpr(5)
SHARED_CLOCK = tl.constexpr(6)
NUM_COLUMNS = tl.constexpr(7)

# Numbers of the engine; see late_ngram.py.
BACKOFF_WEIGHT = tl.constexpr(0)
OWN_WEIGHT = tl.constexpr(1)
SHARED_WEIGHT = tl.constexpr(2)
HALF_LIFE = tl.constexpr(3)
UNSEEN_WEIGHT = tl.constexpr(4)
MIN_CONFIDENCE = tl.constexpr(5)
GIVES_WAY = tl.constexpr(6)

# A row of the tables: words of 8 bytes, and where its tokens and weights are in words of 4.
ROW_WORDS = tl.constexpr(10)
TOKENS = tl.constexpr(4)
WEIGHTS = tl.constexpr(12)
SUCCESSORS = tl.constexpr(8)
WAYS = tl.constexpr(4)

# How a context that leaves something open goes on, as lookup.BACKOFF.
NEVER = tl.constexpr(0)
IF_UNKNOWN = tl.constexpr(1)

MOST_OF_CORPUS = tl.constexpr(16)
PROBES = tl.constexpr(64)  # places of the corpus that are compared at once
HASH = tl.constexpr(0x9E3779B97F4A7C15)
NOWHERE = tl.constexpr(2**31 - 1)
NO_PLACE = tl.constexpr(2**15)


@triton.jit
def _corpus_row(corpus, num_rows, w1, w2, exists):  # type: ignore[no-untyped-def]
    """Row of a context in the corpus, or NOWHERE."""
    top, w2_of_row, _, _, _, _ = corpus
    low = tl.load(top + w1, mask=exists, other=0).to(tl.int64)
    high = tl.minimum(tl.load(top + w1 + 1, mask=exists, other=0).to(tl.int64), num_rows)
    at = tl.arange(0, PROBES)
    while high - low > PROBES:
        step = (high - low + PROBES - 1) // PROBES
        probe = low + at * step
        tokens = tl.load(w2_of_row + probe, mask=probe < high, other=NOWHERE).to(tl.int64)
        smaller = (probe < high) & (tokens < w2)
        count = tl.sum(smaller.to(tl.int64), axis=0)
        high = tl.minimum(high, low + count * step + 1)
        low = tl.where(count > 0, low + (count - 1) * step + 1, low)
    tokens = tl.load(w2_of_row + low + at, mask=low + at < high, other=0).to(tl.int64)
    equals = (low + at < high) & (tokens == w2)
    return tl.min(tl.where(equals, low + at, NOWHERE), axis=0)


@triton.jit
def _overlay_row(longs, begin, generation, w1, w2, exists, NUM_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row of a context in an overlay, or -1; see ``overlay.find_row``."""
    key = (generation << 42) | (w1 << 21) | w2
    bits = key.to(tl.uint64)
    mixed = (bits ^ (bits >> 31)) * HASH
    bucket = ((mixed >> 33) & (NUM_ROWS // WAYS - 1)).to(tl.int64)
    rows = begin + bucket * WAYS + tl.arange(0, WAYS)
    found = tl.load(longs + rows * ROW_WORDS, mask=exists & (rows >= begin), other=0)
    return tl.max(tl.where(exists & (found == key), rows, -1), axis=0)


@triton.jit
def _overlay_weights(  # type: ignore[no-untyped-def]
    tables,
    begin,
    generation,
    clock,
    half_life,
    weight,
    w1,
    w2,
    exists,
    place,  # [WIDTH] successor of the overlay that stands there
    NUM_ROWS: tl.constexpr,
):
    """Successors that an overlay saw: tokens [WIDTH], weights [WIDTH] float64, 0 = none."""
    longs, ints, floats = tables
    row = _overlay_row(longs, begin, generation, w1, w2, exists & (begin >= 0), NUM_ROWS)
    stored = (row >= 0) & (place >= 0) & (place < SUCCESSORS)
    words = row * (2 * ROW_WORDS) + place
    weights = tl.load(floats + words + WEIGHTS, mask=stored, other=0.0)
    tokens = tl.load(ints + words + TOKENS, mask=stored & (weights > 0.0), other=-1)
    age = clock - tl.load(longs + row * ROW_WORDS + 1, mask=row >= 0, other=0)
    fades = (half_life > 0.0) & (age > 0)
    left = tl.exp2(-age.to(tl.float64) / tl.where(fades, half_life, 1.0))
    weight = weight * tl.where(fades, left, 1.0)
    return tokens.to(tl.int64), tl.where(weights > 0.0, weight * weights.to(tl.float64), 0.0)


@triton.jit
def _sum(equals, weights):  # type: ignore[no-untyped-def]
    """For each token the weight of the entry that has it; there is one at most."""
    return tl.sum(tl.where(equals, weights[None, :], 0.0), axis=1)


@triton.jit
def _context(  # type: ignore[no-untyped-def]
    row,
    tables,
    corpus,
    num_corpus_rows,
    num_corpus_entries,
    numbers,
    vocab_size,
    w1,
    w2,
    exists,
    IN_CORPUS: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One context's successors from all tables, see ``lookup.context_row``.

    Returns:
        Tokens [WIDTH], their weights [WIDTH] float64, which of them count [WIDTH], and the sum of
        weight, all of it and the corpus's.
    """
    at = tl.arange(0, WIDTH)
    tokens = tl.full([WIDTH], -1, tl.int64)
    base = tl.zeros([WIDTH], tl.float64)
    own = tl.zeros([WIDTH], tl.float64)
    shared = tl.zeros([WIDTH], tl.float64)
    is_seen = tokens >= 0
    half_life = tl.load(numbers + HALF_LIFE)
    if IN_CORPUS:
        _, _, off, tok, codes, probs = corpus
        found = _corpus_row(corpus, num_corpus_rows, w1, w2, exists)
        there = found != NOWHERE
        low = tl.load(off + found, mask=there, other=0).to(tl.int64)
        high = tl.load(off + found + 1, mask=there, other=0).to(tl.int64)
        high = tl.minimum(tl.minimum(high, num_corpus_entries), low + MOST_OF_CORPUS)
        token = tl.load(tok + low + at, mask=low + at < high, other=0).to(tl.int64)
        is_seen = (low + at < high) & (token < vocab_size)
        tokens = tl.where(is_seen, token, tokens)
        code = tl.load(codes + low + at, mask=is_seen, other=0).to(tl.int32)
        base = tl.load(probs + code, mask=is_seen, other=0.0).to(tl.float64)
    if OWN_ROWS:
        token, own = _overlay_weights(
            tables,
            tl.load(row + OWN_BEGIN),
            tl.load(row + OWN_GENERATION),
            tl.load(row + OWN_CLOCK),
            half_life,
            tl.load(numbers + OWN_WEIGHT),
            w1,
            w2,
            exists,
            at - (MOST_OF_CORPUS if IN_CORPUS else 0),
            OWN_ROWS,
        )
        is_seen = is_seen | (token >= 0)
        tokens = tl.where(token >= 0, token, tokens)
    if SHARED_ROWS:
        token, shared = _overlay_weights(
            tables,
            tl.load(row + SHARED_BEGIN),
            tl.load(row + SHARED_GENERATION),
            tl.load(row + SHARED_CLOCK),
            half_life * tl.num_programs(0),
            tl.load(numbers + SHARED_WEIGHT),
            w1,
            w2,
            exists,
            at - (MOST_OF_CORPUS if IN_CORPUS else 0) - (SUCCESSORS if OWN_ROWS else 0),
            SHARED_ROWS,
        )
        is_seen = is_seen | (token >= 0)
        tokens = tl.where(token >= 0, token, tokens)
    known = tl.sum(base, axis=0)
    if (IN_CORPUS and (OWN_ROWS or SHARED_ROWS)) or (OWN_ROWS and SHARED_ROWS):
        # A token of several tables counts where it stands first. The host adds one after the other.
        equals = (tokens[:, None] == tokens[None, :]) & is_seen[None, :]
        before = equals & (at[None, :] < at[:, None])
        is_seen = is_seen & (tl.max(before.to(tl.int32), axis=1) == 0)
        first = (_sum(equals, base) + _sum(equals, own)).to(tl.float32).to(tl.float64)
        weights = (first + _sum(equals, shared)).to(tl.float32).to(tl.float64)
    else:
        weights = (base + own + shared).to(tl.float32).to(tl.float64)
    weights = tl.where(is_seen, weights, 0.0)
    return tokens, weights, is_seen, tl.sum(weights, axis=0), known


@triton.jit
def _first_of(weights, highest, counts):  # type: ignore[no-untyped-def]
    """Place of the first entry that counts and weighs the most."""
    at = tl.arange(0, weights.shape[0])
    return tl.min(tl.where(counts & (weights == highest), at, NO_PLACE), axis=0)


@triton.jit
def _chosen(tokens, weights, counts):  # type: ignore[no-untyped-def]
    """The likeliest of some successors; a weight under 0 if there is none."""
    highest = tl.max(tl.where(counts, weights, -1.0), axis=0)
    place = _first_of(weights, highest, counts)
    is_chosen = tl.arange(0, weights.shape[0]) == place
    return tl.max(tl.where(is_chosen, tokens, -1), axis=0), highest


@triton.jit
def _scale(total, known, unseen_weight):  # type: ignore[no-untyped-def]
    """By what weights are divided, see ``lookup.successors``."""
    seen = tl.minimum(total - known, 1.0)
    return tl.maximum(total + unseen_weight * seen, 1.0)


@triton.jit
def _best(  # type: ignore[no-untyped-def]
    row,
    tables,
    corpus,
    num_corpus_rows,
    num_corpus_entries,
    frequent,
    num_frequent,
    numbers,
    vocab_size,
    w1,
    w2,
    BACKOFF: tl.constexpr,
    IN_CORPUS: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The likeliest successor and its probability, under 0 = none; see ``lookup.successors``."""
    unseen_weight = tl.load(numbers + UNSEEN_WEIGHT)
    exists = (w1 >= 0) & (w1 < vocab_size)
    tokens, weights, counts, total, known = _context(
        row,
        tables,
        corpus,
        num_corpus_rows,
        num_corpus_entries,
        numbers,
        vocab_size,
        w1,
        w2,
        exists,
        IN_CORPUS,
        OWN_ROWS,
        SHARED_ROWS,
        WIDTH,
    )
    scale = _scale(total, known, unseen_weight)
    weights = (weights / scale).to(tl.float32).to(tl.float64)
    if BACKOFF == NEVER:
        token, weight = _chosen(tokens, weights, counts)
    else:
        rest = 1.0 - total / scale
        num_counted = tl.sum(counts.to(tl.int32), axis=0)
        goes_back = rest > 0.02
        if BACKOFF == IF_UNKNOWN:
            goes_back = goes_back & (num_counted == 0)
        others, more, are_seen, total, known = _context(
            row,
            tables,
            corpus,
            num_corpus_rows,
            num_corpus_entries,
            numbers,
            vocab_size,
            vocab_size.to(tl.int64),
            w2,
            goes_back,
            IN_CORPUS,
            OWN_ROWS,
            SHARED_ROWS,
            WIDTH,
        )
        backed = rest * tl.load(numbers + BACKOFF_WEIGHT)
        more = more * (backed / _scale(total, known, unseen_weight))
        equals = (tokens[:, None] == others[None, :]) & counts[:, None] & are_seen[None, :]
        added = (weights + _sum(equals, more)).to(tl.float32).to(tl.float64)
        are_new = are_seen & (tl.max(equals.to(tl.int32), axis=0) == 0)
        token, weight = _chosen(tokens, added, counts)
        other, most = _chosen(others, more.to(tl.float32).to(tl.float64), are_new)
        token = tl.where(most > weight, other, token)
        weight = tl.maximum(weight, most)
        if IN_CORPUS:
            # Nothing is known of the last token: the corpus's most frequent ones.
            frequent_tokens, frequent_probs = frequent
            at = tl.arange(0, MOST_OF_CORPUS)
            usual = tl.load(frequent_tokens + at, mask=at < num_frequent, other=0).to(tl.int64)
            are_usual = (at < num_frequent) & (usual < vocab_size) & goes_back & (weight < 0.0)
            probs = tl.load(frequent_probs + at, mask=are_usual, other=0.0).to(tl.float64)
            probs = probs * (backed * tl.load(numbers + BACKOFF_WEIGHT))
            other, most = _chosen(usual, probs.to(tl.float32).to(tl.float64), are_usual)
            token = tl.where(weight < 0.0, other, token)
            weight = tl.where(weight < 0.0, most, weight)
    return token, weight


@triton.jit
def _copied(copied_ptr, drafts_ptr, last, NUM_DRAFTED: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A request's copy: how many tokens, and how many agree before them; the tokens, the first and
    the two last ones, the text's own before them."""
    at = tl.arange(0, PADDED)
    num_copied = tl.load(copied_ptr)
    tokens = tl.load(drafts_ptr + at, mask=(at < num_copied) & (at < NUM_DRAFTED), other=0)
    first = tl.sum(tl.where(at == 0, tokens, 0), axis=0)
    before = tl.sum(tl.where(at == num_copied - 2, tokens, 0), axis=0)
    before = tl.where(num_copied > 1, before, last)
    end = tl.sum(tl.where(at == num_copied - 1, tokens, 0), axis=0)
    return num_copied, tl.load(copied_ptr + 1), tokens, first, before, end


@triton.jit(do_not_specialize=["num_corpus_rows", "num_corpus_entries", "num_frequent"])
def walk_tables(  # type: ignore[no-untyped-def]
    rows_ptr,  # [num_requests, NUM_COLUMNS] int64
    places_ptr,  # [num_requests] int64
    lengths_ptr,  # [max_num_seqs] int32
    texts_ptr,  # [max_num_seqs, max_model_len] int32
    text_stride,
    longs_ptr,  # [num_rows, ROW_WORDS] int64 the overlays
    ints_ptr,  # the same as int32
    floats_ptr,  # the same as float32
    top_ptr,  # [vocab_size + 2] the corpus, see store.BaseArrays
    w2_ptr,  # [num_corpus_rows]
    off_ptr,  # [num_corpus_rows + 1]
    tok_ptr,  # [num_corpus_entries]
    codes_ptr,  # [num_corpus_entries] uint8
    probs_ptr,  # [256] float32 what the codes stand for
    frequent_tokens_ptr,  # [num_frequent]
    frequent_probs_ptr,  # [num_frequent] float32
    numbers_ptr,  # float64
    copied_ptr,  # if BEHIND: [num_requests, 2] int32 tokens in drafts, and those that agree before
    drafts_ptr,  # [num_requests, NUM_DRAFTED] int64, written
    vocab_size,
    num_corpus_rows,
    num_corpus_entries,
    num_frequent,
    BACKOFF: tl.constexpr,
    IN_CORPUS: tl.constexpr,
    OWN_ROWS: tl.constexpr,  # rows of a request's overlay; 0 = there is none
    SHARED_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,  # entries of a context, a power of two
    BEHIND: tl.constexpr,
    WEAK: tl.constexpr,
    NUM_DRAFTED: tl.constexpr,
    PADDED: tl.constexpr,  # NUM_DRAFTED as a power of two
):
    """A request's draft, see ``search.search_chain``."""
    request = tl.program_id(0)
    row = rows_ptr + request * NUM_COLUMNS
    place = tl.load(places_ptr + request)
    length = tl.load(lengths_ptr + place)
    text = texts_ptr + place * text_stride
    last = tl.load(text + length - 1).to(tl.int64)
    w1 = tl.load(text + length - 2, mask=length > 1, other=-1).to(tl.int64)
    w2 = last
    room = column(row, MOST)
    most = tl.where((last >= 0) & (last < vocab_size), room, 0)
    min_confidence = tl.load(numbers_ptr + MIN_CONFIDENCE)
    at = tl.arange(0, PADDED)
    drafted = tl.zeros([PADDED], tl.int64)
    path = tl.full([], 1.0, tl.float64)
    count = most * 0
    probes = count  # 1: what would be drafted in place of the copy is looked up first
    if BEHIND:
        count, agreeing, drafted, first, before, end = _copied(
            copied_ptr + 2 * request, drafts_ptr + request * NUM_DRAFTED, last, NUM_DRAFTED, PADDED
        )
        most_behind = tl.where((end >= 0) & (end < vocab_size), room, count)
        probes = ((count > 0) & (agreeing <= WEAK) & (most > 0)).to(tl.int32)
        goes_behind = (count > 0) & (probes == 0)
        most = tl.where(goes_behind, most_behind, most)
        w1, w2 = tl.where(goes_behind, before, w1), tl.where(goes_behind, end, w2)
    while (probes != 0) | (count < most):
        token, weight = _best(
            row,
            (longs_ptr, ints_ptr, floats_ptr),
            (top_ptr, w2_ptr, off_ptr, tok_ptr, codes_ptr, probs_ptr),
            num_corpus_rows,
            num_corpus_entries,
            (frequent_tokens_ptr, frequent_probs_ptr),
            num_frequent,
            numbers_ptr,
            vocab_size,
            w1,
            w2,
            BACKOFF,
            IN_CORPUS,
            OWN_ROWS,
            SHARED_ROWS,
            WIDTH,
        )
        is_kept = probes != 0
        if BEHIND:
            is_sure = (weight >= tl.load(numbers_ptr + GIVES_WAY)) & (weight >= min_confidence)
            is_kept = is_kept & ((is_sure & (token != first)) == 0)
            count = tl.where((probes != 0) & (is_kept == 0), 0, count)
            probes = probes * 0
        path = tl.where(is_kept, path, path * weight)
        goes_on = (is_kept == 0) & (weight >= 0.0) & (path >= min_confidence)
        drafted = tl.where(goes_on & (at == count), token, drafted)
        w1, w2 = w2, token
        most = tl.where(goes_on, most, count)
        if BEHIND:  # the copy is kept: on behind its end
            w1, w2 = tl.where(is_kept, before, w1), tl.where(is_kept, end, w2)
            most = tl.where(is_kept, most_behind, most)
        count += goes_on.to(tl.int32)
    write_draft(drafts_ptr, request, drafted, count, last, NUM_DRAFTED, PADDED)
