# SPDX-License-Identifier: Apache-2.0
"""``input_copy`` where the host is one step behind: what it knows goes to the device in a row each.

A row says where a request's copying stood, where its texts are, and up to which token it knows the
output. The source is a piece of the prompt, which is on the device already; one that was given
beside the prompt is put there once. So are earlier answers, whenever there are new ones.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_spec_ext.proposers.base import DeviceTexts, EngineHandle, IntArray, RequestStep
from vllm_spec_ext.proposers.input_copy import late_kernels
from vllm_spec_ext.proposers.input_copy.copy_state import CopyState, LateState
from vllm_spec_ext.proposers.input_copy.options import InputCopyOptions
from vllm_spec_ext.proposers.late_drafting import drafts_of, padded, rows_on_device
from vllm_spec_ext.proposers.text_index.answer_memory import AnswerMemory

if TYPE_CHECKING:
    import torch

    from vllm_spec_ext.proposers.input_copy import InputCopy

_BLOCK = 1024  # places that one program searches
_CHUNK = 64  # blocks that are put together at once
_BYTES = 4  # a token


class LateRow(NamedTuple):
    """A request as the device sees it; the order is that of the columns in ``late_kernels.py``."""

    num_prompt: int
    num_known: int  # output tokens that the state was made of
    cursor: int
    num_agreeing: int
    lost_at: int
    num_lost: int
    guessing: int
    most: int  # draft tokens
    said: int  # address of the first output token
    source: int
    source_size: int
    answers: int
    answers_size: int
    mark: int  # of the prompt, in the heading of its answers


class _Answers(NamedTuple):
    memory: AnswerMemory
    num_added: int
    tokens: "torch.Tensor"  # [n] int32


def search_settings(options: InputCopyOptions, num_drafted: int) -> dict[str, Any]:
    """Constants of ``search_texts``; a kernel is compiled for each."""
    return {
        "MAX_NGRAM": options.max_ngram,
        "NEW": padded(num_drafted + 1),
        "BLOCK": _BLOCK,
    }


def gather_settings(options: InputCopyOptions, num_drafted: int) -> dict[str, Any]:
    """The same of ``gather_drafts``."""
    own_ngram = max(options.min_ngram, options.output_min_ngram)
    return {
        "MAX_NGRAM": options.max_ngram,
        "MIN_NGRAM": options.min_ngram,
        "OWN_NGRAM": own_ngram if options.also_output else 0,
        "TAKES_LATEST": options.match == "latest",
        "TAKES_BEST": options.match == "best",
        "NEAR": options.near,
        "REALIGNS": options.realign > 0,
        "NUM_DRAFTED": num_drafted,
        "PADDED": padded(num_drafted),
        "NEW": padded(num_drafted + 1),
        "CHUNK": _CHUNK,
    }


class LateCopy:
    """Of one engine; see :class:`vllm_spec_ext.proposers.late_drafting.LateDrafter`."""

    def __init__(
        self, copies: "InputCopy", options: InputCopyOptions, folded: IntArray, engine: EngineHandle
    ) -> None:
        """Nothing is on the device yet.

        Args:
            copies: The proposer, which reads what the target said.
            options: Its own.
            folded: [vocab_size + 1] int32 token ids as they are compared.
            engine: Says how much is drafted.
        """
        self._copies = copies
        self._options = options
        self._folded_np = folded
        self._folded: torch.Tensor | None = None
        self._num_drafted = engine.num_speculative_tokens
        self._search = search_settings(options, self._num_drafted)
        self._gather = gather_settings(options, self._num_drafted)
        self._sources: dict[str, torch.Tensor] = {}  # those beside the prompt
        self._answers: dict[str, _Answers] = {}  # by share group

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests that are gone."""
        for request_id in request_ids:
            self._sources.pop(request_id, None)

    def start(self, device: "torch.device") -> None:
        """The folded token ids go to the device."""
        import torch

        self._folded = torch.tensor(self._folded_np, device=device)

    def draft(self, requests: Sequence[RequestStep], texts: DeviceTexts) -> "torch.Tensor":
        """Two launches, see :class:`.late_drafting.LateDrafter`."""
        return self.draft_counted(requests, texts)[0]

    def draft_counted(
        self, requests: Sequence[RequestStep], texts: DeviceTexts
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """The same, and [num_requests, 2] int32 on the device: how many of the tokens are copied,
        and how many agree before them."""
        import torch

        assert self._folded is not None
        self._copies.keep_answers()
        first, stride = texts.tokens.data_ptr(), texts.tokens.stride(0)
        begins = (first + texts.places_np * (stride * _BYTES)).tolist()
        rows = [
            self._row(request, texts, begin)
            for request, begin in zip(requests, begins, strict=True)
        ]
        num_new = self._num_drafted + 1  # tokens that a step gives at most
        longest = max(
            max(row.source_size, row.answers_size, row.num_known + num_new) for row in rows
        )
        num_requests = len(rows)
        num_blocks = -(-longest // self._search["BLOCK"])
        found = torch.empty(
            (num_requests, late_kernels.NUM_TEXTS.value, num_blocks, late_kernels.NUM_FOUND.value),
            dtype=torch.int32,
            device=texts.tokens.device,
        )
        drafts = drafts_of(requests, texts, self._num_drafted)
        copied = torch.empty((num_requests, 2), dtype=torch.int32, device=drafts.device)
        inputs = (rows_on_device(rows, texts), texts.places, texts.lengths, self._folded, found)
        unsayable = len(self._folded_np) - 1
        late_kernels.search_texts[(num_requests, late_kernels.NUM_TEXTS.value, num_blocks)](
            *inputs, unsayable, num_blocks, **self._search
        )
        late_kernels.gather_drafts[(num_requests,)](
            *inputs, drafts, copied, unsayable, num_blocks, **self._gather
        )
        return drafts, copied

    def _row(self, request: RequestStep, texts: DeviceTexts, begin: int) -> LateRow:
        """Of a request whose text begins at that address."""
        said = begin + request.num_prompt_tokens * _BYTES
        if not request.options.enabled:
            nothing = (0, -1, 0, -1, 0, 0, 0, said)
            return LateRow(request.num_prompt_tokens, *nothing, said, 0, said, 0, 0)
        copy = self._copies.known_copy(request)
        if copy.source_start is not None:
            source = begin + copy.source_start * _BYTES
        else:
            source = self._source(request.request_id, copy, texts).data_ptr()
        answers = self._earlier(copy.share_group, texts)
        return LateRow(
            request.num_prompt_tokens,
            *LateState.of(copy),
            most=request.room,
            said=said,
            source=source,
            source_size=len(copy.source),
            answers=said if answers is None else answers.data_ptr(),
            answers_size=0 if answers is None else len(answers),
            mark=int(copy.heading[0]),
        )

    def _source(self, request_id: str, copy: CopyState, texts: DeviceTexts) -> "torch.Tensor":
        """A source that is not in the prompt."""
        found = self._sources.get(request_id)
        if found is None:
            found = self._sources[request_id] = texts.upload(copy.source)
        return found

    def _earlier(self, share_group: str | None, texts: DeviceTexts) -> "torch.Tensor | None":
        memory = self._copies.earlier_answers(share_group)
        if share_group is None or memory is None:
            return None
        known = self._answers.pop(share_group, None)
        if known is None or known.memory is not memory or known.num_added != memory.num_added:
            known = _Answers(memory, memory.num_added, texts.upload(memory.tokens.copy()))
        self._answers[share_group] = known  # used last
        while len(self._answers) > self._options.max_cache_salts + 1:
            del self._answers[next(iter(self._answers))]
        return known.tokens
