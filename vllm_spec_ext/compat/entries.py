# SPDX-License-Identifier: Apache-2.0
"""What an entry of the hook map is: a function or name of vLLM, or a class and what we read of it.

Types are written as in annotations: built-in ones, those of :data:`LIBRARIES`, and the classes of
the map by their bare names. The tests follow them through our code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["function", "constant", "value"]

Part = Literal["engine", "v2", "tools"]
"""``v2``: the V2 model runner. Where something of it is missing, engines keep the V1 runner.
``tools``: benchmark and training only. The plugin serves without it, so what is missing there
is reported by the doctor and does not keep an engine from starting."""

LIBRARIES = ("torch", "numpy", "arctic_inference")
"""Other libraries whose classes types may name, with their module: ``torch.Tensor``."""


@dataclass(frozen=True)
class Hook:
    """One function or name in vLLM that we call, wrap, override or import.

    ``names`` holds, for a function, the parameters we use, in vLLM's order and without ``self``;
    for a value, the literals that a type alias must allow.
    """

    module: str
    name: str  # qualified within the module
    why: str
    kind: Kind = "function"
    names: tuple[str, ...] = ()
    exact: bool = False
    """``names`` must be the whole list, because our override or call spells it out: one more
    parameter, even an optional one, would break it or be dropped silently."""
    newer: tuple[str, ...] = ()
    """Parameters that only later versions have, and that our override passes on."""
    type: str = ""
    """What a function returns or a constant is; empty = nothing of ours reads an attribute off
    it."""
    used_by: str = ""
    """A file of ours and how it depends on this without naming it in Python, e.g. because vLLM
    calls us through it; empty = the code names it."""
    part: Part = "engine"

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Reads:
    """One class of vLLM and every attribute of it that we read, set or pass by keyword."""

    module: str
    name: str
    why: str
    attributes: Mapping[str, str] = field(hash=False)
    """Name -> type. The lookup wants a field, a class attribute, a method or an assignment to
    ``self``, in the class or a base class."""
    base: str = ""
    """A base class that the code relies on, e.g. ``NamedTuple``, whose fields are a sequence."""
    used_by: str = ""
    """A file of ours that reads the attributes where types cannot be followed."""
    part: Part = "engine"

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


Entry = Hook | Reads


@dataclass(frozen=True)
class HookStatus:
    """What became of one entry in the vLLM that was looked at."""

    hook: Entry
    found: bool
    ok: bool
    problem: str | None = None  # one line, if not ok
    missing: tuple[str, ...] = ()  # attributes of a class that are not there

    @property
    def num_places(self) -> int:
        """Places in vLLM that the entry stands for: a function, or each attribute of a class."""
        return max(1, len(self.hook.attributes)) if isinstance(self.hook, Reads) else 1

    @property
    def num_wrong(self) -> int:
        """How many of them are not as expected."""
        return 0 if self.ok else len(self.missing) or self.num_places
