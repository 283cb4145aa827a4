# SPDX-License-Identifier: Apache-2.0
"""What a draft pays off: how often drafts of a kind are accepted, learned while serving."""
