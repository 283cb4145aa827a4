# SPDX-License-Identifier: Apache-2.0
"""Raw prompts with ``LLM.generate``: the draft is copied from the prompt.

Usage: python examples/offline_generate.py [MODEL]
"""

import sys

from vllm import LLM, SamplingParams

from vllm_spec_ext.cli.demo_model import ensure_demo_model

LETTER = (
    "Dear Ms. Alvarez, thank you for your order of 24 oak chairs. We will deliver them on Monday, "
    "March 3, between 9 a.m. and noon. Please have the hall cleared."
)


def main() -> None:
    """Let the model copy a letter, and say how much of it was drafted."""
    llm = LLM(
        sys.argv[1] if len(sys.argv) > 1 else str(ensure_demo_model()),
        max_model_len=1024,
        enforce_eager=True,  # compiling takes minutes on a CPU and gains little there
        disable_log_stats=False,  # keep the counters that are read below
        speculative_config={"method": "input_copy"},
    )
    prompt = f"Copy this letter.\n\n{LETTER}\n\nCopy:\n\nDear"
    params = SamplingParams(temperature=0.0, max_tokens=48)
    answer = llm.generate(prompt, params)[0].outputs[0]
    print(answer.text)

    counters = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    accepted = counters["vllm:spec_decode_num_accepted_tokens"]
    drafted = counters["vllm:spec_decode_num_draft_tokens"]
    print(f"{len(answer.token_ids)} tokens; {accepted} of {drafted} drafted tokens were accepted")


if __name__ == "__main__":
    main()
