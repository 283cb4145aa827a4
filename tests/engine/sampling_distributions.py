# SPDX-License-Identifier: Apache-2.0
"""What sampling tests compare: distributions over a few tokens, and samples of them."""

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch
from generation import sampling_params

PROMPT = "The quick brown fox jumps over the lazy dog, and"
NUM_SAMPLES = 600
MANY_SAMPLES = 2400
NUM_TOKENS = 3  # whose joint distribution is compared ...
MAX_TOKENS = 7  # ... out of so many, because a draft holds no more nodes than tokens are left
SAME, DIFFERENT = 1e-3, 1e-6

# Few outcomes each, so that the joint distribution has few cells.
DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "temperature_1": {"temperature": 1.0, "num_allowed": 4},
    "temperature_0.7": {"temperature": 0.7, "num_allowed": 4},
    "top_k": {"temperature": 1.0, "num_allowed": 6, "top_k": 3},
    "top_p": {"temperature": 0.8, "num_allowed": 6, "top_p": 0.7},
}

Sample = Callable[..., list[Hashable]]  # engine, distribution, ... -> first tokens of each output


class Chances:
    """What the target is likely to say, asked of the plain engine."""

    def __init__(self, engine: Any) -> None:
        params = sampling_params({"max_tokens": 1, "logprobs": 20})
        (out,) = engine.generate([PROMPT], params, use_tqdm=False)
        ranked = sorted(out.outputs[0].logprobs[0].items(), key=lambda item: item[1].rank)
        self.tokens = [token for token, _ in ranked if token]

    def params(self, distribution: str) -> dict[str, Any]:
        given = dict(DISTRIBUTIONS[distribution])
        num_allowed = given.pop("num_allowed", None)
        if num_allowed:
            # Not the best ones alone: unlikely outcomes must be seen too.
            given["allowed_token_ids"] = sorted(self.tokens[: 2 * num_allowed : 2])
        return {"max_tokens": MAX_TOKENS, "ignore_eos": True, **given}


def first_tokens(
    engine: Any, params: Sequence[Any], seed: int = 0, prompt: Any = PROMPT
) -> list[Hashable]:
    """The first tokens of one output for each of these parameters; seeded requests keep theirs."""
    torch.manual_seed(seed)
    outputs = engine.generate([prompt] * len(params), list(params), use_tqdm=False)
    return [tuple(out.outputs[0].token_ids[:NUM_TOKENS]) for out in outputs]


def samples_of(
    make_engine: Callable[..., Any],
    sampling: dict[str, Any],
    speculative_config: dict[str, Any] | None = None,
    prompt: Any = PROMPT,
    **sizes: Any,
) -> list[Hashable]:
    """Many samples of the first tokens, 64 requests at a time.

    Args:
        make_engine: The fixture.
        sampling: Parameters of sampling.
        speculative_config: Of the engine; None = it decodes plainly, and only these tokens.
        prompt: Of all requests.
        **sizes: Of the engine.
    """
    engine: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 512, **sizes}
    if speculative_config is not None:
        engine["speculative_config"] = speculative_config
    num_tokens = NUM_TOKENS if speculative_config is None else MAX_TOKENS
    params = sampling_params({**sampling, "max_tokens": num_tokens})
    return first_tokens(make_engine(**engine), [params] * MANY_SAMPLES, prompt=prompt)


def of_plain_engine(sample: Sample) -> Callable[[str], list[Hashable]]:
    """Samples of a distribution from the engine called plain, drawn once."""
    return cache(lambda distribution: sample("plain", distribution))
