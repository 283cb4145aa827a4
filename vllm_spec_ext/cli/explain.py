# SPDX-License-Identifier: Apache-2.0
"""``vllm-spec explain METHOD``: options from the schema, and commands ready to paste."""

import json
import textwrap
from typing import Annotated

import typer
from rich.console import Console

from vllm_spec_ext.cli.option_docs import option_docs
from vllm_spec_ext.options import Options
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import ProposerInfo

EXAMPLE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
EXAMPLE_TOKENS = 8  # for methods without a default


def explain(
    method: Annotated[str, typer.Argument(help="A method, see `vllm-spec list`.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the JSON schema of all options.")
    ] = False,
) -> None:
    """Show a method's options with types, bounds and defaults, and how to use it."""
    found = registry.info(method)
    if as_json:
        print(json.dumps(schema_of(found), indent=2))
    else:
        _show(found)


def schema_of(found: ProposerInfo) -> dict[str, object]:
    """What is known about a method, for programs."""
    return {
        "method": found.name,
        "summary": found.summary,
        "lossless": found.lossless,
        "needs_checkpoint": found.needs_checkpoint,
        "tree": found.tree,
        "off_on_cpus": found.off_on_cpus or None,
        "num_speculative_tokens": found.num_speculative_tokens,
        "options": found.options.model_json_schema(),
        "request_options": found.request_options.model_json_schema(),
    }


def example_config(found: ProposerInfo) -> dict[str, object]:
    """The shortest ``speculative_config`` that works; required options appear as ``"..."``."""
    needed: dict[str, object] = {
        name: "..." for name, field in found.options.model_fields.items() if field.is_required()
    }
    if found.num_speculative_tokens is None:
        needed["num_speculative_tokens"] = EXAMPLE_TOKENS
    return {"method": found.name, **needed}


def _show(found: ProposerInfo) -> None:
    # Soft wrapping: what is meant to be pasted must not be broken into lines by the terminal.
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"{found.name}: {found.summary}\n")
    traits = [
        "lossless: the text is the target's own"
        if found.lossless
        else "not lossless: the text may differ from the target's own",
        "needs a trained checkpoint" if found.needs_checkpoint else "needs no training",
        "drafts trees" if found.tree else "drafts chains",
    ]
    console.print("; ".join(traits))
    if found.best_for:
        console.print(f"best for: {found.best_for}")
    if found.cost:
        console.print(f"cost: {found.cost}")
    if found.off_on_cpus:
        console.print(f"on CPUs: {found.off_on_cpus}")
    default = found.num_speculative_tokens
    console.print(
        f"num_speculative_tokens: {'required' if default is None else f'default {default}'}\n"
    )
    _print_options(console, "Options (in the JSON of --speculative-config)", found.options)
    _print_options(console, "Per request (extra_args / vllm_xargs)", found.request_options)
    _print_usage(console, found)


def _print_options(console: Console, title: str, schema: type[Options]) -> None:
    docs = option_docs(schema)
    console.print(f"{title}:{'' if docs else ' none'}")
    for doc in docs:
        default = doc.default if doc.default == "required" else f"default {doc.default}"
        console.print(f"  {doc.name}: {doc.type}; {default}")
        for line in textwrap.wrap(doc.text, max(40, min(console.width, 100) - 6)):
            console.print(f"      {line}")
    console.print()


def _print_usage(console: Console, found: ProposerInfo) -> None:
    config = example_config(found)
    console.print("Serve:")
    console.print(f"  vllm serve {EXAMPLE_MODEL} --speculative-config '{json.dumps(config)}'\n")
    console.print("One request over HTTP (per-request options in vllm_xargs):")
    body = {
        "model": EXAMPLE_MODEL,
        "messages": [{"role": "user", "content": "Hello"}],
        "vllm_xargs": {"spec_ext.max_draft_tokens": 4},
    }
    console.print("  curl http://localhost:8000/v1/chat/completions \\")
    console.print("    -H 'Content-Type: application/json' \\")
    console.print(f"    -d '{json.dumps(body)}'\n")
    console.print("Offline:")
    for line in _snippet(config).splitlines():
        console.print(f"  {line}")


def _snippet(config: dict[str, object]) -> str:
    return f"""from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        {json.dumps(EXAMPLE_MODEL)},
        speculative_config={_python_literal(config)},
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=64, extra_args={{"spec_ext": {{"max_draft_tokens": 4}}}}
    )
    messages = [{{"role": "user", "content": "Hello"}}]
    print(llm.chat(messages, params)[0].outputs[0].text)"""


def _python_literal(config: dict[str, object]) -> str:
    """With double quotes, as in the JSON beside it."""
    return "{" + ", ".join(f'"{key}": {_value(value)}' for key, value in config.items()) + "}"


def _value(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)
