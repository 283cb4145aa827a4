# SPDX-License-Identifier: Apache-2.0
"""Deploy serve_config.yaml on Ray and hold a conversation with it.

Usage: python examples/ray_serve.py [MODEL], on a running cluster (`serve shutdown` ends the app)

All turns carry the same `x-session-id`, so one replica hears them all: it has the conversation in
its prefix cache, and what a method has learned of it. `cache_salt` is a secret of the user, whose
answers alone may draft this user's next ones.
"""

import sys
from pathlib import Path

import yaml
from openai import OpenAI
from ray import serve
from ray.serve.llm import build_openai_app

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


if __name__ == "__main__":
    config = yaml.safe_load((Path(__file__).parent / "serve_config.yaml").read_text())
    (app,) = config["applications"]
    if len(sys.argv) > 1:
        app["args"]["llm_configs"][0]["model_loading_config"]["model_source"] = sys.argv[1]
    serve.start(http_options=config["http_options"])
    serve.run(build_openai_app(app["args"]), name=app["name"])
    talk = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
    history: list[dict[str, str]] = []
    for turn in TURNS:
        history.append({"role": "user", "content": turn})
        history.append({"role": "assistant", "content": ask(talk, history)})
        print(f"\n[{len(history[-1]['content'])} characters]")
