# SPDX-License-Identifier: Apache-2.0
"""The user's ``speculative_config``, taken apart and validated; without vLLM or torch.

One parser for the command line and the engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_spec_ext.errors import SpecExtError, shown
from vllm_spec_ext.options import MethodOptions, OnlineOptions, parse_options, unknown_option
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.description import ProposerInfo
from vllm_spec_ext.scorers.options import ScorerOptions
from vllm_spec_ext.scorers.parse import check_rule, parse_rule

MAX_DRAFT_TOKENS = 128
"""Of a request in a step (vLLM 0.32 ``v1/sample/rejection_sampler.py``, ``MAX_SPEC_LEN``)."""

# vLLM's own speculative options that mean the same for our methods.
VLLM_OPTIONS = ("num_speculative_tokens", "num_speculative_tokens_per_batch_size")

# Ours, for every method: the acceptance rule, and the consent that a lossy one needs.
RULE_OPTIONS = ("scorer", "allow_lossy")

# Ours, for methods with weights that can learn while they serve.
ONLINE_OPTIONS = ("online",)

# Ours, for every method: whether requests without a cache_salt share what proposers learn.
SHARING_OPTIONS = ("share_unsalted",)


@dataclass(frozen=True)
class ParsedMethod:
    """The user's JSON, taken apart."""

    info: ProposerInfo
    options: MethodOptions
    rule: ScorerOptions | None
    allow_lossy: bool
    share_unsalted: bool | None  # None: as the kind of engine says
    online: OnlineOptions | None
    vllm_options: dict[str, Any]  # keyword arguments of vLLM's own configuration
    given: Mapping[str, Any]  # the JSON as it was, underscores in its keys


def parse_method(given: Mapping[str, Any], method: str) -> ParsedMethod:
    """Split and validate the user's JSON.

    Args:
        given: Keys of ``--speculative-config``, hyphens or underscores, ``method`` included.
        method: Name of one of our methods.

    Raises:
        SpecExtError: An unknown key, a wrong type, a value out of range, or a lossy rule without
            ``allow_lossy``.
    """
    found = registry.info(method)
    values = with_underscores(given)
    whole = dict(values)
    values.pop("method", None)
    vllm_options = {key: values.pop(key) for key in VLLM_OPTIONS if key in values}
    rule = values.pop("scorer", None)
    allow_lossy = values.pop("allow_lossy", False)
    share_unsalted = values.pop("share_unsalted", None)
    online = parse_online(values.pop("online", None), method)
    if "rejection_sample_method" in values:
        raise SpecExtError(
            f"rejection_sample_method: found {values['rejection_sample_method']!r}; vLLM has its "
            "block and synthetic rules for its own drafters only. "
            "Leave it out: acceptance is exact without it (docs: losslessness)"
        )
    for key in values:
        if key not in found.options.model_fields:
            ours = [*RULE_OPTIONS, *SHARING_OPTIONS, *ONLINE_OPTIONS, *found.options.model_fields]
            raise unknown_option(found.options, method, key, ["method", *VLLM_OPTIONS, *ours])
    if not isinstance(allow_lossy, bool):
        raise SpecExtError(f"allow_lossy: found {allow_lossy!r}, expected true or false")
    if share_unsalted is not None and not isinstance(share_unsalted, bool):
        raise SpecExtError(f"share_unsalted: found {share_unsalted!r}, expected true or false")
    options = parse_options(found.options, values, method)
    num_draft_tokens = _num_draft_tokens(vllm_options, found)
    vllm_options["num_speculative_tokens"] = num_draft_tokens
    parsed_rule = None if rule is None else parse_rule(rule)
    check_rule(parsed_rule, allow_lossy, num_speculative_tokens=num_draft_tokens)
    return ParsedMethod(
        found, options, parsed_rule, allow_lossy, share_unsalted, online, vllm_options, whole
    )


def with_underscores(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options by their names; hyphens are as good.

    Raises:
        SpecExtError: One is given in both spellings.
    """
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name in found:
            raise SpecExtError(f"{name} is given twice, with hyphens and underscores; give it once")
        found[name] = value
    return found


def parse_online(given: Any, method: str) -> OnlineOptions | None:
    """The value of ``online``; None = it is off.

    Raises:
        SpecExtError: A method that cannot learn, or a bad option.
    """
    if given is None:
        return None
    if not isinstance(given, dict):
        raise SpecExtError(
            f'online: found {shown(given)}, expected an object such as {{"folder": "FOLDER"}}'
        )
    from vllm_spec_ext.online.student import STUDENTS  # imports torch

    if method not in STUDENTS:
        raise SpecExtError(
            f"online: {method} cannot learn while it serves; expected one of "
            f"{', '.join(sorted(STUDENTS))}. Leave online out"
        )
    return parse_options(OnlineOptions, given, "online")


def _num_draft_tokens(vllm_options: Mapping[str, Any], found: ProposerInfo) -> int:
    value = vllm_options.get("num_speculative_tokens", found.num_speculative_tokens)
    if value is None:
        raise SpecExtError(
            f"{found.name} has no default for num_speculative_tokens; "
            f'add "num_speculative_tokens": N with 1 <= N <= {MAX_DRAFT_TOKENS}'
        )
    if isinstance(value, bool) or not isinstance(value, int):
        raise SpecExtError(
            f"num_speculative_tokens: found {value!r}, expected an integer "
            f"from 1 to {MAX_DRAFT_TOKENS}"
        )
    if not 1 <= value <= MAX_DRAFT_TOKENS:
        advice = "lower it" if value > 0 else "raise it, or decode plainly without the method"
        raise SpecExtError(
            f"num_speculative_tokens: found {value}, expected 1 to {MAX_DRAFT_TOKENS} "
            f"(vLLM's rejection sampler verifies no more tokens a step); {advice}"
        )
    return value
