# SPDX-License-Identifier: Apache-2.0
"""Speculative-decoding methods for vLLM, as a plugin.

Importing this package loads neither torch nor vLLM; vLLM finds it through the entry point
``vllm.general_plugins`` (see :mod:`vllm_spec_ext.plugin`).
"""

__version__ = "0.1.0"
