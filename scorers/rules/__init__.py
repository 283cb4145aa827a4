# SPDX-License-Identifier: Apache-2.0
"""Acceptance rules, one a module: which draft tokens may stand."""
