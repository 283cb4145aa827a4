# SPDX-License-Identifier: Apache-2.0
"""Engines that are up at the same time fit into one memory."""

from typing import Any

import pytest

from vllm_spec_ext.bench.engine_memory import (
    CPU_KV_BYTES,
    CPU_KV_VARIABLE,
    KV_BYTES,
    SHARE,
    memory_args,
)
from vllm_spec_ext.errors import SpecExtError

DEFAULT = 0.92  # vLLM's


def arguments(num_engines: int, given: dict[str, Any], **more: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"cpu": False, "variables": {}, **more}
    return memory_args(given, num_engines=num_engines, default_share=DEFAULT, **settings)


@pytest.mark.parametrize("num_engines", range(2, 12))
def test_shares_fit_together_and_leave_little(num_engines: int) -> None:
    share = arguments(num_engines, {})[SHARE]
    assert DEFAULT - 0.02 < share * num_engines <= DEFAULT


def test_one_engine_is_started_as_vllm_starts_it() -> None:
    assert arguments(1, {}) == {}


def test_the_users_own_share_is_respected_while_it_fits() -> None:
    assert arguments(3, {SHARE: 0.33}) == {}
    assert arguments(1, {SHARE: 0.97}) == {}
    with pytest.raises(SpecExtError, match=r"0\.34 for each of 3 engines .* at most 0\.333"):
        arguments(3, {SHARE: 0.34})


def test_fixed_caches_on_a_gpu_still_share_the_rest() -> None:
    # vLLM 0.32 request_memory refuses to start unless the share is free, also with a fixed cache.
    assert arguments(2, {KV_BYTES: 1}) == {SHARE: 0.46}


def test_on_a_cpu_each_engine_has_a_cache_of_its_own() -> None:
    assert arguments(3, {}, cpu=True) == {KV_BYTES: CPU_KV_BYTES}
    # vLLM lets the variable override the argument, so where one is set nothing is added.
    assert arguments(3, {}, cpu=True, variables={CPU_KV_VARIABLE: "2"}) == {}
    assert arguments(3, {KV_BYTES: 5}, cpu=True) == {}
    with pytest.raises(SpecExtError, match="for each of 3 engines"):
        arguments(3, {SHARE: 0.5}, cpu=True)
    assert arguments(3, {SHARE: 0.5, KV_BYTES: 5}, cpu=True) == {}
