# SPDX-License-Identifier: Apache-2.0
"""The adapter between vLLM's engine and the proposers; the only importer of vLLM."""
