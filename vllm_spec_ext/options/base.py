# SPDX-License-Identifier: Apache-2.0
"""Base classes of options.

Option classes are the only place where options are defined, each beside what it configures: the
command line, the JSON of ``--speculative-config``, the per-request options and the docs are all
made from them. No vLLM or torch import: these modules load in milliseconds.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_spec_ext.options.parse import parse_json

_INT32_MAX = 2**31 - 1


class Options(BaseModel):
    """Base of all option classes: frozen, and no unknown key is accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    moved_options: ClassVar[Mapping[str, str]] = {}
    """Names that are no longer options, with a sentence for someone who gives one."""


class MethodOptions(Options):
    """Options of one method, set once for the engine beside vLLM's own in the same JSON."""

    adaptive_length: bool = True
    """Draft only as much as saves time, as measured while serving; ``false`` always drafts all that
    the method finds."""


class RequestOptions(Options):
    """Options one request may set in ``SamplingParams.extra_args`` / ``vllm_xargs``."""

    enabled: bool = True
    """Draft for this request at all; ``false`` decodes it plainly."""

    max_draft_tokens: int | None = Field(default=None, ge=0)
    """Upper bound on draft tokens per step for this request; never raises the engine's own."""

    scorer: str | dict[str, Any] | None = None
    """Acceptance rule of this request: ``"exact"``, or stricter parameters of the server's rule,
    e.g. ``{"k": 1}``; JSON text over HTTP. It can never be looser than the server's."""

    remember: bool = True
    """Let later requests with the same ``cache_salt`` be drafted from what this one says, and a
    drafter that learns while it serves (``online``) learn from it; ``false`` keeps nothing of its
    text."""

    @field_validator("max_draft_tokens")
    @classmethod
    def _fit_the_wire(cls, value: int | None) -> int | None:
        """Options travel to the engine as 64-bit integers; every large bound means no bound."""
        return None if value is None else min(value, _INT32_MAX)

    @field_validator("scorer", mode="before")
    @classmethod
    def _read_scorer(cls, value: Any) -> Any:
        """HTTP's ``vllm_xargs`` carries no objects, so parameters may come as JSON text."""
        if isinstance(value, str) and value.lstrip().startswith("{"):
            return parse_json(value)
        return value
