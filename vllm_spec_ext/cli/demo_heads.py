# SPDX-License-Identifier: Apache-2.0
"""Blockwise heads for the demo model, part of this package.

``python -m vllm_spec_ext.cli.demo_heads`` prints the folder. How they were made: docs/blockwise.md.
"""

from pathlib import Path


def demo_heads() -> Path:
    """Folder of heads for SmolLM2-135M-Instruct, to give as ``model`` of the method blockwise."""
    return Path(__file__).parent / "heads" / "SmolLM2-135M-Instruct"


if __name__ == "__main__":
    print(demo_heads())
