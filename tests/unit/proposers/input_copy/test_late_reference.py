# SPDX-License-Identifier: Apache-2.0
"""Behind tokens that it has not read, ``input_copy`` drafts what it would had it read them."""

import pytest
from hypothesis import example, given, settings
from late_sessions import FOLDED, SESSIONS, WELL_COPIED, K, Session, moments, start

from vllm_spec_ext.proposers.input_copy.late_reference import late_draft


@settings(max_examples=300)
@given(SESSIONS)
@example(WELL_COPIED)
def test_the_rule_without_an_index_drafts_the_same(session: Session) -> None:
    proposer = start(session.options)
    for moment in moments(session, proposer):
        found = late_draft(moment.before, moment.texts, FOLDED.tolist(), proposer.options, K)
        assert found == moment.drafted


@pytest.mark.parametrize("forgotten", ["cursor", "num_agreeing", "lost_at", "num_lost", "guessing"])
def test_every_part_of_the_state_counts(forgotten: str) -> None:
    """Without one of them some draft would be another; so the test above sees each."""
    differs = []

    @settings(max_examples=400, derandomize=True, database=None)
    @given(SESSIONS)
    @example(WELL_COPIED)
    def look(session: Session) -> None:
        proposer = start(session.options)
        for moment in moments(session, proposer):
            empty = type(moment.before)(moment.before.num_known)
            wrong = moment.before._replace(**{forgotten: getattr(empty, forgotten)})
            found = late_draft(wrong, moment.texts, FOLDED.tolist(), proposer.options, K)
            differs.append(found != moment.drafted)

    look()
    assert any(differs)
