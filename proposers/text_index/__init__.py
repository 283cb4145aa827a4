# SPDX-License-Identifier: Apache-2.0
"""An index of text: where a sequence of tokens occurred before, and what followed."""
