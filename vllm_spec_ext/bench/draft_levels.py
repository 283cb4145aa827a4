# SPDX-License-Identifier: Apache-2.0
"""Levels that draft for each other, as a command line writes them.

    NAME: view,budget=4096,accept=0.92; model=llama-68m,budget=256,accept=0.46

The first level drafts for the target, each one behind a ``;`` for the level before it. A ``|``
starts levels that go on where the draft of those before it ends.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_spec_ext.bench import model_shape
from vllm_spec_ext.bench.model_shape import BY_HAND, ModelShape
from vllm_spec_ext.errors import SpecExtError, UnknownNameError

VIEW, LOOKUP, MODEL = "view", "lookup", "model"
_KEYS: Mapping[str, tuple[str, ...]] = {
    VIEW: ("accept", "tokens", "budget", "page"),
    LOOKUP: ("accept", "tokens", "us"),
    MODEL: ("accept", "tokens", "budget", *BY_HAND),
}
_LOOKUP_US = 50.0
_PAGE = 16


@dataclass(frozen=True)
class Level:
    """One level of a cascade."""

    kind: str
    """``view``: the target over a part of its KV cache; ``model``: another model; ``lookup``:
    n-grams, copies of the input and the like, without any model."""
    accept: float
    """The rate at which the level above accepts a token of its draft, if all before it stand."""
    tokens: int | None = None
    """How many it drafts for the level above; None: as many as are fastest."""
    budget: int | None = None
    """Tokens of each request's KV that it reads; None: all of them."""
    page: int = 0
    """Of a view: tokens in a page of KV; once a step the mean key of every page is read to choose
    pages. 0: nothing is chosen (sink and recent tokens, or pages chosen once)."""
    shape: ModelShape | None = None
    """Of a model."""
    us: float = 0.0
    """Of a lookup: microseconds for each request."""


@dataclass(frozen=True)
class Cascade:
    """All levels below the target."""

    name: str
    parts: tuple[tuple[Level, ...], ...]
    """One after the other in a draft; in each part the level that the target verifies first."""

    @property
    def levels(self) -> list[Level]:
        """Those of all parts."""
        return [level for part in self.parts for level in part]


# What an engine without measured acceptance may start from: TriForce's rates at temperature 0
# (Sun et al. 2024, table 2, Llama2-7B-128K at 122K), and a lookup that saves the view 1.7 of its
# passes, as n-grams did for SmolLM2 on repetitive text.
EXAMPLES = (
    "view: view,budget=4096,accept=0.92",
    "view over lookup: view,budget=4096,accept=0.92; lookup,accept=0.42",
    "TriForce: view,budget=4096,accept=0.92; model=llama-68m,budget=256,accept=0.46",
    "draft model: model=llama-68m,budget=1024,accept=0.46",
)


def parse(text: str) -> Cascade:
    """One cascade.

    Raises:
        SpecExtError: A level that cannot be read, or that cannot stand where it does.
    """
    name, colon, levels = text.partition(":")
    if not colon:
        name, levels = text, text
    parts = tuple(
        tuple(_level(level.strip(), text) for level in part.split(";"))
        for part in levels.split("|")
    )
    for part in parts:
        for level in part[:-1]:
            if level.kind == LOOKUP:
                raise SpecExtError(f"{text!r}: a lookup reviews nothing; expected it as the last")
    for part in parts[:-1]:
        if part[0].tokens is None:
            raise SpecExtError(
                f"{text!r}: expected tokens=NUMBER in the level before each '|', which says where "
                "the next ones go on"
            )
    return Cascade(name.strip(), parts)


def _level(text: str, whole: str) -> Level:
    kind, *pairs = [part.strip() for part in text.split(",")]
    kind, equals, model = kind.partition("=")
    if kind not in _KEYS:
        raise UnknownNameError(f"level of {whole!r}", kind, _KEYS)
    given = {key.strip(): value for key, _, value in (pair.partition("=") for pair in pairs)}
    for key in given:
        if key not in _KEYS[kind]:
            raise UnknownNameError(f"option of the level {kind!r} of {whole!r}", key, _KEYS[kind])
    if "accept" not in given:
        raise SpecExtError(f"{whole!r}: the level {text!r} lacks accept=RATE")
    if kind == VIEW and "budget" not in given:
        raise SpecExtError(f"{whole!r}: the level {text!r} lacks budget=TOKENS")
    accept = _number(given, "accept", whole, most=1.0)
    shape = None
    if kind == MODEL:
        figures = {key: given[key] for key in BY_HAND if key in given}
        if bool(equals and model) == bool(figures):
            raise SpecExtError(
                f"{whole!r}: expected model=NAME, or model,weights=BYTES,kv=BYTES,layers=NUMBER"
            )
        shape = model_shape.from_pairs(figures, whole) if figures else model_shape.find(model)
    elif equals:
        raise SpecExtError(f"{whole!r}: {kind} takes no value; expected {kind},accept=RATE")
    return Level(
        kind=kind,
        accept=accept,
        tokens=_count(given, "tokens", whole),
        budget=_count(given, "budget", whole),
        page=int(_number(given, "page", whole, _PAGE)) if kind == VIEW else 0,
        shape=shape,
        us=_number(given, "us", whole, _LOOKUP_US) if kind == LOOKUP else 0.0,
    )


def _count(given: Mapping[str, str], key: str, whole: str) -> int | None:
    if key not in given:
        return None
    found = _number(given, key, whole)
    if found != int(found) or found < 1:
        raise SpecExtError(f"{whole!r}: {key} is {given[key]!r}, expected a whole number from 1")
    return int(found)


def _number(
    given: Mapping[str, str], key: str, whole: str, default: float = 0.0, most: float = 1e15
) -> float:
    try:
        found = float(given.get(key, default))
    except ValueError:
        found = -1.0
    if not 0.0 <= found <= most:
        limits = f"0 to {most:g}" if most <= 1.0 else "0 or more"
        raise SpecExtError(f"{whole!r}: {key} is {given[key]!r}, expected {limits}")
    return found
