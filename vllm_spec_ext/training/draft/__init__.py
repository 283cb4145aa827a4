# SPDX-License-Identifier: Apache-2.0
"""Training of small draft models, cut from the target (Yan et al. 2024; SpecInfer's boosting)."""
