# SPDX-License-Identifier: Apache-2.0
"""Finds functions, fields and constants in Python source without importing it.

Used by :mod:`vllm_spec_ext.compat` to compare vLLM with what this plugin expects of it.
"""

import ast
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vllm_spec_ext.errors import SpecExtError

TESTED = ("0.32.0", "0.33.0 (source)")  # versions every hook was compared with

Kind = Literal["function", "class", "attribute", "field", "constant", "value"]


@dataclass(frozen=True)
class Hook:
    """One thing in vLLM that we call, wrap, override or read.

    ``names`` holds, for a function, the parameters we use, in vLLM's order and without ``self``;
    for a class, the fields we read; for a value, the literals that a type alias must allow.
    """

    module: str
    name: str  # qualified within the module
    why: str
    kind: Kind = "function"
    names: tuple[str, ...] = ()
    exact: bool = False
    """``names`` must be the whole list, because our override or call spells it out: one more
    parameter, even an optional one, would break it or be dropped silently."""
    platform: Literal["any", "cpu"] = "any"
    """``cpu``: needed where vLLM runs on the CPU platform only; checked everywhere."""
    tested: tuple[str, ...] = TESTED

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class HookStatus:
    """What became of one hook in the vLLM that was looked at."""

    hook: Hook
    found: bool
    ok: bool
    problem: str | None = None  # one line, if not ok


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The folder that holds a package's source, given that folder or a wheel.

    Raises:
        SpecExtError: It is neither.
    """
    if path.is_dir():
        yield path
        return
    if not zipfile.is_zipfile(path):
        raise SpecExtError(f"found no folder and no wheel at {str(path)!r}; expected one of them")
    with tempfile.TemporaryDirectory(prefix="vllm-spec-source-") as folder:
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith(".py")])
        yield Path(folder)


def check_module(root: Path, module: str, hooks: Sequence[Hook]) -> list[HookStatus]:
    """Look up the hooks of one module in its source.

    Args:
        root: Folder that holds the package ``vllm``.
        module: Dotted name, e.g. ``vllm.v1.worker.utils``.
        hooks: Hooks of that module.
    """
    try:
        tree = parse(root, module)
    except SyntaxError as error:
        return [HookStatus(hook, False, False, f"cannot be parsed: {error}") for hook in hooks]
    if tree is None:
        missing = f"there is no module {module}"
        return [HookStatus(hook, False, False, missing) for hook in hooks]
    statuses = []
    for hook in hooks:
        node = _find(tree, hook)
        problem = f"no such {hook.kind}" if node is None else _compare(hook, node)
        statuses.append(HookStatus(hook, node is not None, problem is None, problem))
    return statuses


def parse(root: Path, module: str) -> ast.Module | None:
    """The syntax tree of a module or package; None if there is no such file."""
    path = root.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    return None


def string_constant(tree: ast.Module, name: str) -> str | None:
    """The value of a top-level ``name = "..."``, also in ``name = other = "..."``."""
    node = _named(tree.body, name, (ast.Assign, ast.AnnAssign))
    value = getattr(node, "value", None)
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, those under ``if`` and ``try`` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            for branch in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, branch, ()))
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)


def _find(tree: ast.Module, hook: Hook) -> ast.AST | None:
    *outer, last = hook.name.split(".")
    scope: Iterable[ast.stmt] = tree.body
    owner: ast.stmt | None = None
    for name in outer:
        owner = _named(scope, name, (ast.ClassDef,))
        if owner is None:
            return None
        scope = owner.body  # type: ignore[attr-defined]
    if hook.kind == "attribute":
        return _self_assignment(owner, last) if owner else None
    wanted: dict[str, tuple[type[ast.stmt], ...]] = {
        "function": (ast.FunctionDef, ast.AsyncFunctionDef),
        "class": (ast.ClassDef,),
    }
    return _named(scope, last, wanted.get(hook.kind, (ast.Assign, ast.AnnAssign)))


def _named(
    scope: Iterable[ast.stmt], name: str, kinds: tuple[type[ast.stmt], ...]
) -> ast.stmt | None:
    found = None
    for node in _statements(scope):
        if isinstance(node, kinds) and name in _names_of(node):
            found = node  # the last definition is the one in force (overloads come first)
    return found


def _names_of(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _self_assignment(owner: ast.AST, name: str) -> ast.AST | None:
    for node in ast.walk(owner):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and node.attr == name
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            return node
    return None


def _compare(hook: Hook, node: ast.AST) -> str | None:
    """The difference between what we expect of a node and what it is, in one line."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return _compare_parameters(hook, node.args)
    if hook.kind == "class" and isinstance(node, ast.ClassDef):
        fields = set().union(*(_names_of(statement) for statement in node.body))
        missing = [name for name in hook.names if name not in fields]
        return f"has no field {', '.join(missing)}" if missing else None
    if hook.kind == "value":
        literals = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
        missing = [name for name in hook.names if name not in literals]
        return f"does not allow {', '.join(map(repr, missing))}" if missing else None
    return None


def _compare_parameters(hook: Hook, arguments: ast.arguments) -> str | None:
    given = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    given = [name for name in given if name != "self"]
    missing = [name for name in hook.names if name not in given]
    if missing:
        return f"has no parameter {', '.join(missing)}; found ({', '.join(given)})"
    if [name for name in given if name in hook.names] != list(hook.names):
        return f"takes ({', '.join(given)}), expected the order ({', '.join(hook.names)})"
    extra = [name for name in given if name not in hook.names]
    if hook.exact and extra:
        return f"has new parameters {', '.join(extra)}; expected ({', '.join(hook.names)})"
    return None
