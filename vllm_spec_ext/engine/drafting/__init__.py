# SPDX-License-Identifier: Apache-2.0
"""Asking the proposer: how much, on which rank, and what may go wrong."""
