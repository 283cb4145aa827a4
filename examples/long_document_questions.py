# SPDX-License-Identifier: Apache-2.0
"""Ask questions about a long document; the target drafts over a part of its KV cache.

Start the server in another terminal, with a model of a long context and a GPU:
    vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 131072 \
        --speculative-config '{"method": "cache_view", "budget": 4096}'
then: python examples/long_document_questions.py report.txt "Who wrote it?" "What do they propose?"

The document stands first in each prompt, so the prefix cache keeps it from question to question.
Set OPENAI_BASE_URL for a server other than http://localhost:8000/v1.
"""

import os
import sys
import time
from pathlib import Path

from openai import OpenAI


def main() -> None:
    """Print each answer as it comes, and how fast it came."""
    if len(sys.argv) < 3:
        sys.exit(f"usage: python {sys.argv[0]} DOCUMENT QUESTION...")
    document = Path(sys.argv[1]).read_text(encoding="utf-8")
    base_url = os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1")
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    for question in sys.argv[2:]:
        print(f"\n{question}")
        stream = client.chat.completions.create(
            model=model,
            messages=[
                {"role": "user", "content": f"{document}\n\nAnswer from this text: {question}"}
            ],
            temperature=0.0,
            max_tokens=128,
            stream=True,
            stream_options={"include_usage": True},
        )
        first, num_tokens = 0.0, 0
        for chunk in stream:
            first = first or time.perf_counter()  # the document has been read
            if chunk.choices and chunk.choices[0].delta.content:
                print(chunk.choices[0].delta.content, end="", flush=True)
            if chunk.usage is not None:
                num_tokens = chunk.usage.completion_tokens
        seconds = max(time.perf_counter() - first, 1e-9)
        print(f"\n[{num_tokens} tokens, {num_tokens / seconds:.0f} a second]")


if __name__ == "__main__":
    main()
