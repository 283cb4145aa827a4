# SPDX-License-Identifier: Apache-2.0
"""Compiled loops of candidates: the search for the best tree, and what is learned from its outcome.

A module of its own because importing numba is slow, and because vLLM 0.32's CPU worker cannot
start in a process that has imported it (see text_index/occurrence_kernels.py).
"""

import numpy as np

from vllm_spec_ext.compiled import kernel
from vllm_spec_ext.proposers.candidates.evidence import (
    ANSWERS,
    COPY,
    CORPUS,
    LEAST_SAME,
    LENGTHS,
    NUM_COLUMNS,
    NUM_PROBS,
    NUM_SHARES,
    NUM_SOURCES,
    OTHERS,
    OWN,
    PROBS,
    RECYCLED,
    SAME_ANSWER,
    TOGETHER,
    matched_class,
)
from vllm_spec_ext.proposers.corpus.rows import base_entries, find_base_row
from vllm_spec_ext.proposers.corpus.store import MAX_SUCCESSORS, PROB_TABLE
from vllm_spec_ext.proposers.text_index.occurrence_kernels import agreeing_tokens, latest_places

WAYS = 4  # slots in which an entry of the table of recycled rows may stand
NO_CONTEXT = -1  # in place of the token before the last: an entry of one token of context
_MOST_PLACES = 32  # of a match, the latest ones
_MOST_CANDIDATES = 96 + MAX_SUCCESSORS  # of one node
_MOST_WAITING = 4096
_NOWHERE = -2  # a node that a draft does not have
_BOUNDS = np.array(PROBS)
_LENGTHS = np.array(LENGTHS)
_FIRST_SAME = matched_class(len(LENGTHS), 0)  # of a token of an answer to the same prompt


@kernel
def context_key(group, before, last):  # type: ignore[no-untyped-def]
    """What a context is known by: 64 bits of its group and its two tokens, never 0."""
    mixed = np.uint64(group + 1) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= np.uint64(before + 2) * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed ^= mixed >> np.uint64(29)
    mixed += np.uint64(last + 1) * np.uint64(0x165667B19E3779F9)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(32)
    return np.int64(mixed | np.uint64(1))


