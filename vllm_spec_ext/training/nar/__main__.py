# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_spec_ext.training.nar``: the trainer where typer is not installed."""

import sys

from vllm_spec_ext.training.nar.trainer import main

# Workers that vLLM spawns import this module under another name.
if __name__ == "__main__":
    sys.exit(main())
