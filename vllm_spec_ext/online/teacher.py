# SPDX-License-Identifier: Apache-2.0
"""What a request's drafts should have said: the distribution that it draws its tokens from.

The rows of a trace are the model's own probabilities. A request without a temperature takes the
likeliest token, and a penalty or a grammar may make it take another one; a draft for it is right
if it says what the text says, however unsure the model was. A drafter that learns the model's
unsure distribution instead spends itself on being as unsure as the model, and is accepted no more.
"""

from dataclasses import replace

import numpy as np

from vllm_spec_ext.online.trace import Trace


def as_drawn(trace: Trace) -> Trace:
    """The same trace with the distributions that its request draws from.

    approximation: top-k, top-p, penalties and grammars of requests with a temperature are left out,
    and the tail, of which only the sum is known, is divided by the temperature as one token.
    """
    if trace.temperature == 1.0 or not len(trace.rows):
        return trace
    if trace.temperature <= 0.0:
        text = trace.token_ids[trace.rows + 1][:, None]
        # The text's token first, then the likeliest others; each token once.
        order = (trace.top_tokens == text).argsort(axis=1, kind="stable")
        others = np.take_along_axis(trace.top_tokens, order, axis=1)[:, :-1]
        tokens = np.concatenate([text, others], axis=1)
        probs = np.zeros_like(trace.top_probs)
        probs[:, 0] = 1.0
        return replace(trace, top_tokens=tokens, top_probs=probs, tails=np.zeros_like(trace.tails))
    whole = np.concatenate([trace.top_probs, trace.tails[:, None]], axis=1).astype(np.float64)
    sharp = np.power(whole, 1.0 / trace.temperature)
    sharp = (sharp / sharp.sum(axis=1, keepdims=True)).astype(np.float32)
    return replace(trace, top_probs=sharp[:, :-1], tails=np.ascontiguousarray(sharp[:, -1]))
