# SPDX-License-Identifier: Apache-2.0
"""The tables and the search behind ``adaptive_ngram``, put together for one engine."""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.adaptive_ngram import search as search_module
from vllm_spec_ext.proposers.adaptive_ngram.learning import Learner
from vllm_spec_ext.proposers.adaptive_ngram.lookup import BACKOFF, Lookup
from vllm_spec_ext.proposers.adaptive_ngram.overlay import (
    load_overlay,
    overlay_copy,
    write_overlay,
)
from vllm_spec_ext.proposers.adaptive_ngram.overlay_files import (
    file_to_read,
    file_to_save,
    may_save,
    tidy,
)
from vllm_spec_ext.proposers.adaptive_ngram.search import (
    Results,
    Search,
    make_memory,
    search_batch,
    settings_array,
)
from vllm_spec_ext.proposers.adaptive_ngram.settings import NgramSettings
from vllm_spec_ext.proposers.base import (
    EMPTY_DRAFT,
    Draft,
    EngineHandle,
    IntArray,
    RequestStep,
    StepContext,
    StepOutcome,
)
from vllm_spec_ext.proposers.corpus.store import (
    MAX_VOCAB,
    NgramStore,
    empty_arrays,
    open_store,
    target_fingerprint,
)
from vllm_spec_ext.proposers.payoff import branches
from vllm_spec_ext.proposers.payoff.node_payoff import NodePayoff

logger = logging.getLogger("vllm.spec_ext")

DEFAULT_TREE_DEPTH = 12

_SAVED_AFTER_S = 60.0


class TextEnd(NamedTuple):
    """From where the search begins; a row of the ``requests`` of ``search.search_batch``."""

    before: int  # the second-last token, -1 = none
    last: int
    slot: int  # the request's overlay, -1 = none
    room: int  # most nodes
    shared: int  # the shared overlay, -1 = none


# Places in the array of settings that change from step to step.
_SHARED_HALF_LIFE = Lookup._fields.index("shared_half_life")
_MIN_CONFIDENCE = len(Lookup._fields) + Search._fields.index("min_confidence")


