# SPDX-License-Identifier: Apache-2.0
"""All settings of the drafter: the options, and what only the preset of ADED's code changes."""

from typing import Literal

from pydantic import Field

from vllm_spec_ext.proposers.adaptive_ngram.options import AdaptiveNgramOptions


class NgramSettings(AdaptiveNgramOptions):
    """The options of ``adaptive_ngram`` with the settings that users do not choose."""

    search: Literal["best_first", "mcts"] = "best_first"
    """``best_first`` takes nodes in the order of their path probability; ``mcts`` by visits."""

    iterations: int = Field(default=150, ge=1, le=2000)
    """Iterations of ``mcts``."""

    max_sequences: int = Field(default=0, ge=0, le=256)
    """``mcts`` as published: keep this many most visited sequences, the root's included, and cut
    the longest ones while they hold over 64 tokens; 0 fills the node budget by visits."""

    greedy_extension: bool = False
    """Append to every sequence of ``mcts`` its most probable next token."""

    relearn_window: int = Field(default=0, ge=0, le=1024)
    """Learn the trigrams of this many last tokens anew at every step, as published; 0 learns each
    token exactly once."""

    increment: float = Field(default=1.0, gt=0.0, le=100.0)
    """Weight of one observation."""

    normalise: bool = True
    """Scale each row to a sum of at most 1, so that products of weights are probabilities."""


def settings_of(options: AdaptiveNgramOptions) -> NgramSettings:
    """The options with the other settings of their preset; settings are returned as they are."""
    if isinstance(options, NgramSettings):
        return options
    return NgramSettings.model_validate(options.model_dump())
