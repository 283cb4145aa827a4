# SPDX-License-Identifier: Apache-2.0
"""Drawing draft tokens from a model's distribution, reproducibly."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

# Neither vLLM's generators nor a request's seed: the same noise in draft and target would make the
# target agree with what it never drew.
_PURPOSE = b"vllm-spec-ext drafts"


def uniforms(request_id: str, position: int, model: int, size: int) -> NDArray[np.float64]:
    """[size] numbers in [0, 1) that depend on nothing but these arguments; see :func:`noise`.

    Args:
        request_id: Whose draft.
        position: Tokens of the request so far.
        model: Number of the draft model.
        size: How many.
    """
    return noise(request_id, position, model).random(size)


def noise(request_id: str, position: int, model: int) -> np.random.Generator:
    """Numbers that depend on nothing but these arguments.

    Independent for each request, so two requests of the same text draw different drafts; and for
    each position, so a draft does not depend on what was drafted before.

    Args:
        request_id: Whose draft.
        position: Tokens of the request so far.
        model: Number of the draft model; below 0 for draws that are not one model's.
    """
    text = f"{position} {model} {request_id}".encode()
    key = hashlib.blake2b(text, digest_size=16, person=_PURPOSE[:16]).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key)))


def distributions(
    logits: torch.Tensor,  # [n, vocab] float32
    temperatures: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
) -> torch.Tensor:
    """[n, vocab] float32: what a request's sampling makes of a model's logits.

    Temperature, then top-k, then top-p, as in vLLM's sampler. Any distribution would be right here;
    the request's own filters make it more like the target's.

    Args:
        logits: One row for each distribution.
        temperatures: [n], above 0.
        top_k: [n] tokens to keep, 0 or less = all.
        top_p: [n] probability to keep, 1 = all.
    """
    device = logits.device
    scaled = logits.float() / torch.tensor(temperatures, device=device)[:, None]
    if any(k > 0 for k in top_k) or any(p < 1.0 for p in top_p):
        ordered, tokens = scaled.sort(dim=-1, descending=True)
        size = ordered.shape[-1]
        kept = torch.tensor([k if 0 < k < size else size for k in top_k], device=device)
        ordered.masked_fill_(torch.arange(size, device=device) >= kept[:, None], -torch.inf)
        probs = ordered.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs  # the likeliest token always stays
        limits = torch.tensor([p if p > 0.0 else 0.0 for p in top_p], device=device)[:, None]
        ordered.masked_fill_((before >= limits) & (limits < 1.0) & (before > 0.0), -torch.inf)
        scaled = torch.full_like(scaled, -torch.inf).scatter_(1, tokens, ordered)
    return scaled.softmax(dim=-1)


def draw(
    probs: torch.Tensor,  # [n, vocab] float32
    numbers: NDArray[np.float64],  # [n, m] in [0, 1)
) -> NDArray[np.int32]:
    """[n, m] int32: independent draws, by inverting the distribution at these numbers.

    A token of probability 0 is never drawn: the running sum does not rise there.
    """
    sums = probs.double().cumsum(dim=-1)
    wanted = torch.from_numpy(numbers).to(probs.device) * sums[:, -1:]
    found = torch.searchsorted(sums, wanted, right=True)
    # Rounding of the product may reach the whole sum: then the last token with a probability.
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())
    return torch.minimum(found, last).to("cpu", torch.int32).numpy()
