# SPDX-License-Identifier: Apache-2.0
"""A streaming-input session changes a request's tokens under its id; drafts follow the new ones."""

from typing import Any

import pytest
from streaming_session import FIRST, Session, check_stop_tokens

COPY = {
    "method": "input_copy",
    "num_speculative_tokens": 8,
    "source": "prompt",
    "earlier_answers": 0,
    "adaptive_length": False,
}
NGRAM = {"method": "adaptive_ngram", "adaptive_length": False, "num_speculative_tokens": 8}
SECOND = [31, 32, 33, 34, 31, 32, 33, 34, 11, 12]


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


def test_what_is_accepted_behind_a_stop_token(make_engine: Any) -> None:
    oracle = {"method": "oracle", "num_speculative_tokens": 8, "wrong": 0.0}
    check_stop_tokens(make_engine(speculative_config=oracle), {})
