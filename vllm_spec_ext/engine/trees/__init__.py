# SPDX-License-Identifier: Apache-2.0
"""Draft trees in vLLM's paged attention."""
