# SPDX-License-Identifier: Apache-2.0
"""A draft tree of small models with ``LLM.generate``.

Usage: python examples/token_tree_offline.py [MODEL [DRAFT ...]]

Without a draft model the target drafts for itself: every draft is right, and nothing is gained.
"""

import sys

from vllm import LLM, SamplingParams

from vllm_spec_ext.cli.demo_model import ensure_demo_model


def main() -> None:
    """Answer a question, and say how much of the answer was drafted."""
    model = sys.argv[1] if len(sys.argv) > 1 else str(ensure_demo_model())
    llm = LLM(
        model,
        max_model_len=1024,
        max_num_seqs=8,
        block_size=32,  # branches copy a partly filled block, so small ones are cheaper
        enforce_eager=True,  # compiling takes minutes on a CPU and gains little there
        disable_log_stats=False,  # keep the counters that are read below
        speculative_config={
            "method": "token_tree",
            "models": sys.argv[2:] or [model],
            "num_speculative_tokens": 8,
            "adaptive_length": False,  # draft even if it does not pay, to show it
        },
    )
    params = SamplingParams(temperature=0.0, max_tokens=48)
    chat = [{"role": "user", "content": "Name three rivers of Europe."}]
    answer = llm.chat(chat, params)[0].outputs[0]
    print(answer.text)

    counters = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    accepted = counters["vllm:spec_decode_num_accepted_tokens"]
    drafted = counters["vllm:spec_decode_num_draft_tokens"]
    print(f"{len(answer.token_ids)} tokens; {accepted} of {drafted} drafted tokens were accepted")


if __name__ == "__main__":
    main()
