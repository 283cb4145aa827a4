# SPDX-License-Identifier: Apache-2.0
"""Deploy serve_config.yaml on Ray and hold a conversation with it.

Usage: python examples/ray_serve.py, on a running cluster (`serve shutdown` ends the app)

All turns carry one `x-session-id`: one replica hears them all, and has them in its prefix cache.
`cache_salt` is a secret of the user, whose answers alone may draft the next ones.
"""

import subprocess
import time
from pathlib import Path

from openai import OpenAI
from ray import serve

LETTER = "Dear Ms. Alvarez, thank you for your order of 24 oak chairs. We deliver on March 3."
TURNS = [f"Repeat this letter word for word: {LETTER}", "Once more, please."]


def ask(client: OpenAI, messages: list) -> str:
    """Stream one answer and print it as it comes."""
    answer = ""
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=messages,
        temperature=0.0,
        max_tokens=48,
        stream=True,
        extra_headers={"x-session-id": "alvarez-7"},
        extra_body={
            "cache_salt": "kZ3vT1x8mQ0aYw5r",
            "vllm_xargs": {"spec_ext.source_text": LETTER},
        },
    )
    for chunk in stream:
        text = chunk.choices[0].delta.content or "" if chunk.choices else ""
        print(text, end="", flush=True)
        answer += text
    return answer


def deploy() -> None:
    """Start the replicas, and wait until they are up."""
    config = str(Path(__file__).parent / "serve_config.yaml")
    subprocess.run(["serve", "run", "--non-blocking", config], check=True)
    while (state := serve.status().applications["llm"].status) == "DEPLOYING":
        time.sleep(1)
    assert state == "RUNNING", f"the app is {state}; `serve status` says why"


if __name__ == "__main__":
    talk = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
    deploy()
    history: list[dict[str, str]] = []
    for turn in TURNS:
        history.append({"role": "user", "content": turn})
        history.append({"role": "assistant", "content": ask(talk, history)})
        print(f"\n[{len(history[-1]['content'])} characters]")
