# SPDX-License-Identifier: Apache-2.0
"""Request batches that exercise what a real server sees, each with its sampling parameters."""

from dataclasses import dataclass
from typing import Any

SYSTEM = "You answer briefly. The quick brown fox jumps over the lazy dog. " * 3

PROMPTS = [
    "The quick brown fox",
    "Speculative decoding drafts several tokens and verifies them",
    SYSTEM + "What does the dog mind?",
    SYSTEM + "A request may finish early, be aborted, or be preempted.",
    "Repeat: " + "one two three four five six seven eight nine ten " * 4,
    "true false null",
    SYSTEM + "Write the list again: [1, 2, 3]",
    "A",
]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "value": {"type": "boolean"}},
    "required": ["name", "value"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Scenario:
    """A batch: prompt `i` runs with `params[i % len(params)]`."""

    params: list[dict[str, Any]]
    prompts: list[Any]


PAGES = [[(7 * i * i + 3 * i + turn) % 500 + 5 for i in range(360)] for turn in (1, 2)]
FULL: Any = [{"prompt_token_ids": PAGES[n % 2][:n]} for n in (96, 121, 130, 139, 149, 153, 158)]
"""Prompts that leave little room in an engine of :data:`tiny_engine.ARGUMENTS`."""

SCENARIOS = {
    "batch_of_one": Scenario([{"max_tokens": 40}], PROMPTS[1:2]),
    "mixed_lengths": Scenario([{"max_tokens": n} for n in (12, 50, 33, 1, 60, 2, 41, 56)], PROMPTS),
    "prefix_reused": Scenario([{"max_tokens": 24}], PROMPTS),
    "penalties": Scenario(
        [
            {"max_tokens": 30, "presence_penalty": 1.0, "frequency_penalty": 0.5},
            {"max_tokens": 30, "repetition_penalty": 1.3},
            {"max_tokens": 30},
        ],
        PROMPTS,
    ),
    "logprobs": Scenario([{"max_tokens": 20, "logprobs": 3}, {"max_tokens": 20}], PROMPTS),
    "allowed_tokens": Scenario(
        [{"max_tokens": 30, "allowed_token_ids": list(range(40, 80))}, {"max_tokens": 30}], PROMPTS
    ),
    # Few tokens to choose from: the text repeats itself, so that copies and n-grams are right.
    "few_tokens": Scenario(
        [{"max_tokens": 40, "allowed_token_ids": [40, 42, 44], "ignore_eos": True}], PROMPTS
    ),
    # Long prompts, so that the limit comes soon.
    "max_model_len": Scenario([{"max_tokens": 500, "ignore_eos": True}, {"max_tokens": 30}], FULL),
    "json_schema": Scenario(
        [{"max_tokens": 40, "structured_outputs": {"json": SCHEMA}}, {"max_tokens": 30}], PROMPTS
    ),
    "regex": Scenario(
        [{"max_tokens": 40, "structured_outputs": {"regex": "(ab|cd){3,9}[0-9]+x"}}], PROMPTS[:3]
    ),
    # Short prompts: on CPUs plain vLLM fails on a seeded request whose prefill is chunked.
    "seeded": Scenario(
        [
            {"max_tokens": 30, "temperature": 1.0, "seed": 7},
            {"max_tokens": 30, "temperature": 0.7, "seed": 8, "top_k": 20, "n": 2},
            {"max_tokens": 24},
            {
                "max_tokens": 30,
                "temperature": 1.3,
                "seed": 9,
                "top_p": 0.9,
                "presence_penalty": 0.5,
            },
        ],
        [PROMPTS[i] for i in (0, 1, 5, 7)],
    ),
    "several_samples": Scenario(
        [{"max_tokens": 20, "n": 3, "temperature": 1.0, "top_k": 1}], PROMPTS[:3]
    ),
}

REPETITIVE = Scenario(
    [{"max_tokens": 120, "allowed_token_ids": [40, 42, 44], "ignore_eos": True}],
    [PROMPTS[i] for i in (0, 5, 7)],
)
"""Long answers of three tokens, to short prompts."""

SEVERAL = ("mixed_lengths", "prefix_reused", "penalties", "seeded", "max_model_len")
"""Of these, for variants of a method that has run all of them in another one."""

# Prompts of up to eleven pages beside short ones; some begin alike.
LONG_PROMPTS: Any = [
    {"prompt_token_ids": prompt}
    for prompt in (
        PAGES[0][:300],
        PAGES[1][:200],
        PAGES[0][:333],
        PAGES[1][:9],
        [*PAGES[0][:130], *PAGES[1][:90]],
        PAGES[1][:160],
    )
]
LONG = Scenario(
    [{"max_tokens": n, "ignore_eos": True} for n in (30, 60, 24, 45, 60, 33)], LONG_PROMPTS
)
LONG_SIZES = {"max_model_len": 384, "max_num_seqs": 6}
"""Of an engine that has room for these."""

LONG_PROMPT: Any = {"prompt_token_ids": PAGES[0][:150]}
LONG_PROMPT_SIZES = {"max_num_batched_tokens": 2048, "max_model_len": 192}
"""Of an engine in which many requests have this prompt."""
