# SPDX-License-Identifier: Apache-2.0
"""From a user's words to a validated rule that the user consents to.

Light on purpose: the front end reads rules, and must not load the compiled scorers (see
:mod:`vllm_spec_ext.proposers.text_index.occurrence_kernels`).
"""

from collections.abc import Mapping
from typing import Any

from vllm_spec_ext.errors import SpecExtError, UnknownNameError, UnsupportedError, shown
from vllm_spec_ext.options import parse_options
from vllm_spec_ext.scorers.options import AnyOfRule, ScorerOptions
from vllm_spec_ext.scorers.registry import RULES, names


def parse_rule(given: str | Mapping[str, Any], owner: str = "scorer") -> ScorerOptions:
    """Validate a rule as the user gave it.

    Args:
        given: ``{"type": "top_k", "k": 2}``; a bare name stands for a rule without parameters.
        owner: Where it stood, for messages.

    Raises:
        UnknownNameError: No such rule, or no such parameter.
        SpecExtError: No type, or a bad value.
    """
    if isinstance(given, str):
        given = {"type": given}
    if not isinstance(given, Mapping):
        raise SpecExtError(
            f"{owner}: found {shown(given)}, expected an object such as "
            '{"type": "tolerance", "beta": 3, "tau": 1.0}'
        )
    if "type" not in given:
        raise SpecExtError(f'{owner}: no "type"; expected one of {", ".join(names())}')
    name = given["type"]
    if not isinstance(name, str) or name not in RULES:
        raise UnknownNameError(f"rule of {owner}", str(name), names())
    if name == "any_of" and isinstance(given.get("rules"), list | tuple):
        rules = [parse_rule(one, f"{owner}.rules[{i}]") for i, one in enumerate(given["rules"])]
        for index, rule in enumerate(rules):
            if isinstance(rule, AnyOfRule):
                raise SpecExtError(
                    f"{owner}.rules[{index}]: any_of inside any_of; list its rules one level up"
                )
        given = {**given, "rules": rules}
    return parse_options(RULES[name].options, given, f"{owner} {name}")


def check_rule(
    rule: ScorerOptions | None,
    allow_lossy: bool = False,
    vocab_size: int | None = None,
    num_speculative_tokens: int | None = None,
) -> None:
    """Refuse contradictions, and lossy rules without the user's consent.

    Args:
        rule: The rule; None is the exact one.
        allow_lossy: The user's consent to output that differs from the target's own.
        vocab_size: Width of the target's logits, for checks; None where it is not known yet.
        num_speculative_tokens: Longest draft, for checks; None where it is not known yet.

    Raises:
        UnsupportedError: A lossy rule without ``allow_lossy``.
        SpecExtError: Parameters that contradict each other or the model.
    """
    if rule is None:
        return
    rule.check(vocab_size, num_speculative_tokens)
    if not rule.is_strict and not allow_lossy:
        raise UnsupportedError(
            f"scorer {rule.type} changes the output: it accepts tokens that the target did not "
            'choose. Set "allow_lossy": true beside it if you want that, or use the rule "exact".'
        )
