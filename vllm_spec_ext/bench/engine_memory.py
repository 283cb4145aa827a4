# SPDX-License-Identifier: Apache-2.0
"""What each of several engines on one machine may take of its memory."""

import math
import os
from collections.abc import Mapping
from typing import Any

from vllm_spec_ext.errors import SpecExtError

SHARE = "gpu_memory_utilization"
KV_BYTES = "kv_cache_memory_bytes"
CPU_KV_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"  # GiB; vLLM 0.32 lets it override KV_BYTES
CPU_KV_BYTES = 1 << 30
_DIGITS = 1000


def memory_args(
    given: Mapping[str, Any],
    *,
    cpu: bool,
    num_engines: int,
    default_share: float,
    variables: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """Arguments of ``LLM`` under which engines that live at the same time fit together.

    Args:
        given: The user's own arguments, which win.
        cpu: Whether this is vLLM's CPU platform. There an engine gets a KV cache of 1 GiB: vLLM
            would take most of the machine's memory for it, engines or none beside it.
        num_engines: Engines that will have been started, this one included.
        default_share: vLLM's own part of a device's memory for one engine, 0 to 1.
        variables: Of the environment.

    Raises:
        SpecExtError: The user's part is more than each of so many engines can have.
    """
    fixed = KV_BYTES in given or bool(variables.get(CPU_KV_VARIABLE))
    if cpu and fixed:
        return {}  # vLLM looks at no share then
    if SHARE in given:
        wanted = float(given[SHARE])
        if wanted * num_engines > 1:
            raise SpecExtError(
                f"{SHARE}={wanted:g} for each of {num_engines} engines that are up at the same "
                f"time is more than the memory there is; expected at most {_share(1, num_engines)};"
                " lower it, leave it out (they share then), or compare fewer methods in one run"
            )
        return {}
    if cpu:
        return {KV_BYTES: CPU_KV_BYTES}
    return {} if num_engines == 1 else {SHARE: _share(default_share, num_engines)}


def _share(whole: float, num_engines: int) -> float:
    """An equal part, rounded down."""
    return math.floor(whole / num_engines * _DIGITS) / _DIGITS
