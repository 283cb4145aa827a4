# SPDX-License-Identifier: Apache-2.0
"""Counters, metrics and the record of steps."""
