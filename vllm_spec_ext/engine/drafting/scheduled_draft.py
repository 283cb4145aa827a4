# SPDX-License-Identifier: Apache-2.0
"""A request's draft as the next step will verify it; plain data that every rank gets alike."""

from typing import NamedTuple

from vllm_spec_ext.proposers.base import Drawn


class ScheduledDraft(NamedTuple):
    """What is left of a draft once it was cut to what the next step can verify."""

    request_id: str
    tokens: list[int]
    parents: list[int] | None = None  # of a draft with branches; None = a chain
    drawn: Drawn | None = None  # how it was drawn, where its distributions go with it
