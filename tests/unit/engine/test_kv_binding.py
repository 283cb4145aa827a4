# SPDX-License-Identifier: Apache-2.0
"""Attention layers of draft models that a backend has no room for are refused."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from vllm_spec_ext.engine.models.kv_binding import check_head_size
from vllm_spec_ext.errors import UnsupportedError


def check(backend: str, own: int, most: int) -> None:
    group = SimpleNamespace(
        backend=SimpleNamespace(get_name=lambda: backend),
        kv_cache_spec=SimpleNamespace(head_size=own),
    )
    config = SimpleNamespace(model_config=SimpleNamespace(get_head_size=lambda: most))
    check_head_size(cast(Any, group), cast(Any, config))


@pytest.mark.parametrize(
    ("backend", "own", "most"),
    [
        ("TRITON_ATTN", 64, 64),
        ("TRITON_ATTN", 64, 128),
        ("TRITON_ATTN", 128, 80),  # whose buffers have 128
        ("FLASH_ATTN", 128, 64),
        ("CPU_ATTN", 128, 64),
    ],
)
def test_heads_that_there_is_room_for(backend: str, own: int, most: int) -> None:
    check(backend, own, most)


def test_wider_heads_would_write_behind_the_buffers_of_triton() -> None:
    with pytest.raises(UnsupportedError, match="found heads of 128 elements beside 64"):
        check("TRITON_ATTN", 128, 64)
