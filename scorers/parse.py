# SPDX-License-Identifier: Apache-2.0
"""From a user's words to a validated rule: names, parsing, contradictions.

Light on purpose: the front end reads rules, and must not load the compiled scorers (see
:mod:`vllm_spec_ext.proposers.text_index.occurrence_kernels`).
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from vllm_spec_ext.errors import SpecExtError, UnknownNameError, UnsupportedError, shown
from vllm_spec_ext.options import Options, parse_options
from vllm_spec_ext.scorers.options import (
    AnyOfRule,
    DistanceRule,
    ExactRule,
    MinBlockRule,
    ScorerOptions,
    ToleranceRule,
    TopKRule,
)

SCHEMAS: dict[str, type[Options]] = {
    "exact": ExactRule,
    "top_k": TopKRule,
    "distance": DistanceRule,
    "min_block": MinBlockRule,
    "tolerance": ToleranceRule,
    "any_of": AnyOfRule,
}

# Where a rule becomes the exact one; a rule is strict if any of its conditions holds.
_STRICT: dict[str, Callable[[Any], bool]] = {
    "exact": lambda rule: True,
    "top_k": lambda rule: rule.k == 1,
    "distance": lambda rule: rule.epsilon == 0,
    "min_block": lambda rule: rule.length == 1,
    "tolerance": lambda rule: rule.beta == 1 or rule.tau == 0,
    "any_of": lambda rule: all(is_strict(member) for member in rule.rules),
}


def names() -> list[str]:
    """All rules that can be asked for."""
    return list(SCHEMAS)


def is_strict(rule: ScorerOptions) -> bool:
    """Whether a rule's parameters make it the exact rule."""
    return _STRICT[rule.type](rule)


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
    if not isinstance(name, str) or name not in SCHEMAS:
        raise UnknownNameError(f"rule of {owner}", str(name), names())
    if name == "any_of" and isinstance(given.get("rules"), list | tuple):
        rules = [parse_rule(one, f"{owner}.rules[{i}]") for i, one in enumerate(given["rules"])]
        for index, rule in enumerate(rules):
            if isinstance(rule, AnyOfRule):
                raise SpecExtError(
                    f"{owner}.rules[{index}]: any_of inside any_of; list its rules one level up"
                )
        given = {**given, "rules": [rule.model_dump() for rule in rules]}
    return cast(ScorerOptions, parse_options(SCHEMAS[name], given, f"{owner} {name}"))


def _check_union(rule: AnyOfRule) -> None:
    kinds = [member.type for member in rule.rules]
    if len(kinds) < 2:
        raise SpecExtError(f"any_of: found one rule ({kinds[0]}); give it alone, without any_of")
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise SpecExtError(
                f"any_of: found {kind} {kinds.count(kind)} times; keep the loosest one"
            )
    for member in rule.rules:
        if is_strict(member):
            raise SpecExtError(
                f"any_of: {member.type} with these parameters is the exact rule, which every rule "
                "contains; remove it"
            )
    by_kind = {member.type: member for member in rule.rules}
    top_k, tolerance = by_kind.get("top_k"), by_kind.get("tolerance")
    if (
        isinstance(top_k, TopKRule)
        and isinstance(tolerance, ToleranceRule)
        and tolerance.beta <= top_k.k
    ):
        raise SpecExtError(
            f"any_of: top_k with k={top_k.k} already tolerates all that tolerance with "
            f"beta={tolerance.beta} does; remove one of them or raise beta above k"
        )


def _check_sizes(
    rule: ScorerOptions, vocab_size: int | None, num_speculative_tokens: int | None
) -> None:
    if isinstance(rule, AnyOfRule):
        for member in rule.rules:
            _check_sizes(member, vocab_size, num_speculative_tokens)
    limit = {"top_k": "k", "tolerance": "beta"}.get(rule.type)
    if limit and vocab_size is not None and getattr(rule, limit) >= vocab_size:
        raise SpecExtError(
            f"{rule.type}: found {limit}={getattr(rule, limit)}, expected less than the "
            f"vocabulary of {vocab_size} tokens; usual values are 2 to 5"
        )
    if (
        isinstance(rule, MinBlockRule)
        and num_speculative_tokens is not None
        and rule.length > num_speculative_tokens + 1
    ):
        raise SpecExtError(
            f"min_block: found length={rule.length}, but a step yields at most "
            f"num_speculative_tokens + 1 = {num_speculative_tokens + 1} tokens; lower length"
        )


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
    if isinstance(rule, AnyOfRule):
        _check_union(rule)
    _check_sizes(rule, vocab_size, num_speculative_tokens)
    if not is_strict(rule) and not allow_lossy:
        raise UnsupportedError(
            f"scorer {rule.type} changes the output: it accepts tokens that the target did not "
            'choose. Set "allow_lossy": true beside it if you want that, or use the rule "exact".'
        )
