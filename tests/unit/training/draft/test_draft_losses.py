# SPDX-License-Identifier: Apache-2.0
"""Losses of a draft: against torch's own, and chunk by chunk as in one."""

import torch
from torch.nn import functional

from vllm_spec_ext.training.chunked_loss import backward_chunks
from vllm_spec_ext.training.draft.losses import answer_loss, forward_kl


def logits(seed: int, width: int = 40) -> torch.Tensor:
    return torch.randn(6, width, generator=torch.Generator().manual_seed(seed)) * 2


def test_forward_kl_is_torchs() -> None:
    mine, theirs = logits(0), logits(1)
    expected = functional.kl_div(
        mine.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    assert torch.allclose(forward_kl(mine, theirs), expected, atol=1e-5)
    assert torch.allclose(forward_kl(theirs, theirs), torch.zeros(6), atol=1e-5)


def test_top_tokens_and_the_rest() -> None:
    mine, theirs = logits(0), logits(1)
    p, q = theirs.softmax(-1), mine.softmax(-1)
    expected = torch.zeros(6)
    for row in range(6):
        best = p[row].topk(5).indices
        expected[row] = (p[row, best] * (p[row, best] / q[row, best]).log()).sum()
        rest_p, rest_q = 1 - p[row, best].sum(), 1 - q[row, best].sum()
        expected[row] += rest_p * (rest_p / rest_q).log()
    assert torch.allclose(forward_kl(mine, theirs, top=5), expected, atol=1e-4)
    assert bool((forward_kl(mine, theirs, top=5) < forward_kl(mine, theirs) + 1e-5).all())
    assert torch.allclose(forward_kl(mine, theirs, top=39), forward_kl(mine, theirs), atol=1e-3)


def test_tokens_that_the_draft_lacks() -> None:
    """Their share of the target's distribution asks nothing of the draft."""
    mine, theirs = logits(0, 30).requires_grad_(), logits(1)
    p, q = theirs.softmax(-1)[:, :30], mine.softmax(-1)
    for top in (0, 8):
        mine.grad = None
        forward_kl(mine, theirs, top).sum().backward()
        assert mine.grad is not None
        assert torch.isfinite(mine.grad).all()
        if not top:  # the gradient of a cross-entropy whose weights sum to the share kept
            assert torch.allclose(mine.grad, p.sum(-1, keepdim=True) * q - p, atol=1e-5)
    tokens = torch.tensor([0, 29, 30, 39, 5, 31])
    found = answer_loss(mine, tokens)
    assert found[[2, 3, 5]].tolist() == [0.0, 0.0, 0.0]
    expected = functional.cross_entropy(mine[[0, 1, 4]], tokens[[0, 1, 4]], reduction="none")
    assert torch.allclose(found[[0, 1, 4]], expected)


def test_chunks_give_the_gradient_of_the_whole() -> None:
    torch.manual_seed(0)
    layer, head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 40, bias=False)
    inputs, theirs, weights = torch.randn(6, 8), logits(1), torch.rand(6)
    (forward_kl(head(layer(inputs)), theirs) * weights).sum().div(3.0).backward()
    expected = [p.grad.clone() for p in (layer.weight, head.weight) if p.grad is not None]
    for chunk in (1, 4, 100):
        layer.zero_grad()
        head.zero_grad()

        def loss_of(piece: torch.Tensor, place: slice) -> tuple[torch.Tensor, torch.Tensor]:
            found = head(piece)
            right = (found.argmax(-1) == theirs[place].argmax(-1)).sum()
            return (forward_kl(found, theirs[place]) * weights[place]).sum(), right

        total, correct = backward_chunks(layer(inputs), loss_of, chunk, 1 / 3.0)
        assert layer.weight.grad is not None
        assert head.weight.grad is not None
        assert torch.allclose(layer.weight.grad, expected[0], atol=1e-6)
        assert torch.allclose(head.weight.grad, expected[1], atol=1e-6)
        whole = head(layer(inputs))
        assert torch.allclose(total, (forward_kl(whole, theirs) * weights).sum(), atol=1e-4)
        assert int(correct) == int((whole.argmax(-1) == theirs.argmax(-1)).sum())
