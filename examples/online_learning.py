# SPDX-License-Identifier: Apache-2.0
"""Heads that learn from what they draft for: serve, train a little, serve again.

Usage: python examples/online_learning.py [MODEL [HEADS]]
"""

import sys
import tempfile
from pathlib import Path

from vllm import LLM, SamplingParams

from vllm_spec_ext.cli.demo_drafters import demo_heads
from vllm_spec_ext.cli.demo_model import ensure_demo_model
from vllm_spec_ext.online.trainer import run_trainer

WORDS = ["oak", "river", "bread", "copper", "winter", "paper"]


def main() -> None:
    """Answer questions of one kind, and say what was recorded and published."""
    folder = Path(tempfile.mkdtemp(prefix="online-"))
    llm = LLM(
        sys.argv[1] if len(sys.argv) > 1 else str(ensure_demo_model()),
        max_model_len=512,
        max_num_seqs=8,
        enforce_eager=True,  # compiling takes minutes on a CPU and gains little there
        speculative_config={
            "method": "blockwise",
            "model": sys.argv[2] if len(sys.argv) > 2 else str(demo_heads()),
            "num_speculative_tokens": 4,
            "adaptive_length": False,  # draft even if it does not pay, to show it
            # So many passes because there are so few requests.
            "online": {"folder": str(folder), "others": 1.0, "publish_steps": 4, "passes": 20},
        },
    )
    params = SamplingParams(temperature=0.0, max_tokens=48)
    chats = [[{"role": "user", "content": f"Write a sentence about {word}."}] for word in WORDS]
    answers = llm.chat(chats, params)
    print(answers[0].outputs[0].text)
    llm.collective_rpc("spec_ext_flush")  # else a thread writes samples every ten seconds
    # A server leaves this to `vllm-spec online train FOLDER`, beside it.
    run_trainer(folder, budget=1.0, max_steps=8)
    again = llm.chat(chats, params)  # a new version drafts some of these steps
    same = all(
        a.outputs[0].token_ids == b.outputs[0].token_ids
        for a, b in zip(answers, again, strict=True)
    )
    versions = sorted(path.name for path in (folder / "versions").glob("v*"))
    print(f"versions {', '.join(versions)}; the same text: {same}")


if __name__ == "__main__":
    main()
