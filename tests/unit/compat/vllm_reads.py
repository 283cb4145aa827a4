# SPDX-License-Identifier: Apache-2.0
"""Finds every attribute that our code reads off an object of vLLM, with mypy's types.

The hook map becomes a package of stubs named ``vllm``, mypy infers a type for every expression of
our files against it, and each attribute access is looked at: it is on an object of our own, of the
standard library or of another library, or it is in the map. An access that cannot be told is a
finding, too. Types are followed through aliases, containers, nested functions and narrowing; only
keyword arguments that are handed on as ``**values`` are not seen.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mypy import build
from mypy.modulefinder import BuildSource
from mypy.nodes import TypeInfo, Var
from mypy.options import Options
from mypy.types import (
    AnyType,
    CallableType,
    Instance,
    Overloaded,
    ProperType,
    Type,
    TypeOfAny,
    TypeType,
    TypeVarType,
    UnionType,
    get_proper_type,
)

from vllm_spec_ext import compat
from vllm_spec_ext.compat.entries import LIBRARIES, Entry, Hook, Reads

ROOT = Path(compat.__file__).resolve().parents[2]

# Our mixins are combined with a class of vLLM when an engine starts. What such a mixin declares
# without ever assigning it, and what it calls through super(), belongs to that class.
STANDS_FOR = {
    "vllm_spec_ext.engine.runner.SpecRunnerMixin": "GPUModelRunner",
    "vllm_spec_ext.engine.worker.SpecWorkerMixin": "Worker",
    "vllm_spec_ext.bench.worker_extension.RivalWorker": "Worker",
    # Of the V2 runner, whose classes have names that others have too: with their modules.
    "vllm_spec_ext.engine.v2.runner.SpecRunnerV2Mixin": (
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
    ),
    "vllm_spec_ext.engine.v2.model_state.TreeStateMixin": (
        "vllm.v1.worker.gpu.model_states.default.DefaultModelState"
    ),
    "vllm_spec_ext.engine.v2.target_sampler.SpecSamplerMixin": (
        "vllm.v1.worker.gpu.sample.sampler.Sampler"
    ),
    "vllm_spec_ext.engine.v2.late_tables.told_output.ToldOutputMixin": (
        "vllm.v1.worker.gpu.async_utils.AsyncOutput"
    ),
}

V2_MODULES = ("vllm.v1.worker.gpu.", "vllm.v1.worker.cpu.")
"""Where the V2 runner is: there a bare name means a class of these modules, if one has it."""

KEYWORDS_OF = {"LLM": "EngineArgs"}
"""Classes whose constructor hands keyword arguments on to another one's."""

_READS = "vllm_spec_ext/compat/reads.py"
_HOOKS = "vllm_spec_ext/compat/hooks.py"
_SHIFT = 100_000  # lines between two files, so that a line number names its file
_ACCESSORS = ("getattr", "hasattr", "setattr", "delattr")
_OPAQUE_ACCESS = ("vars", "attrgetter", "methodcaller")


