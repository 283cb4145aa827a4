# SPDX-License-Identifier: Apache-2.0
"""Products with a packed matrix are torch's, up to rounding."""

from types import SimpleNamespace

import pytest
import torch

from vllm_spec_ext.engine import packed_projection as module
from vllm_spec_ext.engine.models.draft_projection import quick_projection
from vllm_spec_ext.engine.packed_projection import packed_projection


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_states", [1, 5, 48])
def test_products(dtype: torch.dtype, num_states: int) -> None:
    torch.manual_seed(0)
    rows, states = torch.randn(200, 64).to(dtype), torch.randn(num_states, 64)
    expected = states.to(dtype).double() @ rows.double().T
    found = packed_projection(rows.clone())(states)
    assert found.dtype == dtype
    assert found.shape == (num_states, 200)
    tolerance = 1e-4 if dtype == torch.float32 else 0.2
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0.02)


def test_a_machine_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        assert remove_weight
        layer.cpu_linear = torch.nn.functional.linear

    monkeypatch.setattr(module, "dispatch_cpu_unquantized_gemm", keep)
    rows, states = torch.randn(20, 8), torch.randn(3, 8)
    torch.testing.assert_close(packed_projection(rows)(states), states @ rows.T)


class _Draft(torch.nn.Module):
    """As vLLM's models are, as far as the projection goes."""

    def __init__(self, rows: torch.Tensor, *, scale: float = 1.0) -> None:
        super().__init__()
        self.lm_head = torch.nn.Module()
        self.lm_head.weight = torch.nn.Parameter(rows, requires_grad=False)
        self.logits_processor = SimpleNamespace(scale=1.0, soft_cap=None)
        self.scale = scale

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.lm_head.weight[:70_000].T * self.scale


@pytest.fixture
def large_rows() -> torch.Tensor:
    return torch.randn(70_016, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("has_instructions", [True, False])
def test_a_large_matrix_is_halved_where_the_processor_multiplies_so(
    has_instructions: bool, large_rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_multiplies_bfloat16", lambda: has_instructions)
    assert module.rounds(large_rows) == has_instructions
    assert not module.rounds(large_rows[:1000])
    assert not module.rounds(large_rows.bfloat16())
    states = torch.randn(5, 64)
    found = packed_projection(large_rows)(states)
    assert found.dtype == torch.float32
    expected = states @ large_rows.T
    error = (found - expected).abs().max()
    assert error < (0.2 if has_instructions else 1e-3)
    assert (error > 1e-3) == has_instructions


def test_a_draft_models_projection_is_taken_only_if_it_is_the_models(
    large_rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_multiplies_bfloat16", lambda: True)
    draft = _Draft(large_rows)
    project = quick_projection(draft)
    assert project is not None
    states = torch.randn(3, 64)
    found = project(states)
    assert found.shape == (3, 70_000)  # without what fills the matrix up
    torch.testing.assert_close(found, draft.compute_logits(states), atol=0.2, rtol=0.02)
    assert quick_projection(_Draft(large_rows, scale=2.0)) is None  # it does more than a product
    assert quick_projection(_Draft(large_rows[:100])) is None  # nothing to gain
    monkeypatch.setattr(module, "_multiplies_bfloat16", lambda: False)
    assert quick_projection(draft) is None
