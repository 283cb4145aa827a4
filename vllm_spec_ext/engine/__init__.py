# SPDX-License-Identifier: Apache-2.0
"""The adapter between vLLM's V1 engine and the proposers; the only importer of vLLM."""
