# SPDX-License-Identifier: Apache-2.0
"""Compiled loops of :mod:`vllm_spec_ext.proposers.text_index.occurrence_index`.

A module of its own because importing numba is slow, and because vLLM 0.32's CPU worker cannot
start in a process that has imported it already (``triton_utils.dispatcher._rebind_kernels`` reads
``vars()`` of every module attribute, and llvmlite's answer is no dictionary): so it is imported
when the first index is built, which is after the worker has started.
"""

import numpy as np

from vllm_spec_ext.compiled import kernel

NO_POSITION = -1
EMPTY_KEY = np.int64(-1)
_MOST_VISITED = 256  # places that are compared for the latest ones
_MOST_COMPARED = 4096  # places that are compared for the longest match; some 50 us
_MOST_FOR_ALL = 32768  # where the first one behind a hint is looked for, from the end
_HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio


@kernel
def _slot(keys, heads, key):  # type: ignore[no-untyped-def]
    """Slot of a key, or the free slot where it belongs.

    keys: [power of two] int64. heads: one longer, its last the salt of the hash: who writes a
    prompt does not know which keys collide.
    """
    mask = keys.size - 1
    hashed = (np.uint64(key) ^ (np.uint64(heads[keys.size]) << np.uint64(21))) * _HASH_MULTIPLIER
    hashed = (hashed ^ (hashed >> np.uint64(32))) * _HASH_MULTIPLIER
    slot = np.int64(hashed >> np.uint64(32)) & mask
    while keys[slot] != EMPTY_KEY and keys[slot] != key:
        slot = (slot + 1) & mask
    return slot


@kernel
def link(tokens, start, end, previous, keys, heads):  # type: ignore[no-untyped-def]
    """Link positions [start, end): row 0 of the tables by token, row 1 by pair of tokens."""
    for i in range(start, end):
        key = np.int64(tokens[i])
        for order in range(2):
            if order == 1:
                if i == 0:
                    previous[1, 0] = NO_POSITION
                    break
                key |= np.int64(tokens[i - 1] + 1) << 32
            slot = _slot(keys[order], heads[order], key)
            previous[order, i] = NO_POSITION
            if keys[order, slot] == key:
                previous[order, i] = heads[order, slot]
            keys[order, slot] = key
            heads[order, slot] = i


@kernel
def agreeing_tokens(tokens, i, suffix, limit, known):  # type: ignore[no-untyped-def]
    """Tokens up to position i that agree with the end of a suffix, at most `limit`; `known` do."""
    agree, last = known, suffix.size - 1
    while agree < limit and i >= agree and tokens[i - agree] == suffix[last - agree]:
        agree += 1
    return agree


@kernel
def longest(  # type: ignore[no-untyped-def]
    suffix, tokens, end, previous, keys, heads, max_ngram, hint, need_all
):
    """See OccurrenceIndex.longest; `end` excludes positions that are the suffix itself."""
    size = suffix.size
    length, count, latest, following = 0, 0, NO_POSITION, NO_POSITION
    if size == 0:
        return length, count, latest, following
    limit = min(size, max_ngram)
    last = np.int64(suffix[size - 1])
    for order in range(1, -1, -1):
        key = last
        if order == 1:
            if limit < 2:
                continue
            key |= np.int64(suffix[size - 2] + 1) << 32
        slot = _slot(keys[order], heads[order], key)
        if keys[order, slot] != key:
            continue
        i = heads[order, slot]
        compared, most = 0, _MOST_FOR_ALL if need_all else _MOST_COMPARED
        while i != NO_POSITION and compared < most:
            if i < end:
                compared += 1
                agree = agreeing_tokens(tokens, i, suffix, limit, order + 1)
                if agree > length:
                    length, count, latest, following = agree, 0, i + 1, NO_POSITION
                if agree == length:
                    count += 1
                    if i + 1 > hint:
                        following = i + 1
                    # Nothing longer can come, and an earlier place does not change the answer.
                    if length == limit and count >= 2 and (not need_all or i + 1 <= hint):
                        return length, count, latest, following
            i = previous[order, i]
        if length:
            break
    return length, count, latest, following


@kernel
def latest_places(suffix, size, index, own, found):  # type: ignore[no-untyped-def]
    """Positions behind the latest places where the longest suffix occurred; (count, length).

    Args:
        suffix: [>= size] int32, of which the first `size` are the end of the text.
        index: As of OccurrenceIndex.arrays: tokens, number of them, previous, keys, heads.
        own: The suffix is the end of the index itself, which does not count.
        found: [most] int32, written, the latest first.
    """
    tokens, num_tokens, previous, keys, heads = index
    end = num_tokens - 1 if own else num_tokens
    count, length = 0, 0
    if size == 0 or num_tokens == 0:
        return count, length
    last = np.int64(suffix[size - 1])
    for order in range(1, -1, -1):
        key = last
        if order == 1:
            if size < 2:
                continue
            key |= np.int64(suffix[size - 2] + 1) << 32
        slot = _slot(keys[order], heads[order], key)
        if keys[order, slot] != key:
            continue
        i = heads[order, slot]
        visited = 0
        while i != NO_POSITION and visited < _MOST_VISITED:
            if i < end:
                visited += 1
                agree = agreeing_tokens(tokens, i, suffix[:size], size, order + 1)
                if agree > length:
                    count, length = 0, agree
                if agree == length and count < len(found):
                    found[count] = i + 1
                    count += 1
            i = previous[order, i]
        if length:
            break
    return count, length
