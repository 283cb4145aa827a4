# SPDX-License-Identifier: Apache-2.0
"""A request's own acceptance rule: the server's, made stricter, never looser.

A request may say ``"exact"``, or give parameters of the server's rule: ``{"k": 1}`` under
``{"type": "top_k", "k": 3}``; for ``any_of``, ``{"rules": [...]}`` with one such value (or null)
for each of the server's rules. Everything a request leaves out stays as the server has it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_spec_ext.errors import RequestOptionError, SpecExtError, shown
from vllm_spec_ext.scorers.options import AnyOfRule, ExactRule, ScorerOptions
from vllm_spec_ext.scorers.parse import parse_rule

EXACT = ExactRule()


def narrow(
    server_rule: ScorerOptions | None,
    request_value: str | Mapping[str, Any] | None,
    parameter: str = "scorer",
) -> ScorerOptions:
    """The rule by which one request is verified.

    Args:
        server_rule: The engine's rule; None is the exact one.
        request_value: What the request says; None keeps the server's rule.
        parameter: The request's field, for the error.

    Returns:
        The server's rule itself, the exact rule, or one of the server's type with smaller
        parameters; to be given to ``Scorer.for_batch``.

    Raises:
        RequestOptionError: The request would loosen the rule, change its type, or is malformed.
    """
    server = EXACT if server_rule is None else server_rule
    if request_value is None:
        return server
    if isinstance(request_value, str):
        request_value = {"type": request_value}
    if not isinstance(request_value, Mapping):
        raise RequestOptionError(
            parameter,
            f'found {shown(request_value)}; expected "exact" or parameters of the server\'s rule '
            f"{server.type!r}",
        )
    given = dict(request_value)
    kind = given.pop("type", server.type)
    if kind == "exact":
        if given:
            raise RequestOptionError(
                parameter, f'"exact" has no parameters; found {shown(list(given))}'
            )
        return EXACT
    if kind != server.type:
        raise RequestOptionError(
            parameter,
            f"found rule {shown(kind)}, but this server runs {server.type!r}; a request may only "
            'make that rule stricter or ask for "exact"',
        )
    if isinstance(server, AnyOfRule):
        return _narrow_members(server, given, parameter)
    return _narrow_values(server, given, parameter)


def _narrow_values(
    server: ScorerOptions, given: Mapping[str, Any], parameter: str
) -> ScorerOptions:
    allowed = server.narrowable
    for name in given:
        if name not in allowed:
            raise RequestOptionError(
                f"{parameter}.{name}",
                f"not a parameter that a request may set under rule {server.type!r}; "
                f"it may set: {', '.join(allowed) or 'none'}",
            )
    try:
        wanted = parse_rule({**server.model_dump(), **given}, parameter)
    except SpecExtError as error:
        name = next(iter(given)) if len(given) == 1 else ""
        raise RequestOptionError(f"{parameter}.{name}".rstrip("."), str(error)) from error
    for name in given:
        found, limit = getattr(wanted, name), getattr(server, name)
        if found > limit:
            raise RequestOptionError(
                f"{parameter}.{name}",
                f"found {shown(found)}, but the server allows at most {limit}; a request may only "
                "make the rule stricter",
            )
    return wanted


def _narrow_members(server: AnyOfRule, given: Mapping[str, Any], parameter: str) -> AnyOfRule:
    values = given.get("rules")
    well_formed = isinstance(values, Sequence) and not isinstance(values, str)
    if set(given) != {"rules"} or not well_formed or len(values or ()) != len(server.rules):
        kinds = ", ".join(rule.type for rule in server.rules)
        raise RequestOptionError(
            parameter,
            f'found {shown(dict(given))}; expected {{"rules": [...]}} with one value (or null) for '
            f"each of the server's rules: {kinds}",
        )
    members = [
        narrow(rule, value, f"{parameter}.rules[{index}]")
        for index, (rule, value) in enumerate(zip(server.rules, values or (), strict=True))
    ]
    return AnyOfRule(rules=tuple(members))
