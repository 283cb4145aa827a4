# SPDX-License-Identifier: Apache-2.0
"""What the draft models of a method are called in pictures and metrics."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from vllm_spec_ext.proposers.models import ModelSpec


def named(models: Sequence[ModelSpec]) -> list[ModelSpec]:
    """Name models by the last part of their folder or Hub name.

    Args:
        models: Without names.

    Returns:
        In the same order; of two with one name the second one is called ``name-2``.
    """
    found: list[ModelSpec] = []
    seen: dict[str, int] = {}
    for spec in models:
        name = PurePosixPath(spec.model).name or spec.model
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            name = f"{name}-{seen[name]}"
        found.append(replace(spec, name=name))
    return found
