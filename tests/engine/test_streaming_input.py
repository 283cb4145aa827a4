# SPDX-License-Identifier: Apache-2.0
"""A streaming-input session changes a request's tokens under its id; drafts follow the new ones."""

from collections.abc import Sequence
from typing import Any

import pytest
from generation import sampling_params

COPY = {
    "method": "input_copy",
    "num_speculative_tokens": 8,
    "source": "prompt",
    "earlier_answers": 0,
    "adaptive_length": False,
}
NGRAM = {"method": "adaptive_ngram", "adaptive_length": False, "num_speculative_tokens": 8}
FIRST = [11, 12, 13, 14, 15, 16, 17, 18]
SECOND = [31, 32, 33, 34, 31, 32, 33, 34, 11, 12]
LENGTH = 24


class Session:
    """One streaming-input session, driven as ``AsyncLLM`` drives it."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine.llm_engine
        self.drafts: list[list[int]] = []  # of the latest turn
        engine.collective_rpc("spec_ext_reset")
        self._rpc = engine.collective_rpc

    def turn(self, chunk: Sequence[int], **options: Any) -> list[int]:
        """Send a piece of input, and wait for its answer."""
        params = sampling_params({"max_tokens": LENGTH, "ignore_eos": True}, options)
        client = self.engine.engine_core
        request = self.engine.input_processor.process_inputs(
            "session",
            {"type": "token", "prompt_token_ids": list(chunk)},
            params,
            supported_tasks=self.engine.get_supported_tasks(),
            resumable=True,
        )
        self._rpc("spec_ext_record", args=(True,))
        client.add_request(request)
        answer: list[int] = []
        while len(answer) < LENGTH:
            for output in client.get_output().outputs:
                answer += output.new_token_ids
        self.drafts = [step["tokens"] for step in self._rpc("spec_ext_recorded")[0]]
        return answer

    def end(self) -> None:
        """End the session."""
        self.engine.engine_core.abort_requests(["session"])
        self.engine.engine_core.get_output()


@pytest.mark.parametrize("method", [COPY, NGRAM], ids=lambda m: str(m["method"]))
def test_the_next_turn_is_drafted_as_a_request_of_its_own(
    method: dict[str, Any], make_engine: Any
) -> None:
    engine = make_engine(speculative_config=method)
    session = Session(engine)
    first = session.turn(FIRST)
    second, drafts = session.turn(SECOND), session.drafts
    session.end()
    # What was answered is input now, but for the last token, which was never computed.
    whole = Session(engine)
    assert whole.turn([*FIRST, *first[:-1], *SECOND]) == second
    whole.end()
    assert drafts == whole.drafts
    assert any(drafts)


def test_options_of_the_next_turn_count(make_engine: Any) -> None:
    engine = make_engine(speculative_config=COPY)
    session = Session(engine)
    session.turn(FIRST, enabled=False)
    assert not any(session.drafts)
    session.turn(SECOND, max_draft_tokens=2)
    session.end()
    assert max(map(len, session.drafts)) == 2