class NgramDrafter:
    """What :class:`AdaptiveNgram` does once the engine is known; not thread-safe."""

    def __init__(self, settings: NgramSettings, engine: EngineHandle) -> None:
        """Open the store, check it against the engine's tokenizer, reserve tables, compile.

        Raises:
            SpecExtError: A store or overlay that cannot be used, or a vocabulary over 2^21 - 2.
        """
        self.settings = settings
        self._payoff = NodePayoff()
        self._ends: dict[str, list[int]] = {}  # last verified tokens, to go on from
        self.is_late = False
        """A device drafts from what was known one step before; see :meth:`learn_known`."""
        self.store: NgramStore | None = None
        self.fingerprint = ""
        if engine.vocab_size > MAX_VOCAB:
            raise SpecExtError(
                f"adaptive_ngram packs token ids into 21 bits: found a vocabulary of "
                f"{engine.vocab_size}, expected at most {MAX_VOCAB}; use another method"
            )
        vocab_size = engine.vocab_size
        self.base = empty_arrays(vocab_size)
        if settings.corpus is not None:
            self.store = open_store(settings.corpus, engine)
            self.fingerprint = self.store.header.fingerprint
            # The sentinel row stands at the store's own vocabulary size, which may be smaller
            # than the (padded) one of the model; ids beyond it are in no store.
            vocab_size = self.store.header.vocab_size
            self.base = self.store.arrays
        self.learner = Learner(settings, engine.max_num_seqs, vocab_size)
        self._saves = False
        if settings.overlay_file is not None:
            self.fingerprint = self.fingerprint or target_fingerprint(engine)
            path = file_to_read(settings.overlay_file)
            if path.exists():
                load_overlay(path, self.learner.shared, self.fingerprint, vocab_size)
            self._saves = may_save(settings.overlay_file, engine)
            if self._saves:
                tidy(settings.overlay_file)
            else:
                logger.info("vllm-spec-ext: %s is read here, and not saved", path)
        self._last_save = self.learner.shared_clock
        self._saved_at = time.monotonic()
        self._saving: threading.Thread | None = None
        self._save_later: threading.Timer | None = None
        self._lock = threading.RLock()  # of the tables: copied by a thread, too
        self._prepare(engine.num_speculative_tokens, engine.max_num_seqs, vocab_size)
        self._warm_up()

    def _prepare(self, budget: int, max_num_seqs: int, vocab_size: int) -> None:
        settings = self.settings
        self._vocab_size = vocab_size
        self.lookup = Lookup(
            vocab_size=vocab_size,
            backoff=BACKOFF[settings.backoff],
            backoff_weight=settings.backoff_weight,
            request_weight=settings.request_weight if self.learner.per_request else 0.0,
            shared_weight=settings.shared_weight if self.learner.is_shared else 0.0,
            request_half_life=float(settings.half_life),
            shared_half_life=float(settings.half_life),
            normalise=settings.normalise,
            unseen_weight=settings.unseen_weight,
        )
        mode = search_module.MCTS if settings.search == "mcts" else search_module.BEST_FIRST
        if not settings.tree:
            mode = search_module.CHAIN
        depth = settings.max_depth or (DEFAULT_TREE_DEPTH if settings.tree else budget)
        self._search = Search(
            mode=mode,
            max_depth=int(depth),
            min_confidence=float(settings.min_confidence),
            iterations=settings.iterations,
            max_sequences=settings.max_sequences,
            greedy_extension=settings.greedy_extension,
        )
        self._memory = make_memory(budget)
        self._settings_array = settings_array(self.lookup, self._search)
        self._requests = np.zeros((max_num_seqs, 5), np.int64)  # see search_batch
        self._results = Results(
            tokens=np.zeros((max_num_seqs, budget), np.int32),
            parents=np.zeros((max_num_seqs, budget), np.int32),
            probs=np.zeros((max_num_seqs, budget), np.float32),
            counts=np.zeros(max_num_seqs, np.int64),
        )

    def _warm_up(self) -> None:
        """Compile every kernel (seconds, then cached on disk), leaving no trace in the overlays."""
        self.learner.warm_up()
        branches.warm_up()
        self._requests[0] = (-1, 0, -1, 1, -1)
        self._run(1)

    def _run(self, num: int) -> None:
        search_batch(
            self._requests,
            num,
            self.base,
            self.learner.requests.arrays,
            self.learner.shared.arrays,
            self._settings_array,
            self._memory,
            self._results,
        )

    @property
    def max_depth(self) -> int:
        """Longest path in tokens."""
        return self._search.max_depth

    def propose(self, step: StepContext) -> list[Draft]:
        """Learn the new tokens of all requests, then draft for each; see the base class.

        Late, the drafts are those that a device made of these tokens before they were learned.
        """
        with self._lock:
            if self.is_late:
                drafts = self.drafts_behind(step)
                self.learner.learn(step.requests, self._shared_half_life(step.requests))
            else:
                drafts = self._search_for(step, self.learn_known(step.requests))
            self._save_when_due()
        return drafts

    def learn_known(self, requests: Sequence[RequestStep]) -> list[int]:
        """Learn what is known of the requests that are drafted for next.

        Returns:
            The overlay of each request, -1 = none.
        """
        half_life = self._shared_half_life(requests)
        self._settings_array[_SHARED_HALF_LIFE] = half_life
        with self._lock:
            return self.learner.learn(requests, half_life)

    def drafts_behind(self, step: StepContext) -> list[Draft]:
        """Draft for texts whose last tokens are not learned, as a device does."""
        return self._search_for(step, [self.learner.slot(r.request_id) for r in step.requests])

    def _shared_half_life(self, requests: Sequence[RequestStep]) -> float:
        return self.settings.half_life * max(1, len(requests))

    def _search_for(self, step: StepContext, slots: Sequence[int]) -> list[Draft]:
        drafts: list[Draft] = [EMPTY_DRAFT] * len(step.requests)
        confidence = self.settings.min_confidence
        if self.settings.adaptive_length and step.min_probability is not None:
            confidence = self._payoff.confidence(step.min_probability)
        self._settings_array[_MIN_CONFIDENCE] = confidence
        searched: list[int] = []
        for start in range(0, len(step.requests), len(self._requests)):
            stop = start + len(self._requests)
            part = self._fill(step.requests[start:stop], slots[start:stop])
            self._run(len(part))
            found = self._results
            for row, index in enumerate(part):
                count = int(found.counts[row])
                if count:
                    # Copies: the arrays are used again by the next step.
                    draft = Draft(
                        found.tokens[row, :count].copy(),
                        found.parents[row, :count].copy(),
                        # The weights of ADED's own code are none, and may exceed 1.
                        path_probs=np.minimum(found.probs[row, :count], 1.0),
                    )
                    if self.settings.adaptive_length:
                        draft = branches.without_dear_branches(draft, step, self._payoff.acceptance)
                    drafts[start + index] = draft
                    assert draft.path_probs is not None
                    self._payoff.drafted(step.requests[start + index].request_id, draft.path_probs)
            searched += part
        return drafts

    def _fill(self, requests: Sequence[RequestStep], slots: Sequence[int]) -> list[int]:
        """Write the kernel's inputs; returns which requests are to be searched for."""
        chosen: list[int] = []
        for index, request in enumerate(requests):
            end = self.end_of(request, slots[index])
            if end.room <= 0:
                continue
            self._requests[len(chosen)] = end
            self._ends[request.request_id] = request.token_ids[-2:].tolist()
            chosen.append(index)
        return chosen

    def end_of(self, request: RequestStep, slot: int) -> TextEnd:
        """From where a request is drafted for; no room where it is not.

        Args:
            request: All of its tokens are given.
            slot: Its overlay, -1 = none.
        """
        room, tokens = request.room, request.token_ids[-2:].tolist()
        if request.options.max_draft_tokens is not None:
            room = min(room, request.options.max_draft_tokens)
        if not request.options.enabled or not tokens:
            room = 0
        shared = self.learner.shared_slot(request.request_id)
        before, last = [-1, -1, *tokens][-2:]
        return TextEnd(before, last, slot, room, shared)

    def chains_from(self, ends: Sequence[TextEnd]) -> list[tuple[IntArray, float]]:
        """Tokens behind ends of texts, and the probability of the first; of a drafter of chains."""
        self._settings_array[_MIN_CONFIDENCE] = self.settings.min_confidence
        found: list[tuple[IntArray, float]] = []
        for start in range(0, len(ends), len(self._requests)):
            part = ends[start : start + len(self._requests)]
            self._requests[: len(part)] = part
            self._run(len(part))
            results = self._results
            sizes, firsts = results.counts[: len(part)].tolist(), results.probs[:, 0].tolist()
            for row, size in enumerate(sizes):
                found.append((results.tokens[row, :size].copy(), firsts[row] if size else 0.0))
        return found

    def continue_from(self, request_id: str, provisional: Sequence[int], most: int) -> IntArray:
        """Search behind tokens that are not learned; see the base class."""
        most = min(most, self._results.tokens.shape[1])
        known = self._ends.get(request_id)
        if known is None or most < 1:
            return EMPTY_DRAFT.tokens
        slot = self.learner.slot(request_id)
        text = [-1, *known, *provisional]  # -1 = unknown, before a text of one token
        shared = self.learner.shared_slot(request_id)
        self._requests[0] = (text[-2], text[-1], slot, most, shared)
        self._run(1)
        found = self._results
        count = int(found.counts[0])
        # The first path; a chain has no other.
        is_path = found.parents[0, :count] == np.arange(-1, count - 1)
        length = count if is_path.all() else int(is_path.argmin())
        return found.tokens[0, :length].copy()

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Learn how far estimates can be trusted; tokens are learned from the tokens themselves."""
        for outcome in outcomes:
            self._payoff.verified(outcome.request_id, outcome.num_drafted, outcome.accepted)

    def finish(self, request_ids: Sequence[str]) -> None:
        """Give the requests' overlays back."""
        self.learner.finish(request_ids)
        for request_id in request_ids:
            self._payoff.forget(request_id)
            self._ends.pop(request_id, None)

    def save(self) -> None:
        """Write the overlay of requests without a salt to ``overlay_file``, if there is one.

        Nothing where another process of the deployment writes it.
        """
        with self._lock:
            if self._save_later is not None:
                self._save_later.cancel()
            self._last_save = self.learner.shared_clock
            saving = self._saving
        if saving is not None:
            saving.join()
        if self._saves:
            self._write(overlay_copy(self.learner.shared))

    def _save_when_due(self) -> None:
        """Between two steps the tables are copied; a disk that is slow holds no request up.

        Where no step follows, it is done when the time has come.
        """
        every = self.settings.overlay_save_every
        clock = self.learner.shared_clock
        if not self._saves or not every or clock == self._last_save:
            return
        left = self._saved_at + _SAVED_AFTER_S - time.monotonic()
        is_saving = self._saving is not None and self._saving.is_alive()
        if is_saving or (clock - self._last_save < every and left > 0):
            if self._save_later is None:
                self._save_later = threading.Timer(max(left, 1.0), self._look_again)
                self._save_later.daemon = True
                self._save_later.start()
            return
        self._last_save, self._saved_at = clock, time.monotonic()
        self._saving = threading.Thread(
            target=self._try_to_write,
            args=(overlay_copy(self.learner.shared),),
            name="spec-ext-overlay",
            daemon=True,
        )
        self._saving.start()

    def _look_again(self) -> None:
        with self._lock:
            self._save_later = None
            self._save_when_due()

    def _try_to_write(self, tensors: dict[str, NDArray[Any]]) -> None:
        try:
            self._write(tensors)
        except OSError as error:
            logger.warning("vllm-spec-ext: the overlay could not be saved: %s", error)

    def _write(self, tensors: dict[str, NDArray[Any]]) -> None:
        assert self.settings.overlay_file is not None
        path = file_to_save(self.settings.overlay_file)
        write_overlay(path, tensors, self.fingerprint, self._vocab_size)
