# SPDX-License-Identifier: Apache-2.0
"""A session whose input comes in pieces, on either runner."""

from collections.abc import Sequence
from typing import Any

from generation import sampling_params

LENGTH = 24
"""Tokens of a turn's answer, if nothing else is asked for."""


class Session:
    """One streaming-input session, driven as ``AsyncLLM`` drives it."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine.llm_engine
        self.drafts: list[list[int]] = []  # of the latest turn
        engine.collective_rpc("spec_ext_reset")
        self._rpc = engine.collective_rpc

    def turn(self, chunk: Sequence[int], stop: Sequence[int] = (), **options: Any) -> list[int]:
        """Send a piece of input, and wait for its answer."""
        asked = {"max_tokens": LENGTH, "ignore_eos": True, "stop_token_ids": list(stop)}
        params = sampling_params(asked, options)
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
        is_over = False
        while not is_over:
            for output in client.get_output().outputs:
                answer += output.new_token_ids
                is_over |= output.finish_reason is not None
        self.drafts = [step["tokens"] for step in self._rpc("spec_ext_recorded")[0]]
        return answer

    def end(self) -> None:
        """End the session."""
        self.engine.engine_core.abort_requests(["session"])
        self.engine.engine_core.get_output()


FIRST = [11, 12, 13, 14, 15, 16, 17, 18]


def check_stop_tokens(
    engine: Any, known: dict[Any, list[list[int]]], told_by: str = "truth"
) -> None:
    """What is accepted behind a stop token is no part of a session.

    Args:
        engine: Of a method that is told the answer, so that its drafts go on behind it.
        known: What sessions without drafts were answered, on any engine of the same model; is
            added to.
        told_by: The request option that tells it.
    """

    def turns(chunk: Sequence[int], stop: int, truths: Sequence[list[int]]) -> list[list[int]]:
        session = Session(engine)
        found = [
            session.turn(FIRST, [stop], **{told_by: truths[0]}),
            session.turn(chunk, **{told_by: truths[1]}),
        ]
        session.end()
        return found

    whole = Session(engine)
    truth = whole.turn(FIRST, **{told_by: []})
    whole.end()
    for stop in sorted(set(truth[1:9])):
        for length in (1, 2, 6, 40):
            chunk = [30 + n % 7 for n in range(length)]
            if (stop, length) not in known:
                known[stop, length] = turns(chunk, stop, [[], []])
            plain = known[stop, length]
            assert plain[0][-1] == stop
            assert turns(chunk, stop, [truth, plain[1]]) == plain
