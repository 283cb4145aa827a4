# SPDX-License-Identifier: Apache-2.0
"""Prompts and outputs for drafters that look texts up."""

from hypothesis import strategies as st


@st.composite
def texts_that_copy(
    draw: st.DrawFn, tokens: st.SearchStrategy[int], most_pieces: int, most_new: int
) -> tuple[list[int], list[list[int]]]:
    """Outputs that copy pieces of the prompt, change some tokens, and repeat themselves.

    Args:
        draw: Hypothesis's.
        tokens: Token ids.
        most_pieces: Of an output.
        most_new: Tokens that a step gives.

    Returns:
        The prompt, and the tokens of each step.
    """
    prompt = draw(st.lists(tokens, min_size=1, max_size=24))
    output: list[int] = []
    for _ in range(draw(st.integers(1, most_pieces))):
        source = draw(st.sampled_from([prompt, output, []])) or [draw(tokens)]
        begin = draw(st.integers(0, len(source) - 1))
        output += source[begin : begin + draw(st.integers(1, 6))]
        output += draw(st.lists(tokens, max_size=2))
    steps = []
    while output:
        size = draw(st.integers(1, most_new))
        steps.append(output[:size])
        output = output[size:]
    return prompt, steps
