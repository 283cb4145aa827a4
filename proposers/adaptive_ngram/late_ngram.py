# SPDX-License-Identifier: Apache-2.0
"""``adaptive_ngram`` where the host is one step behind: its tables stand on the device, too.

The overlays have a fixed size, so they are copied as they are, rows of 80 bytes. In each step the
rows go there that changed when the host learned the step before: at most two for each token. The
corpus never changes and goes there once. What belongs to a request, which overlays and how old they
are, goes in a row each (``late_kernels.py`` follows the tables from the end of the text).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.typing import NDArray

from vllm_spec_ext.proposers.adaptive_ngram import late_kernels
from vllm_spec_ext.proposers.adaptive_ngram.changed_rows import WORDS, ChangedRows, warm_up
from vllm_spec_ext.proposers.adaptive_ngram.late_copies import GIVES_WAY, WEAK
from vllm_spec_ext.proposers.adaptive_ngram.overlay import SUCCESSORS
from vllm_spec_ext.proposers.adaptive_ngram.shared_overlays import NO_SLOT
from vllm_spec_ext.proposers.base import DeviceTexts, RequestStep
from vllm_spec_ext.proposers.corpus.store import MAX_SUCCESSORS, PROB_TABLE, BaseArrays
from vllm_spec_ext.proposers.late_drafting import drafts_of, padded, rows_on_device

if TYPE_CHECKING:
    import torch

    from vllm_spec_ext.proposers.adaptive_ngram.drafter import NgramDrafter
    from vllm_spec_ext.proposers.adaptive_ngram.learning import Learner


_NARROW = 8  # entries of a context that one warp adds up without a barrier


class LateRow(NamedTuple):
    """A request as the device sees it; the order is that of the columns in ``late_kernels.py``."""

    most: int  # draft tokens
    own_begin: int  # first row of its overlay; -1 = none
    own_generation: int
    own_clock: int
    shared_begin: int
    shared_generation: int
    shared_clock: int


class _OnDevice(NamedTuple):
    rows: "torch.Tensor"  # [num_rows, WORDS] int64 all overlays
    corpus: "tuple[torch.Tensor, ...]"  # as the kernel takes it
    numbers: "torch.Tensor"  # float64


def table_bytes(learner: "Learner", base: BaseArrays) -> int:
    """What all tables take on the device."""
    pools = (learner.requests, learner.shared)
    num_rows = sum(pool.arrays.keys.size for pool in pools)
    return num_rows * WORDS * 8 + sum(array.nbytes for array in base)


def walk_settings(
    backoff: int,
    in_corpus: bool,
    own_rows: int,
    shared_rows: int,
    num_drafted: int,
    *,
    behind: bool = False,
) -> dict[str, Any]:
    """Constants of ``walk_tables``; a kernel is compiled for each.

    Args:
        backoff: Value of ``lookup.BACKOFF``.
        in_corpus: Whether there is one.
        own_rows: Rows of a request's overlay; 0 = there is none.
        shared_rows: Rows of a shared overlay; 0 = there is none.
        num_drafted: Draft tokens of each request.
        behind: The drafts begin with copies.
    """
    entries = MAX_SUCCESSORS * in_corpus + SUCCESSORS * ((own_rows > 0) + (shared_rows > 0))
    return {
        "BACKOFF": backoff,
        "IN_CORPUS": in_corpus,
        "OWN_ROWS": own_rows,
        "SHARED_ROWS": shared_rows,
        "WIDTH": padded(entries),
        "BEHIND": behind,
        "WEAK": WEAK,
        "NUM_DRAFTED": num_drafted,
        "PADDED": padded(num_drafted),
        "num_warps": 4 if entries > _NARROW else 1,
        "enable_fp_fusion": False,  # equals stay equal, as on the host
    }


class LateNgram:
    """Of one engine; see :class:`vllm_spec_ext.proposers.late_drafting.LateDrafter`."""

    def __init__(
        self, drafter: "NgramDrafter", num_drafted: int, *, behind_copies: bool = False
    ) -> None:
        """Nothing is on the device yet.

        Args:
            drafter: Of the proposer, which learns what the target said; it drafts chains.
            num_drafted: Draft tokens of each request.
            behind_copies: For :meth:`draft_behind`, not for :meth:`draft`.
        """
        self._drafter = drafter
        self._learner = drafter.learner
        self._num_drafted = num_drafted
        self._max_depth = drafter.max_depth
        warm_up()
        self._changed = ChangedRows([self._learner.requests, self._learner.shared])
        self._learner.changed = self._changed
        self._on_device: _OnDevice | None = None
        self._settings = walk_settings(
            drafter.lookup.backoff,
            drafter.store is not None,
            self._num_rows(self._learner.requests) if self._learner.per_request else 0,
            self._num_rows(self._learner.shared) if self._learner.is_shared else 0,
            num_drafted,
            behind=behind_copies,
        )

    @staticmethod
    def _num_rows(pool: Any) -> int:
        return int(pool.arrays.keys.shape[1])

    def start(self, device: "torch.device") -> None:
        """All that is there from the start goes to the device, and room for the overlays' rows."""
        import torch

        # Not before: the engine may find that it cannot draft late.
        self._drafter.is_late = True
        lookup, base = self._drafter.lookup, self._drafter.base
        numbers = [
            lookup.backoff_weight,
            lookup.request_weight,
            lookup.shared_weight,
            lookup.request_half_life,
            lookup.unseen_weight,
            self._drafter.settings.min_confidence,
            GIVES_WAY,
        ]
        frequent = PROB_TABLE[base.uni_prob]
        corpus: list[NDArray[Any]] = [base.top, base.w2, base.off, base.tok, base.prob]
        self._on_device = _OnDevice(
            torch.zeros((self._changed.num_rows, WORDS), dtype=torch.int64, device=device),
            tuple(
                torch.tensor(array, device=device)
                for array in (*corpus, PROB_TABLE, base.uni_tok, frequent)
            ),
            torch.tensor(numbers, dtype=torch.float64, device=device),
        )

    def draft(self, requests: Sequence[RequestStep], texts: DeviceTexts) -> "torch.Tensor":
        """One launch, see :class:`.late_drafting.LateDrafter`."""
        drafts = drafts_of(requests, texts, self._num_drafted)
        self._walk(requests, texts, drafts, texts.lengths)
        return drafts

    def draft_behind(
        self,
        requests: Sequence[RequestStep],
        texts: DeviceTexts,
        drafts: "torch.Tensor",
        copied: "torch.Tensor",
    ) -> None:
        """Go on behind copies, or draft in their place; one launch.

        Args:
            requests: As of :meth:`draft`.
            texts: In the same order.
            drafts: [num_requests, num_speculative_tokens] int64 the copies; is filled up.
            copied: [num_requests, 2] int32 tokens of each, and how many agree before them.
        """
        self._walk(requests, texts, drafts, copied)

    def _walk(
        self,
        requests: Sequence[RequestStep],
        texts: DeviceTexts,
        drafts: "torch.Tensor",
        copied: "torch.Tensor",  # or another tensor of the type
    ) -> None:
        on_device = self._on_device
        assert on_device is not None
        slots = self._drafter.learn_known(requests)
        rows = [self._row(request, slot) for request, slot in zip(requests, slots, strict=True)]
        changed = self._changed.take()
        if len(changed):
            try:
                new = texts.upload(changed)
                on_device.rows.index_copy_(0, new[:, 0], new[:, 1:])
            except BaseException:
                self._changed.give_back(changed[:, 0])
                raise
        base = self._drafter.base
        late_kernels.walk_tables[(len(rows),)](
            rows_on_device(rows, texts),
            texts.places,
            texts.lengths,
            texts.tokens,
            texts.tokens.stride(0),
            *self._views(on_device.rows),
            *on_device.corpus,
            on_device.numbers,
            copied,
            drafts,
            self._drafter.lookup.vocab_size,
            len(base.w2),
            len(base.tok),
            min(len(base.uni_tok), MAX_SUCCESSORS),
            **self._settings,
        )

    def _row(self, request: RequestStep, slot: int) -> LateRow:
        changed, learner = self._changed, self._learner
        own = shared = (-1, 0, 0)
        if slot >= 0:
            own = changed.begin(learner.requests, slot)
        shared_slot = learner.shared_slot(request.request_id)
        if shared_slot != NO_SLOT and request.options.enabled:
            shared = changed.begin(learner.shared, shared_slot)
        room = request.room if request.options.enabled else 0
        return LateRow(min(room, self._max_depth), *own, *shared)

    @staticmethod
    def _views(rows: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
        import torch

        return rows, rows.view(torch.int32), rows.view(torch.float32)
