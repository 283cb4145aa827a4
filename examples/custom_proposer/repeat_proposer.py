# SPDX-License-Identifier: Apache-2.0
"""A proposer that bets on repetition: what was said `period` tokens ago is said again."""

from pydantic import Field

from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers.base import BaseProposer, Draft, StepContext, chain, proposer


class RepeatOptions(MethodOptions):
    """Options of ``repeat``; they stand in the JSON of ``--speculative-config``."""

    period: int = Field(default=8, ge=1)
    """How many tokens back to copy from."""


@proposer("repeat", summary="Repeats itself.", options=RepeatOptions, num_speculative_tokens=4)
class Repeat(BaseProposer):
    """Drafts the tokens that stand `period` tokens back."""

    options: RepeatOptions

    def propose(self, step: StepContext) -> list[Draft]:
        """One draft for each request; it may be empty."""
        drafts = []
        for request in step.requests:
            size = min(request.room, self.options.period)
            start = max(0, len(request.token_ids) - self.options.period)
            drafts.append(chain(request.token_ids[start : start + size].copy()))
        return drafts
