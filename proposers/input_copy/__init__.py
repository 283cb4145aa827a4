# SPDX-License-Identifier: Apache-2.0
"""Input copy: the request's own input is the draft (input-guided aggressive decoding).

Sun et al. 2021, "Instantaneous Grammatical Error Correction with Shallow Aggressive Decoding":
draft the source, keep what the target agrees with, and after a divergence wait until the end of
the output occurs in the source again. What goes beyond the paper has an option each that switches
it off (``options.py``). Lossless; needs no training and no model.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm_spec_ext.errors import RequestOptionError, shown
from vllm_spec_ext.options import MethodOptions, RequestOptions
from vllm_spec_ext.proposers.base import (
    EMPTY_DRAFT,
    BaseProposer,
    Draft,
    EngineHandle,
    IntArray,
    RequestFacts,
    RequestLimits,
    RequestStep,
    StepContext,
    StepOutcome,
    proposer,
)
from vllm_spec_ext.proposers.input_copy.chat_markers import ChatMarkers, find_chat_markers
from vllm_spec_ext.proposers.input_copy.copy_state import LOST, CopyState
from vllm_spec_ext.proposers.input_copy.options import InputCopyOptions, InputCopyRequest
from vllm_spec_ext.proposers.input_copy.source_span import span_between
from vllm_spec_ext.proposers.input_copy.word_forms import fold_vocabulary
from vllm_spec_ext.proposers.payoff.acceptance_rates import AcceptanceRates
from vllm_spec_ext.proposers.text_index.answer_memory import AnswerMemories, AnswerMemory
from vllm_spec_ext.proposers.text_index.occurrence_index import (
    NO_POSITION,
    Match,
    OccurrenceIndex,
    warm_up,
)

if TYPE_CHECKING:
    from vllm_spec_ext.proposers.input_copy.late_copy import LateCopy

# Bounds of a source that is not in the prompt. A request copies less than max_model_len tokens in
# all, so most of a longer source can never be drafted, while reading it takes time: 1.5 s for two
# million characters, and 0.07 s of the engine for an index of half a million tokens (2 cores).
_MAX_SOURCE_LENGTHS = 4  # tokens, as a multiple of max_model_len
_MAX_CHARACTERS_PER_TOKEN = 8  # usual text has 3 to 5

# Kinds of drafts, by how many tokens agreed before them: 1, 2, 3-4, 5-8, more; a re-alignment; the
# request's own output by 1, 2, more; an earlier answer by 1, 2, 3, more. First-token and
# further-token acceptance rates as replayed on sentence correction with a 135M model; learned anew
# while serving.
_SOURCE_BOUNDS = (1, 2, 4, 8)
_GUESS = len(_SOURCE_BOUNDS) + 1
_OWN = _GUESS + 1
_EARLIER = _OWN + 3
_PRIORS = [
    (0.35, 0.80),
    (0.60, 0.85),
    (0.75, 0.88),
    (0.80, 0.90),
    (0.85, 0.92),
    (0.20, 0.65),
    (0.30, 0.80),
    (0.60, 0.88),
    (0.80, 0.92),
    (0.20, 0.50),
    (0.45, 0.75),
    (0.45, 0.75),
    (0.55, 0.80),
]


@proposer(
    "input_copy",
    summary="Copies from the request's input, or from its own output, as the draft.",
    options=InputCopyOptions,
    request_options=InputCopyRequest,
    num_speculative_tokens=32,
    best_for="editing, correcting, rewriting, quoting, extraction, code edits",
    cost="0.1 to 0.2 ms a step; 60 to 110 bytes a token of input and answer",
)
class InputCopy(BaseProposer):
    """See the module docstring."""

    options: InputCopyOptions

    def start(self, engine: EngineHandle) -> None:
        """Read markers and word forms off the tokenizer and compile the search."""
        self._copies: dict[str, CopyState] = {}
        self._rates = AcceptanceRates(_PRIORS)
        self._late: LateCopy | None = None
        self._finished: list[CopyState] = []  # whose answers nobody copies from yet
        tokenizer = engine.load_tokenizer()
        self._markers: ChatMarkers | None = None
        if self.options.source != "prompt":
            self._markers = find_chat_markers(tokenizer)
        self._folded = np.arange(engine.vocab_size, dtype=np.int32)
        if self.options.fold_case:
            self._folded = fold_vocabulary(tokenizer, engine.vocab_size)
        # A prompt may hold ids that the tokenizer knows and the model cannot say.
        self._folded = np.append(self._folded, np.int32(engine.vocab_size))
        self._answers = AnswerMemories(
            self.options.earlier_answers, self.options.max_cache_salts, engine.vocab_size
        )
        warm_up()

    def propose(self, step: StepContext) -> list[Draft]:
        """One chain a request; empty where the output is not being copied."""
        self._rates.next_step()
        return [self._propose_one(request, step) for request in step.requests]

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Learn which kinds of drafts are accepted."""
        for outcome in outcomes:
            copy = self._copies.get(outcome.request_id)
            if copy is not None:
                self._rates.observe(copy.kind, outcome.num_drafted, outcome.num_accepted)

    def finish(self, request_ids: Sequence[str]) -> None:
        """Drop the indices of these requests, and keep their answers for later ones."""
        self.keep_answers()
        for request_id in request_ids:
            copy = self._copies.pop(request_id, None)
            if copy is not None and copy.remember:
                self._finished.append(copy)
        if self._late is None:
            self.keep_answers()
        else:
            self._late.forget(request_ids)

    def keep_answers(self) -> None:
        """What finished requests said may be copied from now on.

        Where drafts are late, from the next ones on: those of the step that is still queued were
        looked up without, and are yet to be said again here.
        """
        for copy in self._finished:
            answer = np.asarray(copy.output, np.int32)
            self._answers.add(copy.share_group, answer, copy.output_index.tokens, copy.heading)
        self._finished.clear()

    @classmethod
    def drafts_late(cls, options: MethodOptions) -> bool:
        """With any options."""
        return True

    def late_drafter(self, engine: EngineHandle) -> "LateCopy":
        """All of it: sources, the request's own output and earlier answers, letters folded."""
        from vllm_spec_ext.proposers.input_copy.late_copy import LateCopy

        self._late = LateCopy(self, self.options, self._folded, engine)
        return self._late

    def known_copy(self, request: RequestStep) -> CopyState:
        """The state of a request, up to the tokens that are given."""
        copy = self._copies.get(request.request_id)
        if copy is None:
            copy = self._copies[request.request_id] = self._start_copy(request)
        num_known = request.num_prompt_tokens + len(copy.output)
        if num_known == len(request.token_ids):
            return copy
        new = request.token_ids[num_known:]
        copy.output += new.tolist()
        folded = self._folded[new]
        copy.output_index.append(folded)
        copy.follow(folded)
        return copy

    def num_before(self, request_id: str) -> int:
        """Tokens that agree before the request's last draft, if there was one."""
        return self._copies[request_id].num_before

    def earlier_answers(self, share_group: str | None) -> AnswerMemory | None:
        """What a request of this group may copy from beside its own text."""
        return self._answers.of(share_group)

    def continue_from(self, request_id: str, provisional: Sequence[int], most: int) -> IntArray:
        """See :class:`vllm_spec_ext.proposers.base.Continues`; neither cursor nor index moves."""
        nothing = EMPTY_DRAFT.tokens
        copy = self._copies.get(request_id)
        if copy is None or most < 1:
            return nothing
        added = self._folded[np.asarray(provisional, np.int32)]
        source = copy.source_index.tokens
        if copy.cursor != LOST:
            followed = source[copy.cursor : copy.cursor + len(added)]
            differs = np.flatnonzero(followed != added[: len(followed)])
            end = copy.cursor + len(added)
            if not len(differs) and end < len(source):
                return self._sayable(copy, end, most)
        max_ngram = self.options.max_ngram
        suffix = np.concatenate([copy.output_index.tokens[-max_ngram:], added])[-max_ngram:]
        lost_at = copy.lost_at if copy.cursor == LOST else copy.cursor
        match = copy.source_index.longest(suffix, max_ngram, hint=max(lost_at, 0), need_all=True)
        own = copy.output_index.longest(suffix, max_ngram, own=not len(added))
        least = max(self.options.min_ngram, self.options.output_min_ngram, match.length + 1)
        if self.options.also_output and own.length >= least and own.latest < len(copy.output):
            return np.array(copy.output[own.latest : own.latest + most], np.int32)
        if match.length >= self.options.min_ngram:
            position = self._choose(match, lost_at)
            if position != NO_POSITION:
                return self._sayable(copy, position, most)
        if copy.cursor != LOST and differs.tolist() == [len(added) - 1]:
            # One token of the source was replaced, as in `_find_again`.
            return self._sayable(copy, end, min(most, self.options.realign))
        return nothing

    def _sayable(self, copy: CopyState, start: int, most: int) -> IntArray:
        """Tokens of the source from there on, before the first one that the model cannot say."""
        tokens = copy.source[start : start + most]
        if copy.is_sayable:
            return tokens
        unsayable = np.flatnonzero(tokens >= len(self._folded) - 1)
        return tokens[: unsayable[0]] if len(unsayable) else tokens

    def _propose_one(self, request: RequestStep, step: StepContext) -> Draft:
        if not request.options.enabled:
            return EMPTY_DRAFT
        copy = self.known_copy(request)
        if request.room <= 0:
            return EMPTY_DRAFT
        output = request.token_ids[request.num_prompt_tokens :]
        own = self._find_again(copy) if copy.cursor == LOST else None
        num_agreeing = copy.num_agreeing if own is None else own.length
        answers = self._answers.of(copy.share_group)
        earlier = self._earlier_match(answers, copy, num_agreeing)
        if answers is not None and earlier is not None:
            kind = _EARLIER + min(earlier.length, 4) - 1
            room = self._limit(kind, earlier.length, request.room, step)
            if room:
                following = answers.following(earlier, room)
                return self._drafted(copy, kind, earlier.length, following)
        if own is not None:
            kind = _OWN + min(own.length, 3) - 1
            room = self._limit(kind, own.length, request.room, step)
            # A repetition shorter than the room repeats itself, as a loop would.
            period = len(output) - own.latest
            repeated = output[own.latest + np.arange(room) % period]
            return self._drafted(copy, kind, own.length, repeated)
        if copy.cursor == LOST:
            return EMPTY_DRAFT
        kind, room = bisect_left(_SOURCE_BOUNDS, copy.num_agreeing), request.room
        if copy.guessing:
            kind = _GUESS
            room = room if step.fixed_length else min(room, self.options.realign)
        room = self._limit(kind, copy.num_agreeing, room, step)
        tokens = self._sayable(copy, copy.cursor, room)
        return self._drafted(copy, kind, copy.num_agreeing, tokens)

    def _drafted(self, copy: CopyState, kind: int, num_before: int, tokens: IntArray) -> Draft:
        if len(tokens):  # else the outcome to come is still that of an earlier, shadow draft
            copy.kind, copy.num_before = kind, num_before
        return Draft(tokens, path_probs=self._rates.path_probs(kind, len(tokens)))

    def _limit(self, kind: int, num_agreeing: int, room: int, step: StepContext) -> int:
        """How much to draft after this many agreeing tokens."""
        options, min_probability = self.options, step.min_probability
        if step.fixed_length:
            return room
        if options.growth:
            room = min(room, max(options.first_draft, options.growth * num_agreeing))
        if options.adaptive_length and min_probability is not None:
            room = self._rates.longest_draft(kind, min_probability, room)
        return room

    def _start_copy(self, request: RequestStep) -> CopyState:
        """Index the source; the output's index starts empty and grows with the output."""
        prompt = request.token_ids[: request.num_prompt_tokens]
        options = request.options
        assert isinstance(options, InputCopyRequest)
        source: IntArray = prompt
        start: int | None = 0
        span, cursor = options.source_span, 0
        if options.source_token_ids is not None:
            source, start = np.asarray(options.source_token_ids, np.int32), None
        elif span is None and self._markers is not None:
            message = self._markers.last_user_span(prompt)
            if self.options.source == "last_user":
                span = message
            elif message is not None:  # what was said before it is asked for again, too
                cursor = message[0]
        if span is not None:
            source, start = prompt[span[0] : span[1]], span[0]
        index = OccurrenceIndex(len(source))
        index.append(self._folded[np.minimum(source, len(self._folded) - 1)])
        remember = options.remember and self.options.earlier_answers > 0
        return CopyState(
            source.copy(),
            index,
            OccurrenceIndex(),
            remember,
            request.share_group,
            self._answers.heading(prompt),
            start,
            is_sayable=int(source.max(initial=0)) < len(self._folded) - 1,
            cursor=cursor,
        )

    def _find_again(self, copy: CopyState) -> Match | None:
        """Set the cursor where the end of the output occurs in the source.

        Returns:
            The match in the request's own output instead, where that is the better one.
        """
        options = self.options
        suffix = copy.output_index.tokens[-options.max_ngram :]
        hint = max(copy.lost_at, 0)
        match = copy.source_index.longest(
            suffix, options.max_ngram, hint=hint, need_all=options.match != "latest"
        )
        position = NO_POSITION
        if match.length >= options.min_ngram:
            position = self._choose(match, copy.lost_at)
        found = NO_POSITION < position < len(copy.source)
        own = self._own_match(copy, suffix)
        if own is not None:
            # Two tokens behind the source, the output's own words are the likelier ones to go on.
            lead = own.length - match.length
            if not found or lead > 0 or (lead == 0 and copy.num_lost >= 2):
                return own
        if found:
            copy.cursor, copy.num_agreeing = position, match.length
        elif options.realign and copy.num_lost == 1 and 0 <= copy.lost_at < len(copy.source) - 1:
            copy.cursor, copy.guessing = copy.lost_at + 1, True
        return None

    def _choose(self, match: Match, lost_at: int) -> int:
        """Position in the source to go on from, or NO_POSITION."""
        options = self.options
        if match.num_places == 1 or options.match == "latest":
            return match.latest
        if options.match == "best":
            return match.following if match.following != NO_POSITION else match.latest
        is_near = match.following != NO_POSITION and match.following - lost_at <= options.near
        return match.following if lost_at != LOST and is_near else NO_POSITION

    def _own_match(self, copy: CopyState, suffix: IntArray) -> Match | None:
        options = self.options
        if not options.also_output:
            return None
        own = copy.output_index.longest(suffix, options.max_ngram, own=True)
        least = max(options.min_ngram, options.output_min_ngram)
        return own if own.length >= least else None

    def _earlier_match(
        self, answers: AnswerMemory | None, copy: CopyState, num_agreeing: int
    ) -> Match | None:
        """An earlier answer that agrees in more tokens than the other sources do."""
        if answers is None or num_agreeing >= self.options.max_ngram:
            return None
        output = copy.output_index.tokens
        match = answers.longest(output, self.options.max_ngram, copy.heading)
        if match.length < self.options.min_ngram or match.length <= num_agreeing:
            return None
        # The same end of an answer, with nothing behind it, says nothing.
        return match if len(answers.following(match, 1)) else None

    @staticmethod
    def check_request(options: RequestOptions, limits: RequestLimits) -> None:
        """Look at the ids of a source; raises RequestOptionError."""
        assert isinstance(options, InputCopyRequest)
        if options.source_token_ids is not None:
            _check_source("source_token_ids", options.source_token_ids, limits)

    @staticmethod
    def resolve_request(options: RequestOptions, facts: RequestFacts) -> InputCopyRequest:
        """Turn markers and text into token positions, while the request can still be refused.

        Raises:
            RequestOptionError: The span ends outside the prompt, the markers are not in it, the
                input comes in pieces and has no whole prompt for either, a source is too long or
                holds ids that the model does not have, or a text was given to an engine without
                a tokenizer.
        """
        assert isinstance(options, InputCopyRequest)
        if facts.is_session:
            _refuse_places(options)
        if options.source_span is not None and options.source_span[1] > len(facts.prompt):
            raise RequestOptionError(
                "source_span",
                f"ends at token {shown(options.source_span[1])}, but the prompt has "
                f"{len(facts.prompt)} tokens; expected an end of at most {len(facts.prompt)}",
            )
        needs_tokenizer = "source_markers" if options.source_markers else "source_text"
        given = options.source_markers or options.source_text
        if given is None:
            return options
        if facts.tokenizer is None:
            raise RequestOptionError(
                needs_tokenizer,
                "this engine runs without a tokenizer; give source_span or source_token_ids",
            )
        cleared = {"source_markers": None, "source_text": None}
        if options.source_text is not None:
            ids = _tokenise(options.source_text, facts)
            return options.model_copy(update={**cleared, "source_token_ids": ids})
        assert options.source_markers is not None
        span = span_between(facts.prompt, *options.source_markers, facts.tokenizer)
        return options.model_copy(update={**cleared, "source_span": span})


