# SPDX-License-Identifier: Apache-2.0
"""What followed when the end of a text occurred in it before: a hint for trained heads.

Much of what a model writes repeats its prompt or itself. A head that is shown the earlier
continuation learns when to trust it, which neither the hidden state nor a fixed rule can tell.
"""

from typing import NamedTuple

import numpy as np

from vllm_spec_ext.proposers.base import IntArray
from vllm_spec_ext.proposers.text_index.occurrence_index import OccurrenceIndex


class Copied(NamedTuple):
    """The continuation of an earlier occurrence."""

    tokens: IntArray  # [count] int32; zeros where nothing was found
    length: int  # tokens at the end of the text that agree with that place; 0 = none


def copied_tokens(index: OccurrenceIndex, longest: int, count: int) -> Copied:
    """The ``count`` tokens behind the latest place that agrees best with the end of the text.

    A place closer to the end than ``count`` is continued with its own continuation, as in LZ77
    (Ziv and Lempel 1977): a text that repeats with a period is foreseen to go on with it.

    Args:
        index: All tokens of the text.
        longest: Most tokens that are compared.
        count: Tokens wanted.
    """
    text = index.tokens
    match = index.longest(text[-longest:], longest, own=True)
    if not match.length:
        return Copied(np.zeros(count, np.int32), 0)
    period = len(text) - match.latest
    return Copied(text[match.latest + np.arange(count) % period], match.length)
