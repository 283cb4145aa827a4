# SPDX-License-Identifier: Apache-2.0
"""Trained drafters for the demo model, part of this package.

``python -m vllm_spec_ext.cli.demo_drafters`` prints their folders. How they were made:
docs/blockwise.md and docs/nar.md.
"""

from pathlib import Path

MODEL = "SmolLM2-135M-Instruct"


def demo_heads() -> Path:
    """Folder of heads for the demo model, to give as ``model`` of the method blockwise."""
    return Path(__file__).parent / "heads" / MODEL


def demo_block_drafter() -> Path:
    """Folder of a block drafter for it, to give as ``model`` of the method nar."""
    return Path(__file__).parent / "block_drafters" / MODEL


if __name__ == "__main__":
    print(demo_heads(), demo_block_drafter(), sep="\n")
