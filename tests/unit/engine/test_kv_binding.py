# SPDX-License-Identifier: Apache-2.0
"""Attention of draft models: the backend that was asked for, and heads that it has room for."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.config import AttentionConfig

from vllm_spec_ext.engine.models.kv_binding import check_head_size
from vllm_spec_ext.engine.models.loading import draft_attention
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


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("TRITON_ATTN", "TRITON_ATTN"),
        ("FLASH_ATTN", "FLASH_ATTN"),
        ("FLASHINFER", None),
        (None, None),
    ],
)
def test_drafts_run_on_the_backend_that_was_asked_for(
    asked: str | None, expected: str | None
) -> None:
    """vLLM's own choice may be one that they cannot run on, as on a B200."""
    theirs = AttentionConfig(backend=cast(Any, asked), flash_attn_version=2)
    found = draft_attention(theirs)
    assert (None if found.backend is None else found.backend.name) == expected
    assert found.flash_attn_version == 2
