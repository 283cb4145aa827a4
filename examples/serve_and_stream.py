# SPDX-License-Identifier: Apache-2.0
"""Stream from a running server with the ``openai`` client and name the text to copy from.

Start the server in another terminal:
    vllm-spec serve HuggingFaceTB/SmolLM2-135M-Instruct --method input_copy -- --enforce-eager
then: python examples/serve_and_stream.py [http://localhost:8000/v1]
"""

import sys
import time

from openai import OpenAI

LETTER = (
    "Dear Ms. Alvarez, thank you for your order of 24 oak chairs. We will deliver them on Monday, "
    "March 3, between 9 a.m. and noon."
)


def main() -> None:
    """Ask for a small change of a letter and print the answer as it comes."""
    base_url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1"
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    begin = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"Repeat this letter word for word: {LETTER}"}],
        temperature=0.0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"vllm_xargs": {"spec_ext.source_text": LETTER}},
    )
    num_chunks, num_tokens = 0, 0
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            num_chunks += 1  # all tokens of one step arrive together
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
    print(f"\n{num_tokens} tokens in {num_chunks} chunks, {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
