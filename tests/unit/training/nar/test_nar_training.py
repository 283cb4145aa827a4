# SPDX-License-Identifier: Apache-2.0
"""Training block drafters end to end on a tiny random Llama, on the CPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.training.nar import trainer
from vllm_spec_ext.training.nar.model import NarDrafter
from vllm_spec_ext.training.nar.nar_task import NarTask
from vllm_spec_ext.training.nar.schema import NarTraining
from vllm_spec_ext.training.nar.trainer import main, train_nar

Settings = Callable[..., NarTraining]


def quiet(line: str) -> None:
    """No progress lines."""


def test_a_drafter_learns(settings: Settings) -> None:
    """The language is determined, so that all slots can be right."""
    config = settings(max_steps=150)
    figures = train_nar(config, quiet)
    assert figures is not None
    assert figures.accuracy[0]["top1"] > 0.9
    assert figures.acceptance_length > 2.5
    assert figures.chain_lengths == sorted(figures.chain_lengths)
    assert figures.chain_lengths[-1] == figures.acceptance_length
    assert figures.tree_acceptance_lengths[0] >= figures.acceptance_length - 1e-6
    assert (config.out / "README.md").read_text().count("| 3 |") == 1
