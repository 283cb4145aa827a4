# SPDX-License-Identifier: Apache-2.0
"""Training of blockwise heads (Stern et al. 2018)."""
