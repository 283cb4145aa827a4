# SPDX-License-Identifier: Apache-2.0
"""The parts: plain decoding with vLLM's defaults, vLLM's own look-up, and our methods."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_spec_ext.bench.methods import Method
from vllm_spec_ext.errors import UnknownNameError

SYNC = {"async_scheduling": False}
ASYNC = {"async_scheduling": True}
NGRAM_GPU = {
    "method": "ngram_gpu",
    "num_speculative_tokens": 5,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
FEW = {"num_speculative_tokens": 8}  # all are verified in every step


@dataclass(frozen=True)
class Part:
    """One engine."""

    method: Method  # its name is the part's
    engine_args: dict[str, Any] = field(default_factory=dict)  # beside those of all parts

    @property
    def name(self) -> str:
        """Of the part, and of its row in the table."""
        return self.method.name


PARTS = (
    Part(Method("plain", None)),  # as vLLM comes: asynchronous, with graphs
    Part(Method("plain_sync", None), SYNC),
    Part(Method("ngram_gpu", NGRAM_GPU)),
    Part(Method("input_copy", {"method": "input_copy"})),  # as it comes: asynchronous, too
    Part(Method("input_copy_sync", {"method": "input_copy"}), SYNC),
    Part(Method("auto", {"method": "auto"})),  # likewise
    Part(Method("auto_sync", {"method": "auto"}), SYNC),  # trees
    Part(Method("adaptive_ngram", {"method": "adaptive_ngram", "tree": False})),
    Part(Method("adaptive_ngram_tree", {"method": "adaptive_ngram"})),
    Part(Method("suffix_tree", {"method": "suffix_tree"})),
    Part(Method("suffix_tree_async", {"method": "suffix_tree", **FEW}), ASYNC),
)


def parts_of_heads(folder: str) -> tuple[Part, ...]:
    """Parts of a model that there are heads for.

    Args:
        folder: Of the heads; the Hub's name of one, too.
    """
    heads = {"method": "blockwise", "model": folder}
    return (
        Part(Method("blockwise", heads)),  # as it comes: asynchronous
        Part(Method("blockwise_sync", heads), SYNC),
    )


def chosen(names: Sequence[str], parts: Sequence[Part] = PARTS) -> list[Part]:
    """Parts by name, all without one; plain decoding is always among them.

    Args:
        names: What was asked for.
        parts: There are.

    Raises:
        UnknownNameError: There is no such part.
    """
    known = [part.name for part in parts]
    for name in names:
        if name not in known:
            raise UnknownNameError("part", name, known)
    return [part for part in parts if not names or part.name in ("plain", *names)]
