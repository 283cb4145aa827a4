# SPDX-License-Identifier: Apache-2.0
"""Calls of the target's embeddings and projection without its LoRA adapters.

With adapters the engine puts layers over both (vLLM 0.32 ``VocabParallelEmbeddingWithLoRA``,
``LogitsProcessorWithLoRA``) that expect the rows of its current step; a drafter asks for others.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

_OVER = ("Embedding", "LogitsProcessor")


def without_adapters(target: Any, name: str) -> Callable[..., Any] | None:
    """A method of the target as if no adapter were loaded; None if it has no such method."""
    method = getattr(target, name, None)
    if method is None or not hasattr(target, "modules"):
        return method

    @cache  # by the first call the engine has wrapped what it will wrap; a walk takes half a ms
    def wrapped_layers() -> list[Any]:
        return [
            layer
            for layer in target.modules()
            if any(kind in type(layer).__name__ for kind in _OVER) and hasattr(layer, "base_layer")
        ]

    def plain(*args: Any, **kwargs: Any) -> Any:
        wrapped = wrapped_layers()
        for layer in wrapped:
            layer.forward = layer.base_layer.forward
        try:
            return method(*args, **kwargs)
        finally:
            for layer in wrapped:
                del layer.forward

    return plain
