# SPDX-License-Identifier: Apache-2.0
"""Products with a packed matrix are torch's, up to rounding."""

import pytest
import torch

from vllm_spec_ext.engine import packed_projection as module
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
