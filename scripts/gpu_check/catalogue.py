# SPDX-License-Identifier: Apache-2.0
"""The checks, in the order in which they begin: those that explain most failures come first."""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from gpu_check.site import Site
from vllm_spec_ext.errors import UnknownNameError

CheckFunction = Callable[[Site], dict[str, Any]]


@dataclass(frozen=True)
class Check:
    """A check and how it is run."""

    name: str
    function: str  # "module:function" of this package
    proves: str
    runner: Literal["v1", "v2"]
    limit_s: float = 180.0
    engines_inside: bool = True  # in the check's own process, where it can look at them
    alone: bool = False  # nothing else may use the GPU meanwhile

    def load(self) -> CheckFunction:
        """The function; importing it may import torch and vLLM."""
        found: CheckFunction = pkgutil.resolve_name(f"gpu_check.{self.function}")
        return found


CHECKS = (
    Check(
        "identity_tiny_v2",
        "identity:identity_tiny",
        "float32 texts of a tiny model are plain decoding's, V2 runner",
        "v2",
    ),
    Check(
        "identity_tiny_v1",
        "identity:identity_tiny",
        "float32 texts of a tiny model are plain decoding's, V1 runner",
        "v1",
    ),
    Check(
        "identity_async",
        "identity:identity_async",
        "the same with asynchronous scheduling, in as few steps",
        "v2",
    ),
    Check(
        "late_tables",
        "late:late_tables",
        "drafts of `input_copy` looked up on the device, from what the host knew one step before: "
        "as many accepted",
        "v2",
    ),
    Check(
        "late_heads",
        "late:late_heads",
        "drafts of `blockwise` made on the device, from states and tokens that are there: as many "
        "accepted",
        "v2",
    ),
    Check(
        "late_ngram",
        "late:late_ngram",
        "chains of `adaptive_ngram` looked up on the device: as many accepted",
        "v2",
    ),
    Check(
        "late_auto",
        "late:late_auto",
        "drafts of `auto` made on the device: heads, copies and a corpus together",
        "v2",
    ),
    Check(
        "triton_attention",
        "builders:triton_attention",
        "Triton attention verifies trees of more virtual requests than the engine has",
        "v2",
    ),
    Check(
        "flash_attention",
        "builders:flash_attention",
        "FlashAttention verifies trees of more virtual requests than the engine has",
        "v2",
    ),
    Check(
        "piecewise_graphs",
        "graphs:piecewise_graphs",
        "identity under PIECEWISE CUDA graphs, trees among them",
        "v2",
        240.0,
    ),
    Check(
        "full_graphs",
        "graphs:full_graphs",
        "FULL graphs for plain decoding and chains of any lengths, PIECEWISE for trees",
        "v2",
        240.0,
    ),
    Check(
        "flash_attention_graphs",
        "graphs:flash_attention_graphs",
        "FlashAttention verifies drafts under the graphs that it gets",
        "v2",
        240.0,
    ),
    Check(
        "full_graphs_v1",
        "graphs:full_graphs_v1",
        "the same of the V1 runner: no step with a tree gets a FULL graph",
        "v1",
        240.0,
    ),
    Check(
        "gpu_default",
        "default:gpu_default",
        "a method with nothing else given drafts on the device, in full graphs, with drafts and "
        "without, in the memory that vLLM measured",
        "v2",
        240.0,
        alone=True,
    ),
    Check(
        "draft_graphs",
        "draft_passes:draft_graphs",
        "passes of draft models from CUDA graphs draft what they drafted without, and their times",
        "v2",
        240.0,
    ),
    Check(
        "relaxed_rule",
        "relaxed:relaxed_rule",
        "relaxed rules decide on the device as on the host, and run in an engine",
        "v2",
    ),
    Check(
        "bench_alone",
        "alone:bench_alone",
        "the benchmark runs one engine after another, each with all of the GPU's memory",
        "v2",
        240.0,
        engines_inside=False,
        alone=True,
    ),
    Check(
        "identity_small",
        "identity:identity_small",
        "float32 texts of SmolLM2-135M are plain decoding's, with default graphs",
        "v2",
        240.0,
    ),
)


def named(names: list[str]) -> list[Check]:
    """Checks by name, all without one; raises UnknownNameError."""
    known = {check.name: check for check in CHECKS}
    for name in names:
        if name not in known:
            raise UnknownNameError("check", name, list(known))
    return [check for check in CHECKS if not names or check.name in names]
