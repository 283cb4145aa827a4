# SPDX-License-Identifier: Apache-2.0
"""Walks over draft trees: which nodes stand, and what a step emits."""
