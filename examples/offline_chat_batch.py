# SPDX-License-Identifier: Apache-2.0
"""A batch of chats, each with its own options for drafting.

Usage: python examples/offline_chat_batch.py [MODEL]
"""

import sys

from vllm import LLM, SamplingParams

from vllm_spec_ext.cli.demo_model import ensure_demo_model

# Task, and what this request says about its source; {} = copy from the chat.
REQUESTS: list[tuple[str, dict[str, object]]] = [
    ("Correct this sentence: He go to school every days.", {}),
    (
        "Correct the text between the tags. <text>She have two dog.</text> Answer in one line.",
        {"source_markers": ["<text>", "</text>"]},
    ),
    ("Write the first sentence of a letter.", {"source_text": "Dear Sir, thank you for your"}),
    ("What is the capital of France?", {"enabled": False}),
]


def main() -> None:
    """Answer all requests in one batch."""
    llm = LLM(
        sys.argv[1] if len(sys.argv) > 1 else str(ensure_demo_model()),
        max_model_len=1024,
        enforce_eager=True,  # compiling takes minutes on a CPU and gains little there
        disable_log_stats=False,
        speculative_config={"method": "input_copy"},
    )
    chats = [[{"role": "user", "content": task}] for task, _ in REQUESTS]
    params = [
        SamplingParams(temperature=0.0, max_tokens=32, extra_args={"spec_ext": options})
        for _, options in REQUESTS
    ]
    for (task, _), result in zip(REQUESTS, llm.chat(chats, params), strict=True):
        print(f"- {task}\n  {result.outputs[0].text.strip()}")


if __name__ == "__main__":
    main()
