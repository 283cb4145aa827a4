# SPDX-License-Identifier: Apache-2.0
"""The texts of unfinished requests, indexed as they grow."""

from vllm_spec_ext.proposers.base import RequestStep
from vllm_spec_ext.proposers.text_index.occurrence_index import OccurrenceIndex

_ROOM = 512  # tokens of an answer before the index is made anew, twice as large


class RequestTexts:
    """One index a request, of its prompt and output."""

    def __init__(self) -> None:
        """Start without any."""
        self._texts: dict[str, OccurrenceIndex] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def of(self, request: RequestStep) -> OccurrenceIndex:
        """The index of all tokens of a request."""
        tokens = request.token_ids
        text = self._texts.get(request.request_id)
        # vLLM takes tokens back where a session's input goes on; then the index starts again.
        if text is None or len(text) > len(tokens) or text.tokens[-1] != tokens[len(text) - 1]:
            text = self._texts[request.request_id] = OccurrenceIndex(len(tokens) + _ROOM)
        text.append(tokens[len(text) :])
        return text

    def known(self, request_id: str) -> OccurrenceIndex | None:
        """What :meth:`of` gave last; None if the request was never seen."""
        return self._texts.get(request_id)

    def forget(self, request_id: str) -> None:
        """A request is gone, known or not."""
        self._texts.pop(request_id, None)
