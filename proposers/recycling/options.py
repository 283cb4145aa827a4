# SPDX-License-Identifier: Apache-2.0
"""Options of ``recycling``."""

from pydantic import Field

from vllm_spec_ext.options import MethodOptions


class RecyclingOptions(MethodOptions):
    """Options of ``recycling`` (what the target foresaw when it verified other drafts)."""

    contexts: int = Field(default=65_536, ge=1, le=1 << 24)
    """Contexts, of one or two tokens, whose likeliest next tokens are kept; 80 bytes each, for
    all requests together. The oldest are overwritten. Requests see what requests with the same
    ``cache_salt`` left; without one they share on a server only with ``share_unsalted``."""

    max_cache_salts: int = Field(default=16, ge=1, le=4096)
    """Number of ``cache_salt`` values that are remembered at a time; the one unused for longest is
    forgotten first. Requests without a salt do not count."""
