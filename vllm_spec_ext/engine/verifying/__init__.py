# SPDX-License-Identifier: Apache-2.0
"""What the target makes of drafts: sampling at every node, rules, walks."""
