# SPDX-License-Identifier: Apache-2.0
"""Options of ``cache_view``."""

from pydantic import Field

from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers.view_options import ViewOptions


class CacheViewOptions(ViewOptions, MethodOptions):
    """Options of ``cache_view`` (self-speculation over a part of the KV cache)."""

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
