# SPDX-License-Identifier: Apache-2.0
"""What the draft models of a method are called in pictures and metrics."""

from collections.abc import Sequence
from pathlib import PurePosixPath

from vllm_spec_ext.proposers.models import ModelSpec


def specs(models: Sequence[tuple[str, str | None]]) -> list[ModelSpec]:
    """Name models by the last part of their folder or Hub name.

    Args:
        models: Folder or Hub name, and quantization, of each.

    Returns:
        In the same order; of two with one name the second one is called ``name-2``.
    """
    found: list[ModelSpec] = []
    seen: dict[str, int] = {}
    for model, quantization in models:
        name = PurePosixPath(model).name or model
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            name = f"{name}-{seen[name]}"
        found.append(ModelSpec(name, model, quantization=quantization))
    return found
