# SPDX-License-Identifier: Apache-2.0
"""Do a method's files belong to the target? From what lies on this machine, without an engine."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_spec_ext.errors import SpecExtError, shown
from vllm_spec_ext.parsed_method import ParsedMethod
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import BaseProposer, TargetFacts


class _NotHereError(Exception):
    """A file of the target would have to be downloaded."""


def check_files(model: str, parsed: ParsedMethod, vllm_arguments: Sequence[str] = ()) -> str | None:
    """Run the method's own check of its files, as ``vllm serve`` would before it loads weights.

    Args:
        model: Name or folder of the target; nothing is downloaded.
        parsed: The method and its options.
        vllm_arguments: Other arguments of ``vllm serve``, which may name another tokenizer.

    Returns:
        What was checked or why it could not be; ``None`` for a method that has no files.

    Raises:
        SpecExtError: A file is missing, damaged or of another target.
    """
    method = parsed.info.name
    proposer: type[BaseProposer] = registry.load(method)
    _refuse_missing("the target", model)
    drafts = [spec.model for spec in proposer.models(parsed.options)]
    for draft in drafts:
        _refuse_missing(f"a draft model of {method}", draft)
    line = _checked(model, parsed, proposer, vllm_arguments)
    if not drafts:
        return line
    others = (
        f"not checked: whether {' and '.join(drafts)} can draft for {model}; the engine does that "
        "before it loads weights"
    )
    return others if line is None else f"{line}; {others}"


def _checked(
    model: str,
    parsed: ParsedMethod,
    proposer: type[BaseProposer],
    vllm_arguments: Sequence[str],
) -> str | None:
    method = parsed.info.name
    if proposer.check.__func__ is BaseProposer.check.__func__:  # type: ignore[attr-defined]
        return None
    tokenizer = _value(vllm_arguments, "tokenizer") or model
    without = any(word.replace("_", "-") == "--skip-tokenizer-init" for word in vllm_arguments)
    try:
        config = _read_config(model)
        facts = TargetFacts(
            model=model,
            vocab_size=config["vocab_size"],
            hidden_size=config.get("hidden_size"),
            num_speculative_tokens=parsed.vllm_options["num_speculative_tokens"],
            share_unsalted=bool(parsed.share_unsalted),  # a server's default is false
            load_tokenizer=lambda: None if without else _load_tokenizer(tokenizer),
        )
        proposer.check(parsed.options, facts)
    except _NotHereError as missing:
        return f"not checked: the files of {method} against {model}, as {missing}"
    return f"checked: options and files of {method} against configuration and tokenizer of {model}"


def _refuse_missing(what: str, model: str) -> None:
    """Of what can only be a path."""
    if model.startswith((".", "/", "~")) and not Path(model).expanduser().exists():
        raise SpecExtError(
            f"{what}: no such folder: {shown(model)}; expected a model's folder, or a name on the "
            "Hugging Face Hub"
        )


def _read_config(model: str) -> dict[str, Any]:
    """The target's ``config.json``, of its text model where there are several."""
    file: object = Path(model) / "config.json"
    if not Path(model).is_dir():
        from huggingface_hub import try_to_load_from_cache

        try:
            file = try_to_load_from_cache(model, "config.json")
        except ValueError:  # not a name that a hub could know
            file = None
    if not isinstance(file, str | Path) or not Path(file).is_file():
        raise _NotHereError(f"its config.json is not on this machine (looked for {model})")
    config = json.loads(Path(file).read_text(encoding="utf-8"))
    found: dict[str, Any] = {**config, **config.get("text_config", {})}
    if not isinstance(found.get("vocab_size"), int):
        raise _NotHereError("its config.json names no vocab_size")
    return found


def _load_tokenizer(name: str) -> object:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception as error:  # transformers raises many types for what is not there
        raise _NotHereError(f"the tokenizer {name} cannot be loaded from this machine") from error


def _value(arguments: Sequence[str], name: str) -> str | None:
    """What stands behind ``--name`` or ``--name=``."""
    for word, after in itertools.zip_longest(arguments, arguments[1:]):
        if word == f"--{name}":
            return after
        if word.startswith(f"--{name}="):
            return word.partition("=")[2]
    return None
