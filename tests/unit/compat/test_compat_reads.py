# SPDX-License-Identifier: Apache-2.0
"""The hook map against our own code: what is read of vLLM is listed, what is listed is read.

If this fails after a change to the engine adapter, each line of the message says what to add where.
"""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from vllm_reads import (
    ROOT,
    STANDS_FOR,
    Analysis,
    analyse,
    assigned_on_self,
    files_that_touch_vllm,
    unused,
)

from vllm_spec_ext import compat
from vllm_spec_ext.compat import Hook, Reads
from vllm_spec_ext.compat.source import Source

MAP = (
    Reads(
        "vllm.runner",
        "Runner",
        "test",
        {
            "batch": "Batch",
            "requests": "dict[str, Request]",
            "rows": "list[list[Request]]",
            "maybe": "Request | None",
            "loose": "object",
            "size": "int",
            "tensor": "torch.Tensor",
        },
    ),
    Hook("vllm.runner", "Runner.step", "test", names=("batch",)),
    Hook("vllm.worker", "Worker.step", "test"),
    Reads("vllm.runner", "Batch", "test", {"names": "list[str]", "never": "int"}),
    Reads("vllm.request", "Request", "test", {"seed": "int", "replace": "Callable[..., Request]"}),
    Hook("vllm.request", "make", "test", type="Request"),
    Hook("vllm.request", "unknown", "test"),
)

HEADER = """
from typing import TYPE_CHECKING, Any
import dataclasses
import torch
import numpy as np
from vllm.request import Request, make, unknown
if TYPE_CHECKING:
    from vllm.runner import Batch, Runner
NAME = "by_constant"
class SpecRunnerMixin:
    batch: "Batch"
    size: int
    undeclared_in_map: int
    def __init__(self) -> None:
        self.ours = 1
"""

UNLISTED = {
    "directly": ("def f(r: 'Runner'):\n    return r.new", "Runner"),
    "alias": ("def f(r: 'Runner'):\n    b = r.batch\n    c = b\n    c.new", "Batch"),
    "chain": ("def f(r: 'Runner'):\n    return r.batch.new", "Batch"),
    "container": ("def f(r: 'Runner'):\n    return r.requests['a'].new", "Request"),
    "loop": (
        "def f(r: 'Runner'):\n    return [x.new for y in r.rows for x in y]",
        "Request",
    ),
    "unpacking": (
        "def f(r: 'Runner'):\n    a, (b, c) = 1, (2, r.batch)\n    c.new",
        "Batch",
    ),
    "nested": ("def f(r: 'Runner'):\n    def g():\n        return r.batch.new", "Batch"),
    "lambda": ("def f(r: 'Runner'):\n    return lambda: r.new", "Runner"),
    "narrowed": (
        "def f(r: 'Runner'):\n    if r.maybe is not None:\n        r.maybe.new",
        "Request",
    ),
    "isinstance": ("def f(x: object):\n    if isinstance(x, Request):\n        x.new", "Request"),
    "inherited": ("class Mine(Request):\n    def f(self):\n        return self.new", "Request"),
    "result": ("def f():\n    return make().new", "Request"),
    "written": ("def f(r: 'Runner'):\n    r.new = 1", "Runner"),
    "deleted": ("def f(r: 'Runner'):\n    del r.batch.new", "Batch"),
    "added to": ("def f(r: 'Runner'):\n    r.new += 1", "Runner"),
    "getattr": (
        "def f(r: 'Runner'):\n    return getattr(r, 'new', None)",
        "Runner",
    ),
    "hasattr": ("def f(r: 'Runner'):\n    return hasattr(r.batch, 'new')", "Batch"),
    "setattr": ("def f(r: 'Runner'):\n    setattr(r, 'new', 1)", "Runner"),
    "getattr loop": (
        "def f(r: 'Runner'):\n    for n, _ in (('size', 1), ('new', 2)):\n        getattr(r, n)",
        "Runner",
    ),
    "constructor": ("def f():\n    return Request(new=1)", "Request"),
    "replace": ("def f(r: Request):\n    return dataclasses.replace(r, new=1)", "Request"),
    "own replace": ("def f(r: Request):\n    return r.replace(new=1)", "Request"),
    "class": ("def f():\n    return Request.new", "Request"),
    "subscript": ("def f(r: 'Runner'):\n    return r.batch[0]", "Batch"),
    "call": ("def f(r: 'Runner'):\n    return r.batch(0)", "Batch"),
}

