# SPDX-License-Identifier: Apache-2.0
"""TriForce with ``LLM.chat``: a small model drafts for the target over a part of its KV cache.

Usage: python examples/triforce_offline.py [MODEL [DRAFT]]

Without a draft model the target drafts for itself over its last tokens. The numbers are for a short
log; leave the view out for the preset's own, 4,096 tokens in sight, which is for contexts far
longer than that on a GPU.
"""

import sys

from vllm import LLM, SamplingParams

from vllm_spec_ext.cli.demo_model import ensure_demo_model

PORTS = ("Lisbon", "Tunis", "Genoa", "Cadiz", "Malta")
LOG = [f"Day {day}: sailed for {PORTS[day % 5]} with {day * 37 % 91} crates." for day in range(60)]
LOG[20] = "Day 20: the secret number of the ship is 48213."


def main() -> None:
    """Ask for a number in a log, and say how much of the answer was drafted."""
    model = sys.argv[1] if len(sys.argv) > 1 else str(ensure_demo_model())
    llm = LLM(
        model,
        dtype="float32",  # bfloat16 keys cannot be read where the processor has AMX
        max_model_len=2048,
        max_num_seqs=4,
        block_size=32,  # pages of 32 tokens; vLLM's blocks have 128 on CPUs
        enforce_eager=True,  # compiling takes minutes on a CPU and gains little there
        disable_log_stats=False,  # keep the counters that are read below
        speculative_config={
            "method": "cascade",
            "preset": "triforce",
            "levels": [
                {"model": sys.argv[2] if len(sys.argv) > 2 else model},
                {"view": "retrieval", "budget": 256, "recent": 64},
            ],
            "draft_on_cpu": True,  # a view saves no time on a CPU; this shows what it does
            "adaptive_length": False,  # draft even if it does not pay
        },
    )
    log = " ".join(LOG)
    question = {"role": "user", "content": f"{log}\n\nWhat is the secret number of the ship?"}
    params = SamplingParams(temperature=0.0, max_tokens=32)
    answer = llm.chat([question], params)[0].outputs[0]
    print(answer.text)

    counters = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    accepted = counters["vllm:spec_decode_num_accepted_tokens"]
    drafted = counters["vllm:spec_decode_num_draft_tokens"]
    print(f"{len(answer.token_ids)} tokens; {accepted} of {drafted} drafted tokens were accepted")


if __name__ == "__main__":
    main()
