# SPDX-License-Identifier: Apache-2.0
"""Tests on vLLM's V2 model runner; run in a pytest process of their own."""