UNKNOWN = {
    "any": "def f(r: Any):\n    return r.new",
    "untyped": "def f(r):\n    return r.new",
    "any member": "def f(r: dict[str, Any]):\n    return r['a'].new",
    "no type in the map": "def f():\n    return unknown().new",
    "any from getattr": "def f(r: 'Runner'):\n    return getattr(r, 'loose', None).new",
    "getattr of any": "def f(r: Any):\n    return getattr(r, 'new')",
    "dynamic name": "def f(r: 'Runner', name: str):\n    return getattr(r, name)",
    "vars": "def f(r: 'Runner'):\n    return vars(r)",
    "unreachable": "def f(r: 'Runner'):\n    return 1\n    return r.batch",
    "not in the map": "from vllm.other import Thing\ndef f(t: Thing):\n    return t.new",
    "whole module": "import vllm.request\ndef f():\n    return vllm.request.make()",
}

FINE = {
    "listed": "def f(r: 'Runner'):\n    return r.batch.names[0].upper(), r.rows[0][0].seed",
    "own": "class A:\n    x = 1\ndef f(a: A):\n    return a.x, getattr(a, 'x'), np.zeros(3).shape",
    "tensor": "def f(r: 'Runner', t: torch.Tensor):\n    return (r.tensor[0] + t).sum().device",
    "of every class": "def f(r: 'Runner'):\n    return type(r).__name__, r.__class__",
    "annotation": "def f(r: torch.Tensor) -> 'np.ndarray[int]': ...",
}


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    """All snippets in one run of mypy; a finding starts with its snippet's name."""
    snippets = {name: text for name, (text, _) in UNLISTED.items()} | UNKNOWN | FINE
    files: dict[str, Path | str] = {
        f"snippet.{name.replace(' ', '_')}": f"{HEADER}\n{text}\n"
        for name, text in snippets.items()
    }
    return analyse(files, tmp_path_factory.mktemp("snippets"), MAP)


def findings(analysis: Analysis, name: str) -> list[str]:
    start = f"snippet.{name.replace(' ', '_')}:"
    return [
        finding.removeprefix(start) for finding in analysis.findings if finding.startswith(start)
    ]


@pytest.mark.parametrize("name", UNLISTED)
def test_an_attribute_that_is_not_listed_is_found(synthetic: Analysis, name: str) -> None:
    (found,) = findings(synthetic, name)
    assert f"of vLLM's {UNLISTED[name][1]}, which the hook map does not list; add" in found
    assert f'"{UNLISTED[name][1]}", ...) in vllm_spec_ext/compat/reads.py' in found


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_told_is_found(synthetic: Analysis, name: str) -> None:
    assert findings(synthetic, name)


@pytest.mark.parametrize("name", FINE)
def test_other_attributes_are_left_alone(synthetic: Analysis, name: str) -> None:
    assert findings(synthetic, name) == []


def test_mixins_stand_for_a_class_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STANDS_FOR, "snippet.mixin.SpecRunnerMixin", "Runner")
    body = """
    def step(self, batch: "Batch"):
        super().step(batch)
        self.ours, self.size
        self.undeclared_in_map
        self.declared_nowhere
        super().other()
"""
    found = analyse({"snippet.mixin": HEADER + body}, tmp_path, MAP)
    names = [re.search("uses `(.*?)` of vLLM's Runner", line) for line in found.findings]
    assert {n.group(1) for n in names if n} == {"undeclared_in_map", "declared_nowhere", "other"}
    assert len(found.findings) == 3
    assert {("Runner", "size"), ("Runner", "step")} <= found.used
    assert not {("Runner", "ours"), ("Worker", "step")} & found.used


