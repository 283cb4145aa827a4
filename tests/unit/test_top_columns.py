# SPDX-License-Identifier: Apache-2.0
"""The largest entries of each row, by a loop and by chunks of columns, against torch's own."""

import pytest
import torch

from vllm_spec_ext import top_columns as module
from vllm_spec_ext.top_columns import top_columns, top_log_probs


@pytest.fixture(params=["a loop", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(module, "_MOST_ON_ONE_CORE", 0)
    return request.param


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("num_columns", [3, 64, 1024, 4096, 4097, 5003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_topk(num_columns: int, dtype: torch.dtype, count: int) -> None:
    draw = torch.Generator().manual_seed(num_columns)
    scores = (torch.randn(6, num_columns, generator=draw) * 4).to(dtype)
    before = scores.clone()
    values, columns = top_columns(scores, count)
    expected = scores.topk(min(count, num_columns), dim=-1)
    assert torch.equal(values, expected.values)
    assert torch.equal(scores.gather(1, columns), values)
    assert all(len(set(row)) == len(row) for row in columns.tolist())
    assert torch.equal(scores, before)


@pytest.mark.usefixtures("way")
def test_all_of_one_chunk_and_the_rest_that_fills_none() -> None:
    scores = torch.zeros(2, 2024)  # fewer columns are not searched in chunks
    scores[0, 128:136] = torch.arange(1.0, 9.0)  # one chunk has them all
    scores[1, 2016:] = torch.arange(1.0, 9.0)  # behind the last whole chunk
    _, columns = top_columns(scores, 8)
    assert columns[0].tolist() == [*range(135, 127, -1)]
    assert columns[1].tolist() == [*range(2023, 2015, -1)]


def test_rows_may_be_a_part_of_wider_ones() -> None:
    wide = torch.randn(4, 3000, generator=torch.Generator().manual_seed(1))
    values, columns = top_columns(wide[:, 100:2500], 4)
    expected = wide[:, 100:2500].topk(4, dim=-1)
    assert torch.equal(values, expected.values)
    assert torch.equal(columns, expected.indices)


@pytest.mark.usefixtures("way")
def test_masked_columns_come_last() -> None:
    scores = torch.full((1, 2000), -torch.inf)
    scores[0, [5, 1999]] = torch.tensor([1.0, 2.0])
    values, columns = top_columns(scores, 4)
    assert columns[0, :2].tolist() == [1999, 5]
    assert values[0, 2:].isneginf().all()
    assert columns.max() < 2000


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_of_any_number_of_dimensions(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(2)
    logits = (torch.randn(2, 3, 2000, generator=draw) * 4).to(dtype)
    log_probs, tokens = top_log_probs(logits, 5)
    exact = logits.double().log_softmax(dim=-1)
    assert log_probs.dtype == torch.float32
    assert log_probs.shape == tokens.shape == (2, 3, 5)
    torch.testing.assert_close(log_probs.double(), exact.gather(-1, tokens), atol=1e-5, rtol=0)
    torch.testing.assert_close(log_probs.double(), exact.topk(5).values, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("num_columns", [1, 255, 256, 5003])
def test_log_probabilities_of_flat_and_of_sharp_rows(num_columns: int, spread: float) -> None:
    draw = torch.Generator().manual_seed(3)
    wide = torch.randn(4, num_columns + 7, generator=draw) * spread + 1000.0
    logits = wide[:, 3 : 3 + num_columns]  # of padded vocabularies
    logits[1, num_columns // 2 :] = -torch.inf
    logits[1, 0] = 5.0
    log_probs, tokens = top_log_probs(logits, 6)
    exact = logits.double().log_softmax(dim=-1).gather(-1, tokens)
    torch.testing.assert_close(log_probs.double(), exact, atol=2e-5, rtol=1e-6)


def test_of_equal_entries_the_first_come_first() -> None:
    scores = torch.zeros(2, 3000)
    scores[1, [7, 300, 2999]] = 1.0
    values, columns = top_columns(scores, 5)
    assert columns.tolist() == [[0, 1, 2, 3, 4], [7, 300, 2999, 0, 1]]
    assert values[1].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]


@pytest.mark.usefixtures("way")
def test_rows_with_something_that_is_no_number_have_no_probabilities() -> None:
    logits = torch.randn(3, 2000, generator=torch.Generator().manual_seed(5))
    logits[0, 0] = logits[1, 1500] = torch.nan
    log_probs, tokens = top_log_probs(logits, 4)
    assert log_probs[:2].isnan().all()
    assert log_probs[2].isfinite().all()
    assert tokens.min() >= 0
    assert tokens.max() < 2000


@pytest.mark.parametrize("count", [255, 256, 257, 1000])
def test_as_many_as_there_are_chunks_and_more(count: int) -> None:
    scores = torch.randn(2, 3000, generator=torch.Generator().manual_seed(4))
    values, columns = top_columns(scores, count)
    expected = scores.topk(count, dim=-1)
    assert torch.equal(values, expected.values)
    assert torch.equal(columns, expected.indices)


@pytest.mark.usefixtures("way")
def test_what_is_no_number_names_tokens_all_the_same() -> None:
    _, columns = top_columns(torch.full((2, 2000), torch.nan), 4)
    assert columns.min() >= 0
    assert columns.max() < 2000
