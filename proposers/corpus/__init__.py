# SPDX-License-Identifier: Apache-2.0
"""N-grams of a corpus: counted once, kept in a file, looked up by their last two tokens."""