def test_what_is_listed_for_nothing_is_found(synthetic: Analysis) -> None:
    assert unused(synthetic, MAP) == [
        "vllm.runner.Runner.step",
        "vllm.worker.Worker.step",
        "vllm.runner.Batch.never",
    ]


# -- our own code -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    files: dict[str, Path | str] = dict(files_that_touch_vllm())
    return analyse(files, tmp_path_factory.mktemp("ours"))


def test_every_attribute_of_vllm_that_we_use_is_listed(ours: Analysis) -> None:
    assert not ours.findings, "\n".join(["", *sorted(ours.findings)])


def test_everything_listed_is_used(ours: Analysis) -> None:
    found = unused(ours)
    assert not found, "\n".join(["no code of ours uses these; remove them:", *found])


def test_files_in_used_by_exist_and_name_what_they_use() -> None:
    for entry in compat.HOOKS:
        if not entry.used_by:
            continue
        name, _, reason = entry.used_by.partition(": ")
        path = ROOT / name if name.startswith("proposers/") else ROOT / "vllm_spec_ext" / name
        text = path.read_text(encoding="utf-8")
        if isinstance(entry, Reads):
            assert all(attribute in text for attribute in entry.attributes), str(entry)
        else:
            assert reason, str(entry)


def test_the_adapter_is_what_is_looked_at() -> None:
    found = files_that_touch_vllm()
    assert {"vllm_spec_ext.plugin", "vllm_spec_ext.bench.worker_extension"} <= set(found)
    engine = ROOT / "vllm_spec_ext" / "engine"
    assert {path.stem for path in engine.rglob("*.py")} <= {name.split(".")[-1] for name in found}


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_what_our_mixins_replace_in_vllm_is_listed() -> None:
    root = compat.find_root()
    assert root is not None
    source = Source(root)
    listed = {hook.name for hook in compat.FUNCTIONS}
    listed |= {f"{entry.name}.{name}" for entry in compat.CLASSES for name in entry.attributes}
    homes = {entry.name: entry.module for entry in reversed(compat.CLASSES)}  # the first one
    for mixin, stood_for in STANDS_FOR.items():
        module, _, name = mixin.rpartition(".")
        tree = ast.parse(ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text("utf-8"))
        (node,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
        ours = frozenset(n.name for n in node.body if isinstance(n, ast.FunctionDef))
        ours |= assigned_on_self(tree, name)
        home, _, owner = stood_for.rpartition(".")
        home = home or homes[owner]
        for taken in ours - source.absent(home, owner, ours):
            assert f"{owner}.{taken}" in listed, (
                f"{mixin}.{taken} replaces what vLLM's {owner} has under that name; rename ours, "
                f'or add "{taken}" to Reads("{home}", "{owner}", ...) in '
                f'vllm_spec_ext/compat/reads.py, or Hook("{home}", "{owner}.{taken}", ...) '
                "to vllm_spec_ext/compat/hooks.py"
            )


# Such numbers are wrong after vLLM's next release, and nobody notices.
LINE_REFERENCE = re.compile(r"\bll?\. ?\d{2,}|\b[\w/]+\.py:\d+|\.py,? lines? \d+")
TEXTS = ("*.py", "*.md", "*.toml", "*.yml", "*.sh", "Makefile")


def test_vllm_is_referred_to_by_name_and_not_by_line() -> None:
    assert LINE_REFERENCE.search("(vLLM 0.32 engine/" + "arg_utils.py" + ":2060)")
    assert LINE_REFERENCE.search('"""l.' + "1172: requests come and go")
    folders = ("vllm_spec_ext", "proposers", "scorers", "docs", "examples", "scripts", "tests")
    paths = [path for folder in folders for glob in TEXTS for path in (ROOT / folder).rglob(glob)]
    paths += [path for glob in TEXTS for path in ROOT.glob(glob)]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in paths
        for line in path.read_text(encoding="utf-8").splitlines()
        if LINE_REFERENCE.search(line) and "OutOfMemoryError" not in line  # a log line in a test
    ]
    assert not found, "\n".join(["name the function of vLLM instead of a line:", *found])
