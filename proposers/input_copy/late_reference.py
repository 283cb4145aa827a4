# SPDX-License-Identifier: Apache-2.0
"""What ``input_copy`` drafts behind tokens that it has not read: in plain Python, for tests.

The rule of :class:`vllm_spec_ext.proposers.input_copy.InputCopy` for drafts of a fixed length,
written once more without an index: so a device can follow it (``late_kernels.py``).
"""

from collections.abc import Sequence
from typing import NamedTuple

from vllm_spec_ext.proposers.input_copy.copy_state import LOST, LateState
from vllm_spec_ext.proposers.input_copy.options import InputCopyOptions


class Texts(NamedTuple):
    """Where tokens may be copied from, as they are."""

    said: Sequence[int]  # the output, newest token last
    source: Sequence[int]
    answers: Sequence[int]  # earlier ones, each behind its heading
    heading: Sequence[int]  # of the output


class _Found(NamedTuple):
    length: int  # tokens that agree; 0 = none
    behind: list[int]  # places of that length, the first one first


def late_draft(
    state: LateState, texts: Texts, folded: Sequence[int], options: InputCopyOptions, most: int
) -> list[int]:
    """Tokens to draft, at most ``most``.

    Args:
        state: As of the output's first ``state.num_known`` tokens.
        texts: All of the output, and the sources.
        folded: By token, its smallest equal; the last entry is of ids that the model cannot say,
            and of separators.
        options: Of the engine.
        most: Tokens.
    """
    unsayable = len(folded) - 1
    said, source = ([folded[min(t, unsayable)] for t in text] for text in texts[:2])
    # A prompt is known by numbers above those of all tokens.
    answers = [folded[t] if t < unsayable else t for t in texts.answers]
    state = followed(state, said[state.num_known :], source)
    drafted: list[int] = []
    num_agreeing = state.num_agreeing
    if state.cursor == LOST:
        drafted, num_agreeing = _found_again(state, texts, said, source, options, most)
    else:
        drafted = list(texts.source[state.cursor : state.cursor + most])
    if num_agreeing < options.max_ngram and options.earlier_answers:
        found = _longest([*texts.heading, *said], answers, len(answers), options.max_ngram)
        if found.length >= options.min_ngram and found.length > num_agreeing:
            earlier = _sayable(texts.answers[found.behind[-1] :][:most], unsayable)
            drafted = earlier or drafted
    return _sayable(drafted, unsayable)


def followed(state: LateState, new: Sequence[int], source: Sequence[int]) -> LateState:
    """The state behind new tokens.

    Args:
        state: Before them.
        new: Folded output tokens.
        source: Folded.
    """
    num_followed = 0
    if state.cursor != LOST:
        left = source[state.cursor :]
        while num_followed < len(new) and left[num_followed : num_followed + 1] == [
            new[num_followed]
        ]:
            num_followed += 1
    num_known = state.num_known + len(new)
    if state.cursor != LOST and num_followed == len(new):
        return LateState(
            num_known,
            state.cursor + len(new),
            state.num_agreeing + len(new),
            state.lost_at,
            state.num_lost,
            state.guessing and not len(new),
        )
    lost_at, num_lost = state.lost_at, state.num_lost
    # A guess that fails at once says nothing of where the source was left.
    if state.cursor != LOST and not (state.guessing and num_followed == 0):
        lost_at, num_lost = state.cursor + num_followed, 0
    return LateState(num_known, LOST, 0, lost_at, num_lost + len(new) - num_followed)


def _found_again(
    state: LateState,
    texts: Texts,
    said: list[int],
    source: list[int],
    options: InputCopyOptions,
    most: int,
) -> tuple[list[int], int]:
    """A draft after copying stopped, and how many tokens agree before it."""
    max_ngram = options.max_ngram
    match = _longest(said, source, len(source), max_ngram)
    position = LOST
    if match.length >= options.min_ngram:
        position = _chosen(match, state.lost_at, options)
    found = 0 <= position < len(source)
    own = _Found(0, [])
    if options.also_output:
        own = _longest(said, said, len(said) - 1, max_ngram)
    if own.length >= max(options.min_ngram, options.output_min_ngram, 1):
        lead = own.length - match.length
        if not found or lead > 0 or (lead == 0 and state.num_lost >= 2):
            start = own.behind[-1]
            period = len(said) - start
            return [texts.said[start + i % period] for i in range(most)], own.length
    if found:
        return list(texts.source[position : position + most]), match.length
    if options.realign and state.num_lost == 1 and 0 <= state.lost_at < len(source) - 1:
        start = state.lost_at + 1
        return list(texts.source[start : start + most]), 0
    return [], 0


def _chosen(match: _Found, lost_at: int, options: InputCopyOptions) -> int:
    latest = match.behind[-1]
    if options.match == "latest" or len(match.behind) == 1:
        return latest
    following = next((place for place in match.behind if place > max(lost_at, 0)), LOST)
    if options.match == "best":
        return latest if following == LOST else following
    is_near = LOST not in (following, lost_at) and following - lost_at <= options.near
    return following if is_near else LOST


def _longest(suffix: list[int], text: list[int], end: int, most: int) -> _Found:
    """Places in ``text[:end]`` behind the longest end of ``suffix`` that occurs there."""
    length, behind = 0, list[int]()
    for place in range(end):
        agreeing = 0
        while (
            agreeing < min(most, len(suffix), place + 1)
            and text[place - agreeing] == suffix[-1 - agreeing]
        ):
            agreeing += 1
        if agreeing > length:
            length, behind = agreeing, []
        if agreeing and agreeing == length:
            behind.append(place + 1)
    return _Found(length, behind)


def _sayable(tokens: Sequence[int], unsayable: int) -> list[int]:
    ends = [i for i, token in enumerate(tokens) if token >= unsayable]
    return list(tokens[: ends[0]] if ends else tokens)
