# SPDX-License-Identifier: Apache-2.0
"""Sources without a model: what texts, recycled rows and a corpus say of the next tokens.

State of an engine. Everything a request says serves requests of its share group alone.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.proposers.base import IntArray, NextTokens, RequestStep
from vllm_spec_ext.proposers.candidates.evidence import NUM_CLASSES, NUM_COLUMNS
from vllm_spec_ext.proposers.candidates.given_drafts import NOTHING_GIVEN, Given
from vllm_spec_ext.proposers.candidates.recycled_rows import NUM_KEPT, RecycledRows
from vllm_spec_ext.proposers.candidates.share_numbers import ShareNumbers
from vllm_spec_ext.proposers.corpus.store import BaseArrays
from vllm_spec_ext.proposers.text_index.answer_memory import AnswerMemories, opened
from vllm_spec_ext.proposers.text_index.occurrence_index import OccurrenceIndex, warm_up
from vllm_spec_ext.proposers.text_index.request_texts import RequestTexts

_SELDOM = 16  # tokens that a request without room says until they are read
_NO_ANSWERS = np.zeros((0, 2), np.int32)  # to a prompt
_LEAST_PATH = 0.002  # path probability below which no node is worth a place in the search


@dataclass(frozen=True)
class Candidates:
    """A tree of candidates, best first: each beginning of it is a tree, too."""

    parents: IntArray  # [n]
    tokens: IntArray  # [n]
    paths: NDArray[np.float32]  # [n] probability of each path; never rises
    evidence: NDArray[np.int16]  # [n, columns] classes
    said: NDArray[np.float32]  # [n] probability of each path, as the sources say

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class _Known:
    """What does not change while a request runs."""

    group: str | None  # that its text serves
    num_prompt_tokens: int
    heading: IntArray  # of its answer, as earlier ones have theirs


class Lookup:
    """The sources that are looked up node by node."""

    def __init__(
        self,
        vocab_size: int,
        *,
        own_text: bool,
        earlier_answers: int,
        recycled_contexts: int,
        max_cache_salts: int,
        max_ngram: int,
        corpus: BaseArrays | None = None,
    ) -> None:
        """Start empty, and compile the search.

        Args:
            vocab_size: Of the target.
            own_text: Look into prompt and output.
            earlier_answers: Tokens that are kept of each group's answers; 0 = none.
            recycled_contexts: Contexts whose rows are kept; 0 = none.
            max_cache_salts: Groups with a salt that are known at a time.
            max_ngram: Longest suffix that is looked up.
            corpus: Sections of a store whose vocabulary is no larger.
        """
        from vllm_spec_ext.proposers.candidates import kernels

        self._kernels = kernels
        self._vocab_size = vocab_size
        self._own_text = own_text
        self._max_ngram = max_ngram
        self._texts = RequestTexts()
        self._keeps_texts = own_text or earlier_answers > 0
        self._nothing = OccurrenceIndex()
        self._answers = AnswerMemories(earlier_answers, max_cache_salts, vocab_size)
        self._numbers = ShareNumbers(max_cache_salts)
        self._rows = RecycledRows(recycled_contexts)
        self._recycles = recycled_contexts > 0
        self._corpus = corpus
        self._known: dict[str, _Known] = {}
        self._idle: set[str] = set()  # without room in the step before
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile now, not in a user's first request."""
        warm_up()
        rows = RecycledRows(1)
        one = np.zeros((1, NUM_KEPT), np.int32)
        row = NextTokens(np.zeros((1, 2), np.int32), one, one.astype(np.float32))
        rows.keep(0, row)
        rows.find(0, 0, 0)
        given, nothing = NOTHING_GIVEN, self._nothing.arrays
        no_drafts = (given.tokens, given.parents, given.paths, given.second)
        weights = np.zeros((NUM_COLUMNS, NUM_CLASSES))
        args = (self._vocab_size, self._max_ngram, 1, np.zeros(0, np.int32), 1.0)
        end = np.zeros(1, np.int32)
        self._kernels.grow(
            end, end, (_NO_ANSWERS, 0), nothing, nothing, rows.table, 0, self._corpus, no_drafts,
            weights, *args,
        )  # fmt: skip

    def follow(self, request: RequestStep) -> None:
        """See what a step gave; call it for each request in each step, right after it."""
        name = request.request_id
        if request.room > 0 or not request.ends.isdisjoint(request.new_tokens):
            self._idle.discard(name)
        elif name not in self._idle:
            self._idle.add(name)  # it may be about to end, so these are read
        elif 0 < self._num_unread(request) < _SELDOM:
            return  # they are read later, all at once; at the length asked for, the last are not
        if name not in self._known:
            group = request.share_group if request.options.remember else None
            opens = self._answers.heading(request.token_ids[: request.num_prompt_tokens])
            self._known[name] = _Known(group, request.num_prompt_tokens, opens)
        if self._keeps_texts:
            self._texts.of(request)
        if self._recycles and request.next_tokens is not None:
            self._rows.keep(self._rows_of(name), request.next_tokens)

    def _num_unread(self, request: RequestStep) -> int:
        text = self._texts.known(request.request_id)
        if text is None:  # there are only rows to keep
            return request.num_output_tokens % _SELDOM
        return len(request.token_ids) - len(text)

    def grow(
        self,
        request: RequestStep,
        weights: NDArray[np.float64],
        least: float,
        given: Given = NOTHING_GIVEN,
    ) -> Candidates:
        """The best tree for a request that :meth:`follow` has just seen.

        Args:
            request: Its room is the most nodes.
            weights: As of :class:`.calibration.Calibration`.
            least: Least probability of a path.
            given: Drafts of other sources.
        """
        text = self._texts.known(request.request_id) if self._own_text else None
        said = request.token_ids[request.num_prompt_tokens :]
        answers = self._answers.of(request.share_group)
        group = self._rows_of(request.request_id) if self._recycles else -1
        heading = self._known[request.request_id].heading
        parents, tokens, paths, evidence = self._kernels.grow(
            request.token_ids[-self._max_ngram :],
            opened(heading, said, self._max_ngram),
            (_NO_ANSWERS if answers is None else answers.same(heading), len(said)),
            (self._nothing if text is None else text).arrays,
            (self._nothing if answers is None else answers.index).arrays,
            self._rows.table,
            group,
            self._corpus,
            (given.tokens, given.parents, given.paths, given.second),
            weights,
            self._vocab_size,
            self._max_ngram,
            request.room,
            np.fromiter(request.ends, np.int32, len(request.ends)),
            max(least, _LEAST_PATH),
        )
        return Candidates(parents, tokens, paths, evidence, said=paths)

    def _rows_of(self, name: str) -> int:
        """Whose recycled rows a request finds and adds to: of its group, or its own alone."""
        return self._numbers.of(self._known[name].group, name)

    def finish(self, request_id: str) -> None:
        """A request is gone, known or not; its answer stays."""
        known, text = self._known.pop(request_id, None), self._texts.known(request_id)
        if known is not None and text is not None:
            answer = text.tokens[known.num_prompt_tokens :].copy()
            self._answers.add(known.group, answer, answer, known.heading)
        self._idle.discard(request_id)
        self._texts.forget(request_id)
        self._numbers.forget(request_id)