def files_that_touch_vllm() -> dict[str, Path]:
    """Module name -> file: the engine adapter, and whatever else imports vLLM or is mixed in."""
    package = ROOT / "vllm_spec_ext"
    found = {}
    for folder in ("", "engine", "bench", "cli", "training"):
        for path in sorted((package / folder).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            mixed_in = any(name.startswith(f"{module}.") for name in STANDS_FOR)
            if folder == "engine" or path.name == "plugin.py" or mixed_in or _imports_vllm(path):
                found[module] = path
    return found


def _imports_vllm(path: Path) -> bool:
    return any(vllm_imports(ast.parse(path.read_text(encoding="utf-8"))))


def vllm_imports(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, module and name of each import from vLLM; the name is empty for a whole module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            for alias in node.names:
                yield node.lineno, str(node.module), alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "vllm":
                    yield node.lineno, alias.name, ""


# -- the hook map as stubs ----------------------------------------------------------------------


def write_stubs(folder: Path, entries: Sequence[Entry]) -> None:
    """The package ``vllm`` as the hook map describes it, for mypy."""
    modules: dict[str, list[str]] = {}
    classes = [(e.name, e.module) for e in entries if isinstance(e, Reads)]
    homes = dict(sorted(classes, key=lambda home: not home[1].startswith(V2_MODULES)))
    homes_v2 = dict(sorted(classes, key=lambda home: home[1].startswith(V2_MODULES)))
    members: dict[tuple[str, str], dict[str, str]] = {}
    bases: dict[tuple[str, str], str] = {}
    for entry in entries:
        lines = modules.setdefault(entry.module, [])
        if isinstance(entry, Reads):
            members.setdefault((entry.module, entry.name), {}).update(entry.attributes)
            if entry.base == "NamedTuple":
                bases[entry.module, entry.name] = "tuple[Any, ...]"
        elif "." in entry.name:
            owner, _, name = entry.name.partition(".")
            homes.setdefault(owner, entry.module)
            own = members.setdefault((entry.module, owner), {})
            if not name.startswith("__"):
                own.setdefault(name, f"Callable[..., {entry.type or 'Any'}]")
        elif entry.kind == "function":
            lines.append(
                f"def {entry.name}(*args: Any, **kwargs: Any) -> {entry.type or 'Any'}: ..."
            )
        else:
            lines.append(f"{entry.name}: {entry.type or 'Any'}")
    for (module, name), attributes in members.items():
        body = ["    def __init__(self, *args: Any, **kwargs: Any) -> None: ..."]
        body += [f"    {attribute}: {kind}" for attribute, kind in attributes.items()]
        if "forward" in attributes:
            body.append(f"    __call__: {attributes['forward']}")
        base = bases.get((module, name), "")
        modules[module] += [f"class {name}({base}):", *body]
    header = ["from collections.abc import Callable, Sequence", "from typing import Any"]
    header += [f"import {library}" for library in LIBRARIES]
    exports: dict[str, list[str]] = {}
    for entry in entries:
        name = entry.name.partition(".")[0]
        package = entry.module
        while package := package.rpartition(".")[0]:
            exports.setdefault(package, []).append(f"from {entry.module} import {name} as {name}")
    for module in {*modules, *exports}:
        known = homes_v2 if module.startswith(V2_MODULES) else homes
        imports = [f"from {home} import {name}" for name, home in known.items() if home != module]
        path = folder.joinpath(*module.split("."))
        path.mkdir(parents=True, exist_ok=True)
        text = [*header, *imports, *exports.get(module, ()), *modules.get(module, ())]
        (path / "__init__.pyi").write_text("\n".join(text) + "\n", encoding="utf-8")


def write_numpy_stub(folder: Path) -> None:
    """Enough of numpy for aliases such as NDArray[np.int64]; all its values are unknown."""
    numpy = folder / "numpy"
    numpy.mkdir()
    unknown = "from library_without_stubs import Unknown\n"
    (numpy / "__init__.pyi").write_text(
        f"{unknown}def __getattr__(name: str) -> Unknown: ...\n", encoding="utf-8"
    )
    names = "add sub mul truediv floordiv mod and or xor lshift rshift pow matmul"
    methods = [f"__{prefix}{name}__" for name in names.split(" ") for prefix in ("", "r")]
    methods += ["__lt__", "__le__", "__gt__", "__ge__", "__getitem__", "__getattr__"]
    lines = ["from typing import Any, Generic, TypeVar", unknown, 'T = TypeVar("T")']
    lines += ["class NDArray(Generic[T]):", "    def __len__(self) -> int: ..."]
    lines += [f"    def {name}(self, other: Any) -> Unknown: ..." for name in methods]
    lines += [f"    def {name}(self) -> Unknown: ..." for name in ("__invert__", "__neg__")]
    lines += ["    def __iter__(self) -> Unknown: ..."]
    lines += ["    def __setitem__(self, place: Any, value: Any) -> None: ..."]
    (numpy / "typing.pyi").write_text("\n".join(lines) + "\n", encoding="utf-8")


# -- the analysis -------------------------------------------------------------------------------


@dataclass
class Analysis:
    """What was found in a set of files."""

    findings: list[str] = field(default_factory=list)
    used: set[tuple[str, str]] = field(default_factory=set)
    """(class, attribute) or (module, name) of vLLM that our code names."""
    literals: set[str] = field(default_factory=set)
    """All string literals: some fields are passed to vLLM as ``**{"name": value}``."""


def analyse(
    files: Mapping[str, Path | str], folder: Path, entries: Sequence[Entry] = compat.HOOKS
) -> Analysis:
    """Look at every attribute access in these files.

    Args:
        files: Module name -> file, or source text.
        folder: Empty, for what mypy reads.
        entries: The hook map.
    """
    write_stubs(folder / "stubs", entries)
    write_numpy_stub(folder / "stubs")
    texts = {m: f if isinstance(f, str) else f.read_text("utf-8") for m, f in files.items()}
    shifts = {module: _SHIFT * place for place, module in enumerate(texts, start=1)}
    sources = []
    for module, text in texts.items():
        path = folder / "ours" / f"{module}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n" * shifts[module] + text, encoding="utf-8")
        sources.append(BuildSource(str(path), module))
    options = Options()
    options.python_version = (3, 11)
    options.python_executable = None  # other libraries stay unknown, which is quick
    options.mypy_path = [str(folder / "stubs"), str(ROOT)]
    options.ignore_missing_imports = True
    options.check_untyped_defs = True
    options.incremental = False
    options.export_types = True
    options.hide_error_codes = False
    result = build.build(sources, options)
    types: dict[tuple[int, int, int, int], Type] = {}
    for node, kind in result.types.items():
        if node.line > _SHIFT and node.end_line is not None and node.end_column is not None:
            types[node.line, node.column, node.end_line, node.end_column] = kind
    analysis = Analysis()
    for module, text in texts.items():
        given = files[module]
        name = str(given.relative_to(ROOT)) if isinstance(given, Path) else module
        _File(name, module, text, shifts[module], types, entries, analysis).look()
    return analysis


class _File:
    """One of our files."""

    def __init__(
        self,
        name: str,
        module: str,
        text: str,
        shift: int,
        types: Mapping[tuple[int, int, int, int], Type],
        entries: Sequence[Entry],
        analysis: Analysis,
    ) -> None:
        self._name, self._module, self._shift = name, module, shift
        self._types, self._entries, self._analysis = types, entries, analysis
        self._tree = ast.parse(text)
        self._parents = {
            child: node for node in ast.walk(self._tree) for child in ast.iter_child_nodes(node)
        }
        self._reported: set[ast.AST] = set()
        self._imported = {
            (alias.asname or alias.name).partition(".")[0]
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }

    def look(self) -> None:
        """Go through the file, inner expressions first, so that a cause is named before effects."""
        for line, module, name in vllm_imports(self._tree):
            self._import(line, module, name)
        for node in reversed(list(ast.walk(self._tree))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                self._analysis.literals.add(node.value)
            if self._is_annotation(node):
                continue
            if isinstance(node, ast.Attribute):
                self._access(node, node.value, node.attr)
            elif isinstance(node, ast.Subscript):
                self._access_special(node, node.value, "__getitem__")
            elif isinstance(node, ast.Call):
                self._call(node)
            elif isinstance(node, ast.MatchClass) and node.kwd_attrs:
                self._report(node, "a class pattern reads attributes; read them by name")
            elif isinstance(node, ast.FunctionDef):
                self._override(node)

    def _report(self, node: ast.AST, message: str) -> None:
        self._reported.add(node)
        line = getattr(node, "lineno", 0)
        self._analysis.findings.append(f"{self._name}:{line}: {message}")

    def _is_annotation(self, node: ast.AST) -> bool:
        """Whether an expression is (part of) an annotation or an import."""
        child, parent = node, self._parents.get(node)
        while parent is not None and not isinstance(child, ast.stmt):
            if isinstance(parent, ast.AnnAssign | ast.arg) and child is parent.annotation:
                return True
            if isinstance(parent, ast.FunctionDef) and child is parent.returns:
                return True
            child, parent = parent, self._parents.get(parent)
        return False

    def _import(self, line: int, module: str, name: str) -> None:
        for entry in self._entries:
            inside = entry.module == module or entry.module.startswith(f"{module}.")
            if inside and entry.name.partition(".")[0] == name:
                self._analysis.used.add((entry.module, name))
                return
        self._analysis.findings.append(
            f"{self._name}:{line}: imports {module}.{name}, which the hook map does not list; add "
            f'Reads("{module}", "{name}", ...) to {_READS} or Hook(...) to {_HOOKS}'
            if name
            else f"{self._name}:{line}: imports the module {module}; import names from it instead"
        )

    # -- types -------------------------------------------------------------------------------

    def _type(self, node: ast.expr) -> Type | None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        lines = node.lineno + self._shift, node.end_lineno + self._shift
        return self._types.get((lines[0], node.col_offset, lines[1], node.end_col_offset))

    def _is_module(self, node: ast.expr) -> bool:
        """Whether an expression is an imported module, to which mypy gives no type."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self._imported

    def _owner(self, node: ast.AST) -> str | None:
        """The class of vLLM that the class around a node stands for."""
        while not isinstance(node, ast.Module):
            if isinstance(node, ast.ClassDef):
                return STANDS_FOR.get(f"{self._module}.{node.name}")
            node = self._parents[node]
        return None

    # -- uses --------------------------------------------------------------------------------

    def _access(self, node: ast.expr, base: ast.expr, name: str, *, default: bool = False) -> None:
        """One attribute of one object; with a default, one member of a union may lack it."""
        if _is_super(base):
            owner = self._owner(node)
            if owner is not None and not name.startswith("__"):
                self._use(node, *self._home(owner), name)
            return
        if default and any(self._has(part, name) for part in self._parts_of(base)):
            base_parts = [part for part in self._parts_of(base) if self._has(part, name)]
        else:
            base_parts = self._parts_of(base)
        if self._type(base) is None:
            if not self._is_module(base) and not any(
                part in self._reported for part in ast.walk(base)
            ):
                self._report(
                    node,
                    f"mypy gives no type to `{ast.unparse(base)}` (unreachable code?), so "
                    f"`.{name}` cannot be told",
                )
            return
        for part in base_parts:
            self._access_one(node, base, name, part)

    def _has(self, kind: ProperType, name: str) -> bool:
        info = _class_of(kind)
        return info is not None and any(name in ancestor.names for ancestor in info.mro)

    def _access_special(self, node: ast.expr, base: ast.expr, name: str) -> None:
        """A subscript or call: of interest only where the object is of vLLM."""
        for part in _parts(self._type(base)):
            if isinstance(part, Instance) and _is_vllm(part.type):
                self._access_one(node, base, name, part)

    def _access_one(self, node: ast.expr, base: ast.expr, name: str, kind: ProperType) -> None:
        if isinstance(kind, AnyType):
            if not _is_of_another_library(kind) and not any(
                part in self._reported for part in ast.walk(base)
            ):
                self._report(
                    node,
                    f"the type of `{ast.unparse(base)}`, whose `{name}` is used, is not known; "
                    "annotate it where it comes from with its class (a class of vLLM imported "
                    f"under TYPE_CHECKING), or complete the type in {_READS}",
                )
            return
        info = _class_of(kind)
        if info is None or (not isinstance(kind, Instance) and hasattr(type, name)):
            return  # a function, a module, None; what every class has
        for ancestor in info.mro:
            if ancestor.fullname in STANDS_FOR and name in ancestor.names:
                module, owner = self._home(STANDS_FOR[ancestor.fullname])
                if self._is_declared_only(ancestor, name) or self._is_listed(module, owner, name):
                    self._use(node, module, owner, name)
                return
            if name in ancestor.names and ancestor.fullname != "builtins.object":
                if _is_vllm(ancestor):
                    self._use(node, ancestor.module_name, ancestor.name, name)
                return
        if "builtins.object" in [a.fullname for a in info.mro if name in a.names]:
            return
        mixin = next((a.fullname for a in info.mro if a.fullname in STANDS_FOR), None)
        if mixin is not None:
            self._use(node, *self._home(STANDS_FOR[mixin]), name)
            return
        theirs = next((ancestor for ancestor in info.mro if _is_vllm(ancestor)), None)
        if theirs is not None:
            self._unlisted(node, theirs.module_name, theirs.name, name)

    def _is_declared_only(self, info: TypeInfo, name: str) -> bool:
        """Whether a mixin only says what type an attribute of vLLM's class has."""
        if not isinstance(info.names[name].node, Var):
            return False
        path = ROOT.joinpath(*info.module_name.split(".")).with_suffix(".py")
        text = path.read_text("utf-8") if info.module_name != self._module else None
        tree = self._tree if text is None else ast.parse(text)
        return name not in assigned_on_self(tree, info.name)

    def _use(self, node: ast.AST, module: str, owner: str, name: str) -> None:
        name = "forward" if name == "__call__" else name  # of a torch module
        if self._is_listed(module, owner, name):
            self._analysis.used.add((owner, name))
        else:
            self._unlisted(node, module, owner, name)

    def _is_listed(self, module: str, owner: str, name: str) -> bool:
        return any(
            entry.module == module
            and (
                (isinstance(entry, Reads) and entry.name == owner and name in entry.attributes)
                or (isinstance(entry, Hook) and entry.name == f"{owner}.{name}")
            )
            for entry in self._entries
        )

    def _unlisted(self, node: ast.AST, module: str, owner: str, name: str) -> None:
        self._report(
            node,
            f"uses `{name}` of vLLM's {owner}, which the hook map does not list; add "
            f'"{name}": "<its type>" to Reads("{module}", "{owner}", ...) in {_READS}, or, if its '
            f'parameters matter, Hook("{module}", "{owner}.{name}", ...) to {_HOOKS}',
        )

    def _home(self, owner: str) -> tuple[str, str]:
        """Module and name of a class of vLLM, given with or without its module."""
        module, _, name = owner.rpartition(".")
        if not module:
            module = next(e.module for e in self._entries if e.name.partition(".")[0] == owner)
        return module, name

    def _override(self, node: ast.FunctionDef) -> None:
        """A method of a mixin that replaces one of vLLM's."""
        parent = self._parents.get(node)
        if isinstance(parent, ast.ClassDef) and f"{self._module}.{parent.name}" in STANDS_FOR:
            module, owner = self._home(STANDS_FOR[f"{self._module}.{parent.name}"])
            if self._is_listed(module, owner, node.name):
                self._analysis.used.add((owner, node.name))

    def _call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else None
        called = node.func.id if isinstance(node.func, ast.Name) else called
        self._access_special(node, node.func, "__call__")
        if called in _ACCESSORS and isinstance(node.func, ast.Name) and len(node.args) > 1:
            self._accessor(node)
        elif called in _OPAQUE_ACCESS and not self._is_ours(node.args):
            self._report(node, f"{called}() hides which attributes are read; name them")
        keywords = [keyword for keyword in node.keywords if keyword.arg is not None]
        if not keywords:
            return
        target: ast.expr | None = None
        if called == "replace":
            target = node.func.value if isinstance(node.func, ast.Attribute) else None
            if node.args and not (target and any(map(_is_vllm_instance, self._parts_of(target)))):
                target = node.args[0]  # dataclasses.replace
        elif any(_constructs(part) for part in self._parts_of(node.func)):
            target = node.func
        for part in self._parts_of(target) if target is not None else ():
            info = _class_of(part)
            if info is None or not any(map(_is_vllm, info.mro)):
                continue
            for keyword in keywords:
                name = str(keyword.arg)
                if info.name in KEYWORDS_OF and _constructs(part):
                    owner = KEYWORDS_OF[info.name]
                    self._use(node, *self._home(owner), name)
                elif not self._is_parameter(info, name):
                    assert target is not None
                    self._access_one(node, target, name, part)

    def _is_ours(self, nodes: Sequence[ast.expr]) -> bool:
        parts = [part for node in nodes for part in self._parts_of(node)]
        classes = [info for part in parts if (info := _class_of(part)) is not None]
        return len(classes) == len(parts) > 0 and not any(
            _is_vllm(ancestor) for info in classes for ancestor in info.mro
        )

    def _is_parameter(self, info: TypeInfo, name: str) -> bool:
        """Whether the constructor of a class is in the map with this parameter."""
        return any(
            isinstance(entry, Hook)
            and entry.name == f"{info.name}.__init__"
            and entry.module == info.module_name
            and name in entry.names
            for entry in self._entries
        )

    def _parts_of(self, node: ast.expr) -> list[ProperType]:
        return list(_parts(self._type(node)))

    def _accessor(self, node: ast.Call) -> None:
        """``getattr(object, "name")`` and its kin."""
        names = self._strings(node.args[1])
        if names:
            for name in names:
                self._access(node, node.args[0], name, default=len(node.args) > 2)
            return
        for part in self._parts_of(node.args[0]):
            info = _class_of(part)
            unknown = isinstance(part, AnyType) and not _is_of_another_library(part)
            if unknown or (info is not None and any(map(_is_vllm, info.mro))):
                self._report(
                    node,
                    f"`{ast.unparse(node)}`: the name cannot be told; use a literal, a constant "
                    "of the module or a loop over literals",
                )

    def _strings(self, node: ast.expr) -> list[str]:
        """What a name argument can be: a literal, a module constant, a variable of a loop."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [node.value]
        if not isinstance(node, ast.Name):
            return []
        scope: ast.AST = node
        while not isinstance(scope, ast.Module):
            scope = self._parents[scope]
            if isinstance(scope, ast.For) and (found := _loop_strings(scope, node.id)):
                return found
        for statement in self._tree.body:
            if isinstance(statement, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == node.id
                for target in statement.targets
            ):
                return self._strings(statement.value)
        return []


def unused(analysis: Analysis, entries: Sequence[Entry] = compat.HOOKS) -> list[str]:
    """Entries, or attributes of classes, that no analysed file names."""
    found = []
    for entry in entries:
        if entry.used_by:
            continue
        owner, _, name = entry.name.partition(".")
        if isinstance(entry, Hook):
            if ((owner, name) if name else (entry.module, owner)) not in analysis.used:
                constructor = name == "__init__" and (entry.module, owner) in analysis.used
                found += [] if constructor else [str(entry)]
            continue
        found += [
            f"{entry}.{attribute}"
            for attribute in entry.attributes
            if (owner, attribute) not in analysis.used and attribute not in analysis.literals
        ]
        if not entry.attributes and (entry.module, owner) not in analysis.used:
            found.append(str(entry))
    return found


def assigned_on_self(tree: ast.AST, class_name: str) -> set[str]:
    """Attributes that a class itself sets, on ``self`` or in its body."""
    owner = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == class_name)
    found = {
        node.attr
        for node in ast.walk(owner)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    for statement in owner.body:
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            found.add(getattr(statement.target, "id", ""))
        elif isinstance(statement, ast.Assign):
            found |= {getattr(target, "id", "") for target in statement.targets}
    return found


def _loop_strings(loop: ast.For, variable: str) -> list[str]:
    if not isinstance(loop.iter, ast.Tuple | ast.List):
        return []
    place: int | None = None
    if isinstance(loop.target, ast.Tuple):
        names = [getattr(part, "id", "") for part in loop.target.elts]
        if variable not in names:
            return []
        place = names.index(variable)
    elif getattr(loop.target, "id", "") != variable:
        return []
    found = []
    for row in loop.iter.elts:
        part = row.elts[place] if isinstance(row, ast.Tuple) and place is not None else row
        if not (isinstance(part, ast.Constant) and isinstance(part.value, str)):
            return []
        found.append(part.value)
    return found


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "super"


def _parts(kind: Type | None) -> Iterable[ProperType]:
    """The members of a union; a type variable's bound."""
    proper = get_proper_type(kind)
    if proper is None:
        return
    if isinstance(proper, UnionType):
        for item in proper.items:
            yield from _parts(item)
    elif isinstance(proper, TypeVarType):
        yield from _parts(proper.upper_bound)
    else:
        yield proper


def _class_of(kind: ProperType) -> TypeInfo | None:
    """The class whose attributes an object of this type has; the class itself for a class."""
    if isinstance(kind, Instance):
        return kind.type
    if isinstance(kind, TypeType):
        item = get_proper_type(kind.item)
        return item.type if isinstance(item, Instance) else None
    if isinstance(kind, CallableType | Overloaded) and kind.is_type_obj():
        return kind.type_object()
    return None


def _constructs(kind: ProperType) -> bool:
    return _class_of(kind) is not None and not isinstance(kind, Instance)


def _is_vllm(info: TypeInfo) -> bool:
    return info.module_name.partition(".")[0] == "vllm"


def _is_vllm_instance(kind: ProperType) -> bool:
    return isinstance(kind, Instance) and _is_vllm(kind.type)


def _is_of_another_library(kind: AnyType) -> bool:
    """Whether a value is unknown only because mypy sees no library but vLLM's stubs.

    What our files import from vLLM is in the stubs, or a finding of its own.
    """
    origin = kind
    while origin.source_any is not None:
        origin = origin.source_any
    return origin.type_of_any == TypeOfAny.from_unimported_type
