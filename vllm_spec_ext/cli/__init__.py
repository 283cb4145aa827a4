# SPDX-License-Identifier: Apache-2.0
"""The command line, `vllm-spec`."""
