# SPDX-License-Identifier: Apache-2.0
"""Which views an engine keeps, and which targets it refuses, told from settings alone."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_spec_ext.engine.views import view_checks
from vllm_spec_ext.engine.views.view_binding import check_numbers
from vllm_spec_ext.engine.views.view_checks import check_views, wanted_views
from vllm_spec_ext.engine.views.view_host import warn_of_idle_views
from vllm_spec_ext.errors import UnsupportedError
from vllm_spec_ext.proposers.cache_view import CacheView
from vllm_spec_ext.proposers.cache_view.options import CacheViewOptions
from vllm_spec_ext.proposers.views import ViewSpec


@pytest.mark.parametrize(
    ("is_cpu", "draft_on_cpu", "number"),
    [(True, False, 0), (True, True, 1), (False, False, 1), (False, True, 1)],
)
def test_a_method_that_is_off_has_no_views(
    is_cpu: bool, draft_on_cpu: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it takes no KV blocks and no memory, and refuses no target."""
    monkeypatch.setattr(view_checks.current_platform, "is_cpu", lambda: is_cpu)
    options = CacheViewOptions(draft_on_cpu=draft_on_cpu)
    assert len(wanted_views(CacheView.views(options))) == number


FULL_ATTENTION: dict[str, Any] = {
    "use_mla": False,
    "hf_text_config": SimpleNamespace(),
    "get_sliding_window": lambda: None,
    "disable_sliding_window": False,
    "attention_chunk_size": None,
    "uses_mrope": False,
    "is_mm_prefix_lm": False,
    "rswa_window": None,
    "is_moe": False,
    "dtype": torch.float32,
    "get_head_size": lambda: 64,
    "get_total_num_hidden_layers": lambda: 4,
    "hf_config": None,
}


def check(kind: Any, **changes: Any) -> None:
    """A target with full attention, but for these changes."""
    model: Any = SimpleNamespace(**{**FULL_ATTENTION, **changes})
    args: Any = SimpleNamespace(enable_lora=False, kv_cache_dtype="auto", block_size=32)
    parallel: Any = SimpleNamespace(data_parallel_size=1)
    check_views([ViewSpec("a", kind)], "cache_view", args, model, parallel)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_mla": True}, r"latent attention \(MLA\): found it, expected keys and values"),
        ({"get_sliding_window": lambda: 4096}, "found a window of 4096 tokens, expected full"),
        (
            {"hf_text_config": SimpleNamespace(layer_types=["full_attention", "chunked"])},
            "sliding windows: found chunked",
        ),
        ({"attention_chunk_size": 8192}, "chunked attention: expected full attention"),
        ({"uses_mrope": True}, r"\(M-RoPE\): expected one position a token"),
        ({"is_mm_prefix_lm": True}, "attends to images in both directions"),
        ({"is_moe": True}, "data_parallel_size=2 and a mixture of experts"),
        ({"get_head_size": lambda: 80}, 'found KV in the layout of "vec16"'),
    ],
)
def test_targets_whose_cache_cannot_be_seen_in_part(changes: dict[str, Any], words: str) -> None:
    args: Any = SimpleNamespace(enable_lora=False, kv_cache_dtype="auto", block_size=32)
    parallel: Any = SimpleNamespace(data_parallel_size=2)
    fine: Any = SimpleNamespace(**FULL_ATTENTION)
    check_views([ViewSpec("a")], "cache_view", args, fine, parallel)
    check_views([], "nothing", args, fine, parallel)
    model: Any = SimpleNamespace(**{**FULL_ATTENTION, **changes})
    with pytest.raises(UnsupportedError, match=f"cache_view runs the target .*{words}"):
        check_views([ViewSpec("a")], "cache_view", args, model, parallel)
    if "vec16" in words:
        check_views([ViewSpec("a", "stream")], "cache_view", args, model, parallel)


def test_windows_that_differ_for_prompt_and_output_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"different windows .* found 128 tokens, expected"):
        check("stream", rswa_window=128)


@pytest.mark.parametrize("size", [80, 112])
def test_heads_whose_keys_cannot_be_read_in_a_cpu_s_cache(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice is one that helps: no data type and no block size would."""
    monkeypatch.setattr(view_checks.current_platform, "is_cpu", lambda: True)
    with pytest.raises(UnsupportedError, match=f"head size {size}, .* and a head size that are"):
        check("retrieval", get_head_size=lambda: size)
    check("stream", get_head_size=lambda: size)


@pytest.mark.parametrize(
    ("kind", "budget", "longest", "is_told"),
    [
        ("stream", 160, 160, True),
        ("retrieval", 4096, 2048, True),
        ("stream", 96, 160, False),
        ("retrieval", 1024, 8192, False),
        ("full", 1024, 512, False),
    ],
)
def test_a_view_that_can_never_hide_anything_is_told(
    kind: Any,
    budget: int,
    longest: int,
    is_told: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would draft nothing without a word: no request is longer than the view."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)  # to where caplog listens
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=longest),
        cache_config=SimpleNamespace(block_size=32),
    )
    with caplog.at_level(logging.WARNING, "vllm.spec_ext"):
        warn_of_idle_views([ViewSpec("view", kind, budget, sink=32, recent=64)], config)
    words = f"shows {budget} tokens of a request, found max_model_len {longest}, expected more"
    assert (words in caplog.text) == is_told


@pytest.mark.parametrize(
    ("dense", "numbers", "is_refused"),
    [((1,), (0, 1, 2), False), ((1,), (0, 2, 3), True), ((), (0, 2, 3), False)],
)
def test_numbers_of_dense_layers_where_some_layers_have_no_attention(
    dense: tuple[int, ...], numbers: tuple[int, ...], is_refused: bool
) -> None:
    host: Any = SimpleNamespace(specs=[ViewSpec("view", dense_layers=dense)])
    names = [f"model.layers.{number}.self_attn.attn" for number in numbers]
    refused = pytest.raises(UnsupportedError, match="found 3 layers with attention that are not")
    with refused if is_refused else nullcontext():
        check_numbers(host, names)
