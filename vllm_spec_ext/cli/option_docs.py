# SPDX-License-Identifier: Apache-2.0
"""Turns an option class into rows for people: name, type with bounds, default, documentation."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_spec_ext.options import Options


@dataclass(frozen=True)
class OptionDoc:
    """One option as the schema describes it."""

    name: str
    type: str  # e.g. "integer 1..64", '"auto" | "prompt"', "[integer, integer] or null"
    default: str  # JSON; "required" if there is none
    text: str


def option_docs(schema: type[Options]) -> list[OptionDoc]:
    """Describe every field of an option class, in the order of its definition."""
    described = schema.model_json_schema()
    definitions = described.get("$defs", {})
    required = set(described.get("required", ()))
    return [
        OptionDoc(
            name,
            describe_type(field, definitions),
            "required" if name in required else json.dumps(field.get("default")),
            " ".join(field.get("description", "").replace("``", "`").split()),
        )
        for name, field in described.get("properties", {}).items()
    ]


def describe_type(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """One JSON-schema node in words.

    Args:
        field: The node.
        definitions: ``$defs`` of its schema.
    """
    if "$ref" in field:
        return describe_type(definitions[field["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in field:
        return " or ".join(describe_type(part, definitions) for part in field["anyOf"])
    if "enum" in field:
        return " | ".join(json.dumps(value) for value in field["enum"])
    if "const" in field:
        return json.dumps(field["const"])
    kind = str(field.get("type", "any"))
    if kind == "array":
        if "prefixItems" in field:
            parts = [describe_type(part, definitions) for part in field["prefixItems"]]
            return f"[{', '.join(parts)}]"
        return f"list of {describe_type(field.get('items', {}), definitions)}"
    if kind == "string" and field.get("minLength"):
        return _length(field)
    return f"{kind}{_bounds(field)}"


def _length(field: Mapping[str, Any]) -> str:
    least, most = field["minLength"], field.get("maxLength")
    if most is not None:
        return f"string of {least}..{most} characters"
    return "non-empty string" if least == 1 else f"string, at least {least} characters"


def _bounds(field: Mapping[str, Any]) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    above, below = field.get("exclusiveMinimum"), field.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f" {low}..{high}"
    signs = ((">=", low), ("<=", high), (">", above), ("<", below))
    words = [f"{sign} {value}" for sign, value in signs if value is not None]
    return " " + ", ".join(words) if words else ""
