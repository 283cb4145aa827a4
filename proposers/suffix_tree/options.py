# SPDX-License-Identifier: Apache-2.0
"""Options of ``suffix_tree``."""

from typing import Self

from pydantic import Field, model_validator

from vllm_spec_ext.options import MethodOptions


class SuffixTreeOptions(MethodOptions):
    """Options of ``suffix_tree`` (continuations of the longest suffix that occurred before)."""

    max_ngram: int = Field(default=24, ge=1, le=64)
    """Longest end of the text, in tokens, that is looked up."""

    own_text: bool = True
    """Look into the request's prompt and output."""

    earlier_answers: int = Field(default=65_536, ge=0)
    """Tokens of earlier requests' answers that are kept to look into. Kept apart for each
    ``cache_salt``; requests without one share on a server only with ``share_unsalted``. 0 keeps
    none."""

    max_cache_salts: int = Field(default=16, ge=1, le=4096)
    """Number of ``cache_salt`` values that are remembered at a time; the one unused for longest is
    forgotten first. Requests without a salt do not count."""

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if not (self.own_text or self.earlier_answers):
            raise ValueError(
                "found every source switched off; leave one of own_text, earlier_answers on"
            )
        return self
