# SPDX-License-Identifier: Apache-2.0
"""A block of masks over the target's hidden states drafts several tokens at once (GAD, DFlash)."""
