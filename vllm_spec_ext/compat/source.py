# SPDX-License-Identifier: Apache-2.0
"""Finds functions, classes and constants in Python source without importing it."""

import ast
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from vllm_spec_ext.compat.entries import Entry, Hook, HookStatus, Reads
from vllm_spec_ext.errors import SpecExtError

_MAX_TREES = 3  # large syntax trees that are alive at a time


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


def string_constant(tree: ast.Module, name: str) -> str | None:
    """The value of a top-level ``name = "..."``, also in ``name = other = "..."``."""
    node = _named(tree.body, name, (ast.Assign, ast.AnnAssign))
    value = getattr(node, "value", None)
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


class Source:
    """The source under one folder; keeps a few of its syntax trees."""

    def __init__(self, root: Path) -> None:
        """Look nothing up yet.

        Args:
            root: Folder that holds the package ``vllm``.
        """
        self._root = root
        self.files: set[Path] = set()
        """Those that were parsed."""
        self.tree = lru_cache(_MAX_TREES)(self._parse)

    def _parse(self, module: str) -> ast.Module | None:
        """The syntax tree of a module or package; None if there is no such file."""
        file = self._file(module)
        if file is None:
            return None
        self.files.add(file)
        return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))

    def _file(self, module: str) -> Path | None:
        path = self._root.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
        return None

    def provides(self, module: str, name: str | None) -> bool:
        """Whether a module is there, and defines or imports a name or has such a submodule."""
        tree = self.tree(module)
        if tree is None or name is None or self._file(f"{module}.{name}"):
            return tree is not None
        for node in _statements(tree.body):
            if isinstance(node, ast.Import | ast.ImportFrom):
                if name in [(alias.asname or alias.name).partition(".")[0] for alias in node.names]:
                    return True
            elif name in _names_of(node):
                return True
        return False

    def look_up(self, entry: Entry) -> HookStatus:
        """Compare an entry with the source."""
        try:
            tree = self.tree(entry.module)
            if tree is None:
                return HookStatus(entry, False, False, f"there is no module {entry.module}")
            return self._class(entry) if isinstance(entry, Reads) else _hook(tree, entry)
        except SyntaxError as error:
            return HookStatus(entry, False, False, f"cannot be parsed: {error}")

    def _class(self, entry: Reads) -> HookStatus:
        tree = self.tree(entry.module)
        node = None if tree is None else _named(tree.body, entry.name, (ast.ClassDef,))
        if not isinstance(node, ast.ClassDef):
            return HookStatus(entry, False, False, "no such class")
        if entry.base and entry.base not in [_last_name(base) for base in node.bases]:
            return HookStatus(entry, True, False, f"is no longer a {entry.base}")
        absent = self.absent(entry.module, entry.name, frozenset(entry.attributes))
        missing = tuple(name for name in entry.attributes if name in absent)
        problem = f"has no attribute {', '.join(missing)}" if missing else None
        return HookStatus(entry, True, not missing, problem, missing)

    def absent(
        self, module: str, name: str, wanted: frozenset[str], seen: frozenset[str] = frozenset()
    ) -> frozenset[str]:
        """What of `wanted` a class does not have: no field, no method, never set on ``self``.

        Base classes are searched for what the class itself lacks; those outside the source, such
        as torch's, are not.
        """
        tree = self.tree(module)
        if not wanted or tree is None or f"{module}.{name}" in seen:
            return wanted
        seen |= {f"{module}.{name}"}
        node = _named(tree.body, name, (ast.ClassDef,))
        if not isinstance(node, ast.ClassDef):
            # Perhaps a package that passes another module's class on.
            other, original = self._origin(tree, module, name)
            return self.absent(other, original, wanted, seen) if other else wanted
        for statement in _statements(node.body):
            wanted -= _names_of(statement)
        if wanted:
            wanted -= _set_on_self(node)
        for base in node.bases:
            called = _last_name(base.value if isinstance(base, ast.Subscript) else base)  # Base[T]
            if wanted and called:
                place = module, called
                if _named(tree.body, called, (ast.ClassDef,)) is None:
                    place = self._origin(tree, module, called)
                if place[0]:
                    wanted = self.absent(*place, wanted, seen)
        return wanted

    def _origin(self, tree: ast.Module, module: str, name: str) -> tuple[str, str]:
        """Module and name that an imported name comes from; ``("", "")`` if it is not imported."""
        for node in _statements(tree.body):
            if not isinstance(node, ast.ImportFrom):
                continue
            for alias in node.names:
                if (alias.asname or alias.name) != name:
                    continue
                if not node.level:
                    return node.module or "", alias.name
                file = self._file(module)
                inside = file is not None and file.name == "__init__.py"
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + inside]
                return ".".join([*parts, *filter(None, [node.module])]), alias.name
        return "", ""


def _hook(tree: ast.Module, hook: Hook) -> HookStatus:
    node = _find(tree, hook)
    problem = f"no such {hook.kind}" if node is None else _compare(hook, node)
    return HookStatus(hook, node is not None, problem is None, problem)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, those under ``if`` and ``try`` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            for branch in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, branch, ()))
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)


def _find(tree: ast.Module, hook: Hook) -> ast.stmt | None:
    *outer, last = hook.name.split(".")
    scope: Iterable[ast.stmt] = tree.body
    for name in outer:
        owner = _named(scope, name, (ast.ClassDef,))
        if not isinstance(owner, ast.ClassDef):
            return None
        scope = owner.body
    if hook.kind == "function":
        return _named(scope, last, (ast.FunctionDef, ast.AsyncFunctionDef))
    return _named(scope, last, (ast.Assign, ast.AnnAssign))


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


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else str(getattr(node, "id", ""))


def _set_on_self(owner: ast.stmt) -> set[str]:
    """Attributes that methods assign to ``self``; only statements are visited, which is quick."""
    found: set[str] = set()
    waiting: list[ast.AST] = [owner]
    while waiting:
        node = waiting.pop()
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, block, ())
        targets: list[ast.expr | None] = list(getattr(node, "targets", ()))
        targets += [getattr(node, "target", None)]
        targets += [item.optional_vars for item in getattr(node, "items", ())]
        for target in filter(None, targets):
            found |= {
                part.attr
                for part in ast.walk(target)
                if isinstance(part, ast.Attribute)
                and isinstance(part.ctx, ast.Store)
                and isinstance(part.value, ast.Name)
                and part.value.id == "self"
            }
    return found


def _compare(hook: Hook, node: ast.AST) -> str | None:
    """The difference between what we expect of a node and what it is, in one line."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return _compare_parameters(hook, node.args)
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
    extra = [name for name in given if name not in (*hook.names, *hook.newer)]
    if hook.exact and extra:
        return f"has new parameters {', '.join(extra)}; expected ({', '.join(hook.names)})"
    return None