@kernel
def find_context(keys, key):  # type: ignore[no-untyped-def]
    """Slot of a context, -1 = not known. keys: [power of two] int64."""
    first = (np.uint64(key) >> np.uint64(8)) & np.uint64(keys.size // WAYS - 1)
    for way in range(WAYS):
        slot = np.int64(first) * WAYS + way
        if keys[slot] == key:
            return slot
    return -1


@kernel
def keep_rows(  # type: ignore[no-untyped-def]
    keys, stamps, kept_tokens, kept_probs, group, contexts, tokens, probs, now
):
    """Keep what the target foresaw under each row's last two tokens, and under its last one.

    A context that is new takes the place of the one of its slots that is oldest.
    """
    for row in range(len(contexts)):
        for order in range(2):
            before = contexts[row, 0] if order == 0 else NO_CONTEXT
            key = context_key(group, before, contexts[row, 1])
            slot = find_context(keys, key)
            if slot < 0:
                first = (np.uint64(key) >> np.uint64(8)) & np.uint64(keys.size // WAYS - 1)
                slot = np.int64(first) * WAYS
                for way in range(1, WAYS):
                    if stamps[np.int64(first) * WAYS + way] < stamps[slot]:
                        slot = np.int64(first) * WAYS + way
                keys[slot] = key
            stamps[slot] = now + row
            kept_tokens[slot] = tokens[row]
            kept_probs[slot] = probs[row]


@kernel
def _matched_class(length, count, total):  # type: ignore[no-untyped-def]
    share = count / total
    if total == 1:
        place = 0
    elif share > 0.9:
        place = 1 if total < 4 else 2
    elif share > 0.6:
        place = 3
    elif share > 0.3:
        place = 4
    elif share > 0.1:
        place = 5
    else:
        place = 6
    return 1 + np.searchsorted(_LENGTHS, length) * NUM_SHARES + place


@kernel
def _add(candidates, classes, count, token, source, evidence):  # type: ignore[no-untyped-def]
    """Note that a source names a token; returns the number of candidates."""
    for i in range(count):
        if candidates[i] == token:
            classes[i, source] = evidence
            return count
    if count == len(candidates):
        return count
    candidates[count] = token
    classes[count, :] = 0
    classes[count, source] = evidence
    return count + 1


@kernel
def _same_answers(text, begin, end, tokens, asked, depth, max_ngram, found):  # type: ignore[no-untyped-def]
    """Where answers to the same prompt are as far as this one, and agree; returns their number.

    Args:
        text, begin, end, asked, depth, max_ngram: As of :func:`_find_places`.
        tokens: Of the index of answers.
        found: [most] int32, written: positions of those that agree in most tokens.
    """
    same, size = asked
    limit = min(end - begin, max_ngram)
    count, longest = 0, min(max_ngram, LEAST_SAME)
    for i in range(len(same)):
        at = same[i, 0] + size + depth
        if at >= same[i, 1]:
            continue  # it ended before
        agree = agreeing_tokens(tokens, at - 1, text[begin:end], limit, 0)
        if agree > longest:
            count, longest = 0, agree
        if agree == longest and count < len(found):
            found[count] = at
            count += 1
    return count


@kernel
def _find_places(  # type: ignore[no-untyped-def]
    text, begin, end, index, which, token, depth, max_ngram, asked, above, here
):
    """Where the text that ends with a node stood before: what followed the parent's places, first.

    Where the parent agreed in n tokens the node agrees in n + 1, and nowhere in more; so it is
    looked up anew only if it stands in none of them.

    Args:
        text: Of which the tokens from `begin` to `end` end with the node.
        index: As of :func:`.latest_places`.
        which: OWN or ANSWERS.
        token: The node's; -1 = it is the root.
        depth: Of the node, 0 = the root.
        max_ngram: Longest suffix that is looked up.
        asked: As of :func:`grow`.
        above: Places, their number and agreeing tokens, of the parent.
        here: The same of the node, written.
    """
    places, num_places, agreeing = here
    if token >= 0:
        for i in range(above[1][which]):
            at = above[0][which, i]
            if _said(text, end - depth, index, which, at, depth - 1) == token:
                places[which, num_places[which]] = at + 1
                num_places[which] += 1
        agreeing[which] = above[2][which] + 1
    if num_places[which] == 0 and which == ANSWERS:
        agreeing[which] = SAME_ANSWER
        num_places[which] = _same_answers(
            text, begin, end, index[0], asked, depth, max_ngram, places[which]
        )
    if num_places[which] == 0:
        start = max(begin, end - max_ngram)
        is_end = which == OWN and token < 0
        num_places[which], agreeing[which] = latest_places(
            text[start:end], end - start, index, is_end, places[which]
        )


@kernel
def _said(text, size, index, which, at, depth):  # type: ignore[no-untyped-def]
    """Token at a position of an index; behind the end of the own text its path goes on.

    So a repetition repeats itself. -1 = there is nothing yet.
    """
    if at < index[1]:
        return index[0][at]
    if which == OWN and at - index[1] < depth:
        return text[size + at - index[1]]
    return np.int32(-1)


@kernel
def _name_matched(  # type: ignore[no-untyped-def]
    text, size, index, which, depth, vocab_size, here, candidates, classes, count
):
    """Name what followed at the places of a node; returns the number of candidates."""
    places, num_places, agreeing = here
    total = 0
    for i in range(num_places[which]):
        said = _said(text, size, index, which, places[which, i], depth)
        if said < 0 or said >= vocab_size:
            continue
        total += 1
        known = 0
        while known < count and candidates[known] != said:
            known += 1
        if known == count:
            count = _add(candidates, classes, count, said, which, 0)
        if known < count:
            classes[known, which] += 1  # a count, until all places were seen
    for i in range(count):
        if classes[i, which] > 0:
            classes[i, which] = _matched_class(agreeing[which], classes[i, which], total)
    return count


@kernel
def given_class(probability, deep):  # type: ignore[no-untyped-def]
    """Class of a token that a source gives a probability.

    Args:
        probability: Behind its parent.
        deep: Recycled, corpus: under one token instead of two. Others: not the first of its draft.
    """
    return 1 + deep * NUM_PROBS + np.searchsorted(_BOUNDS, probability, side="right")


@kernel
def _with_classes(given):  # type: ignore[no-untyped-def]
    """The same drafts with the class of each node instead of the probability of its path."""
    tokens, parents, paths, second = given
    classes = np.empty(len(parents), np.int16)
    for node in range(len(parents)):
        first = 0 if node < second else second
        above = paths[first + parents[node]] if parents[node] >= 0 else 1.0
        conditional = paths[node] / above if above > 0.0 else 0.0
        classes[node] = given_class(conditional, 1 if parents[node] >= 0 else 0)
    return tokens, parents, classes, second


@kernel
def _name_recycled(  # type: ignore[no-untyped-def]
    text, begin, end, table, group, candidates, classes, count
):
    """Name what the target foresaw behind these tokens; returns the number of candidates."""
    keys, kept_tokens, kept_probs = table
    slot, order = -1, 0
    if end - begin >= 2:
        slot = find_context(keys, context_key(group, text[end - 2], text[end - 1]))
    if slot < 0:
        slot = find_context(keys, context_key(group, NO_CONTEXT, text[end - 1]))
        order = 1
    if slot >= 0:
        for i in range(kept_tokens.shape[1]):
            strength = given_class(kept_probs[slot, i], order)
            count = _add(candidates, classes, count, kept_tokens[slot, i], RECYCLED, strength)
    return count


@kernel
def _name_in_corpus(text, begin, end, corpus, candidates, classes, count):  # type: ignore[no-untyped-def]
    """Name what followed these tokens in a corpus; returns the number of candidates."""
    vocab_size = len(corpus.top) - 2  # of the store, whose rows of one token stand behind it
    last, row, order = text[end - 1], -1, 0
    if not 0 <= last < vocab_size:
        return count
    if end - begin >= 2 and 0 <= text[end - 2] < vocab_size:
        row = find_base_row(corpus, text[end - 2], last)
    if row < 0:
        row, order = find_base_row(corpus, vocab_size, last), 1
    if row >= 0:
        low, high = base_entries(corpus, row)
        for place in range(low, high):
            token = np.int32(corpus.tok[place])
            if token < vocab_size:
                strength = given_class(PROB_TABLE[corpus.prob[place]], order)
                count = _add(candidates, classes, count, token, CORPUS, strength)
    return count


@kernel
def _name_given(given, which, pointer, candidates, classes, count):  # type: ignore[no-untyped-def]
    """Name the children of a node in one of the drafts; returns the number of candidates."""
    tokens, parents, strengths, second = given
    start, stop = (0, second) if which == 0 else (second, len(tokens))
    for i in range(start, stop):
        if parents[i] == pointer:
            count = _add(candidates, classes, count, tokens[i], COPY + which, strengths[i])
    return count


@kernel
def _find_given(given, which, pointer, token):  # type: ignore[no-untyped-def]
    """Place of a child in one of the drafts; _NOWHERE if it has none."""
    tokens, parents, _, second = given
    start, stop = (0, second) if which == 0 else (second, len(tokens))
    for i in range(start, stop):
        if parents[i] == pointer and tokens[i] == token:
            return i - start
    return _NOWHERE


@kernel
def _name_candidates(  # type: ignore[no-untyped-def]
    texts, begins, depth, token, own, answers, asked, above, here, vocab_size, max_ngram, table,
    group, corpus, drafts, pointers, candidates, classes,
):  # fmt: skip
    """Name what sources have behind a node; returns the number of candidates.

    Args:
        texts: [2] as each of the two indices knows it; each ends with the node, `depth` tokens
            behind the first `max_ngram`.
        begins: [2] where they begin.
        token: The node's; -1 = it is the root.
        above, here: As of :func:`_find_places`.
        pointers: [2] the node's place in each of `drafts`.
        candidates, classes: Written. The others are those of :func:`grow`.
    """
    end, count = max_ngram + depth, 0
    for which in range(2):
        text, begin = texts[which], begins[which]
        index = own if which == OWN else answers
        if index[1] > 0:
            _find_places(
                text, begin, end, index, which, token, depth, max_ngram, asked, above, here
            )
            count = _name_matched(
                text, max_ngram, index, which, depth, vocab_size, here, candidates, classes, count
            )
    if group >= 0:
        count = _name_recycled(
            texts[OWN], begins[OWN], end, table, group, candidates, classes, count
        )
    if corpus is not None:
        count = _name_in_corpus(texts[OWN], begins[OWN], end, corpus, candidates, classes, count)
    for which in range(2):
        count = _name_given(drafts, which, pointers[which], candidates, classes, count)
    return count


@kernel
def _probabilities(classes, count, weights, odds):  # type: ignore[no-untyped-def]
    """Write the probability of each candidate; together at most 1, as one token follows."""
    together = 0.0
    classes[:count, TOGETHER] = 1
    for source in range(NUM_SOURCES):
        against = 0
        for i in range(count):
            if classes[i, source] > 0 and against == 0:
                per = NUM_SHARES if source <= ANSWERS else NUM_PROBS
                against = OTHERS + (classes[i, source] - 1) // per
        for i in range(count):  # a source that names other tokens speaks against this one
            if classes[i, source] > 0:
                classes[i, TOGETHER] += 1 << source
            else:
                classes[i, source] = against
    for i in range(count):
        log_odds = 0.0
        for column in range(NUM_COLUMNS):
            log_odds += weights[column, classes[i, column]]
        odds[i] = 1.0 / (1.0 + np.exp(-log_odds))
        together += odds[i]
    if together > 1.0:
        best = np.argmax(odds[:count])
        if _FIRST_SAME <= classes[best, ANSWERS] < OTHERS:
            # What the same prompt was answered is known best, so the others share the rest.
            kept = odds[best]
            odds[:count] *= (1.0 - kept) / (together - kept)
            odds[best] = kept
        else:
            odds[:count] /= together


@kernel
def _begin_texts(end, said, max_ngram, room):  # type: ignore[no-untyped-def]
    """The text as each index knows it, and where it begins; `room` tokens may follow."""
    texts = np.empty((2, max_ngram + room), np.int32)
    begins = np.empty(2, np.int64)
    begins[OWN], begins[ANSWERS] = max_ngram - len(end), max_ngram - len(said)
    texts[OWN, begins[OWN] : max_ngram] = end
    texts[ANSWERS, begins[ANSWERS] : max_ngram] = said
    return texts, begins


@kernel
def _write_path(texts, end, tokens, parents, node):  # type: ignore[no-untyped-def]
    """Write the path to a node behind the texts, so that they end at `end`."""
    while node >= 0:
        end -= 1
        texts[:, end] = tokens[node]
        node = parents[node]


@kernel
def grow(  # type: ignore[no-untyped-def]
    end, said, asked, own, answers, table, group, corpus, given, weights, vocab_size, max_ngram,
    room, ends, least,
):  # fmt: skip
    """The nodes with the largest path probabilities, best first; they are a tree.

    Args:
        end: [1 to max_ngram] int32, the end of the text.
        said: [1 to max_ngram] int32, the end of the request's answer behind its heading.
        asked: [n, 2] where answers to the same prompt begin and end, and tokens of this one so far.
        own: Index of the request's tokens, as of :func:`.latest_places`; empty = it is not asked.
        answers: Index of earlier answers; the same.
        table: Keys, tokens and probabilities of recycled rows.
        group: Whose rows may be seen; below 0 = none.
        corpus: Sections of a store whose vocabulary is no larger; None = there is none.
        given: Tokens, parents and path probabilities of the drafts that sources bring, and where
            the second one begins; parents are places in the same draft.
        weights: [columns, classes] log-odds that each adds; 0 in class 0.
        vocab_size: Larger numbers are no tokens.
        max_ngram: Longest suffix that is looked up.
        room: Most nodes.
        ends: Stop tokens: none has children.
        least: Least path probability.

    Returns:
        Parents, tokens, path probabilities, and [n, columns] classes.
    """
    texts, begins = _begin_texts(end, said, max_ngram, room)
    drafts = _with_classes(given)
    parents, tokens = np.empty(room, np.int32), np.empty(room, np.int32)
    paths, depths = np.empty(room, np.float32), np.empty(room, np.int32)
    evidence = np.zeros((room, NUM_COLUMNS), np.int16)
    # Of each node, the root last: where its text stood before, and its place in the two drafts.
    places = np.empty((room + 1, 2, _MOST_PLACES), np.int32)
    num_places = np.zeros((room + 1, 2), np.int32)
    agreeing = np.zeros((room + 1, 2), np.int32)
    pointers = np.full((room + 1, 2), _NOWHERE, np.int32)
    pointers[room] = -1
    candidates, odds = np.empty(_MOST_CANDIDATES, np.int32), np.empty(_MOST_CANDIDATES, np.float64)
    classes = np.empty((_MOST_CANDIDATES, NUM_COLUMNS), np.int16)
    # Candidates of all nodes that wait for their turn.
    waiting = np.empty(_MOST_WAITING, np.float32)
    waiting_nodes = np.empty((_MOST_WAITING, 2), np.int32)  # parent, token
    waiting_classes = np.empty((_MOST_WAITING, NUM_COLUMNS), np.int16)
    num_waiting, num_nodes, node = 0, 0, -1
    while True:
        depth, token, parent = 0, -1, -1
        if node >= 0:
            depth, token, parent = depths[node], tokens[node], parents[node]
        state, before = node if node >= 0 else room, parent if parent >= 0 else room
        above = places[before], num_places[before], agreeing[before]
        here = places[state], num_places[state], agreeing[state]
        count = 0
        if token < 0 or not np.any(ends == token):
            _write_path(texts, max_ngram + depth, tokens, parents, node)
            count = _name_candidates(
                texts, begins, depth, token, own, answers, asked, above, here, vocab_size,
                max_ngram, table, group, corpus, drafts, pointers[state], candidates, classes,
            )  # fmt: skip
        _probabilities(classes, count, weights, odds)
        odds[:count] *= paths[node] if node >= 0 else 1.0
        for i in range(count):
            if odds[i] >= least and num_waiting < _MOST_WAITING:
                waiting[num_waiting], waiting_classes[num_waiting] = odds[i], classes[i]
                waiting_nodes[num_waiting, 0], waiting_nodes[num_waiting, 1] = node, candidates[i]
                num_waiting += 1
        if num_nodes == room or num_waiting == 0:
            break
        # The best of all that wait is the next node.
        node, best = num_nodes, np.argmax(waiting[:num_waiting])
        parents[node], tokens[node] = waiting_nodes[best]
        paths[node], evidence[node] = waiting[best], waiting_classes[best]
        depths[node] = 1 if parents[node] < 0 else depths[parents[node]] + 1
        num_nodes, num_waiting = num_nodes + 1, num_waiting - 1
        waiting[best], waiting_nodes[best] = waiting[num_waiting], waiting_nodes[num_waiting]
        waiting_classes[best] = waiting_classes[num_waiting]
        for which in range(2):
            pointer = pointers[parents[node] if parents[node] >= 0 else room, which]
            pointers[node, which] = _find_given(drafts, which, pointer, tokens[node])
    return parents[:num_nodes], tokens[:num_nodes], paths[:num_nodes], evidence[:num_nodes]


@kernel
def learn(  # type: ignore[no-untyped-def]
    weights, squares, parents, evidence, num_drafted, accepted, rate, memory
):
    """Move the log-odds towards what the target made of a draft (AdaGrad on the logistic loss).

    A node tells something if its parent was accepted: one of these siblings may be right.

    Args:
        weights, squares: [columns, classes] log-odds, and sums of squared gradients.
        parents: [n] of the draft.
        evidence: [n, columns] classes.
        num_drafted: Nodes that were verified, the first ones.
        accepted: [n] whether each node was.
        rate: Of learning.
        memory: What remains of the sums for one more node.
    """
    for node in range(num_drafted):
        parent = parents[node]
        if parent >= 0 and not accepted[parent]:
            continue
        log_odds = 0.0
        for column in range(NUM_COLUMNS):
            log_odds += weights[column, evidence[node, column]]
        error = 1.0 / (1.0 + np.exp(-log_odds)) - (1.0 if accepted[node] else 0.0)
        for column in range(NUM_COLUMNS):
            place = evidence[node, column]
            if place == 0:
                continue
            total = memory * squares[column, place] + error * error
            squares[column, place] = total
            weights[column, place] -= rate * error / np.sqrt(total)
