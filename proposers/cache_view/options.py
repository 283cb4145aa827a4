# SPDX-License-Identifier: Apache-2.0
"""Options of ``cache_view``."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from vllm_spec_ext.options import MethodOptions


class CacheViewOptions(MethodOptions):
    """Options of ``cache_view`` (self-speculation over a part of the KV cache)."""

    view: Literal["retrieval", "stream", "full"] = "retrieval"
    """What the target sees of its cache while it drafts: ``"stream"`` the first and the last
    tokens; ``"retrieval"`` these and the pages in between that suit the text best; ``"full"``
    everything, which saves no time and is for tests."""

    budget: int = Field(default=1024, ge=32)
    """Tokens in sight, those of ``sink`` and ``recent`` included. Requests that have no more show
    all of them. A page is a KV block, so numbers of tokens are rounded up to whole blocks."""

    sink: int = Field(default=32, ge=0)
    """First tokens of a request, which are always in sight."""

    recent: int = Field(default=128, ge=0)
    """Last tokens of a request, which are always in sight; ``"stream"`` ignores this and shows as
    many last tokens as the budget has room for."""

    refresh: int = Field(default=1, ge=1)
    """Rounds of a request from one choice of pages to the next; a choice takes time, and an old
    one is accepted less. Until then all that is written stays in sight; once that is more than a
    quarter of the budget, pages are chosen anew."""

    dense_layers: tuple[int, ...] = ()
    """Numbers of layers that see everything all the same; the first layers, ``[0, 1]``, attend
    most widely."""

    draw: bool = True
    """Draw the draft of a request with a temperature from the view's probabilities at the request's
    temperature, top-k and top-p, and verify it by speculative sampling; ``false`` drafts the
    likeliest tokens. A request with a seed is always drafted the likeliest ones."""

    min_context: int = Field(default=0, ge=0)
    """Tokens that a request must have to be drafted for. What pays is measured
    (``adaptive_length``) whatever stands here."""

    draft_on_cpu: bool = False
    """Draft on CPUs, too. There, verifying several tokens takes longer than reading the KV that a
    view leaves out, so by default nothing is drafted."""

    @field_validator("dense_layers")
    @classmethod
    def _each_once(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(layer < 0 for layer in value) or len(set(value)) < len(value):
            raise ValueError(f"found {list(value)}, expected different numbers from 0 on")
        return value

    @model_validator(mode="after")
    def _leave_room_to_choose(self) -> Self:
        kept = self.sink + (self.recent if self.view == "retrieval" else 0)
        if self.view != "full" and kept >= self.budget:
            what = "sink and recent" if self.view == "retrieval" else "sink"
            raise ValueError(
                f"found {kept} tokens for {what}, expected fewer than the budget of {self.budget}"
            )
        return self
