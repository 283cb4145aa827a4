# SPDX-License-Identifier: Apache-2.0
"""Options that say what a pass sees of a KV cache: the target's, or a draft model's own."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from vllm_spec_ext.options import Options
from vllm_spec_ext.proposers.views import ViewSpec

OFF_ON_CPUS = (
    "there verifying several tokens costs more than reading KV, so {what} nothing; "
    '"draft_on_cpu": true makes it draft'
)
"""Why views are off on CPUs by default."""


class ViewOptions(Options):
    """A view, as users write it."""

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

    def spec(self, name: str, *, on_cpus: bool) -> ViewSpec:
        """What the engine is asked for.

        Args:
            name: In metrics and messages; unique within the method.
            on_cpus: Whether the view is for CPUs, too.
        """
        return ViewSpec(
            name,
            self.view,
            self.budget,
            self.sink,
            self.recent,
            self.refresh,
            self.dense_layers,
            on_cpus,
        )


class StreamOptions(Options):
    """What a draft model sees of its own KV cache, as users write it."""

    view: Literal["full", "stream"] = "full"
    """What the draft model sees of its own KV cache: ``"full"`` everything; ``"stream"`` the first
    and the last tokens, so that a long context takes it no longer than a short one."""

    budget: int = Field(default=256, ge=32)
    """Tokens in sight with ``"stream"``, those of ``sink`` included; rounded up to whole KV blocks,
    and more while it reads several tokens at once."""

    sink: int = Field(default=16, ge=0)
    """First tokens of a request, which are always in sight with ``"stream"``."""

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        fields = StreamOptions.model_fields
        given = [name for name in ("budget", "sink") if getattr(self, name) != fields[name].default]
        if self.view == "full" and given:
            raise ValueError(
                f"found {' and '.join(given)}, and all KV in sight; add "
                '"view": "stream" or leave out what it does not need'
            )
        if self.sink >= self.budget:
            raise ValueError(
                f"found {self.sink} tokens for sink, expected fewer than the budget of "
                f"{self.budget}"
            )
        return self

    def stream(self) -> ViewSpec | None:
        """What the engine is asked for; None = everything is in sight."""
        if self.view == "full":
            return None
        return ViewSpec(self.view, self.view, self.budget, self.sink)