def _refuse_places(options: InputCopyRequest) -> None:
    """Of a whole prompt, where there is none."""
    for name in ("source_span", "source_markers"):
        if getattr(options, name) is not None:
            raise RequestOptionError(
                name,
                "found it with input that is streamed into a session, which has no whole prompt; "
                "expected source_text or source_token_ids, or none of these options",
            )


def _tokenise(text: str, facts: RequestFacts) -> list[int]:
    limit = _MAX_SOURCE_LENGTHS * _MAX_CHARACTERS_PER_TOKEN * facts.max_model_len
    if len(text) > limit:
        raise RequestOptionError(
            "source_text",
            f"found {len(text)} characters, expected at most {limit} with max_model_len="
            f"{facts.max_model_len}; give the part that may be copied",
        )
    ids = list(facts.tokenizer.encode(text, add_special_tokens=False))
    _check_source("source_text", ids, facts)
    return ids


def _check_source(name: str, ids: Sequence[int], limits: RequestLimits) -> None:
    limit = _MAX_SOURCE_LENGTHS * limits.max_model_len
    if len(ids) > limit:
        raise RequestOptionError(
            name,
            f"found {len(ids)} tokens, expected at most {limit} with max_model_len="
            f"{limits.max_model_len}; give the part that may be copied",
        )
    for wrong in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= wrong < limits.vocab_size:
            raise RequestOptionError(
                name,
                f"found token id {shown(wrong)}, but the model has {limits.vocab_size} tokens; "
                f"expected ids from 0 to {limits.vocab_size - 1}",
            )
