# SPDX-License-Identifier: Apache-2.0
"""The hook map against the installed vLLM, and against sources in which something changed."""

import ast
import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_spec_ext import compat
from vllm_spec_ext.compat import Hook, Reads
from vllm_spec_ext.compat.entries import Kind
from vllm_spec_ext.errors import IncompatibleVLLMError

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)


@pytest.fixture(autouse=True)
def _a_cache_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


METHOD = Hook("vllm.runner", "Runner.step", "test", names=("a", "b"), exact=True)


def write(root: Path, text: str, module: str = "vllm.runner") -> Path:
    path = root.joinpath(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return root


def problem(root: Path, hook: Hook | Reads) -> str | None:
    (status,) = compat.check(root, [hook])
    assert status.ok == (status.problem is None)
    return status.problem


@needs_vllm
def test_installed_vllm_has_every_hook() -> None:
    statuses = compat.check()
    assert compat.problems(statuses) == []
    assert [status.hook for status in statuses] == list(compat.HOOKS)
    assert compat.is_tested_version(compat.vllm_version())
    compat.require()


@needs_vllm
def test_checking_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from vllm_spec_ext import compat; compat.require(); "
        "print([m for m in ('torch', 'vllm', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_hooks_are_unique_and_documented() -> None:
    names = [(str(hook), hook.part) for hook in compat.HOOKS]
    assert len(set(names)) == len(names)
    for hook in compat.HOOKS:
        assert hook.why, hook


def test_method_with_the_expected_parameters(tmp_path: Path) -> None:
    root = write(tmp_path, "class Runner:\n    def step(self, a, b): ...\n")
    assert problem(root, METHOD) is None


def test_a_parameter_of_later_versions(tmp_path: Path) -> None:
    hook = dataclasses.replace(METHOD, newer=("c",))
    for signature in ("self, a, b", "self, a, c, b"):
        root = write(tmp_path, f"class Runner:\n    def step({signature}): ...\n")
        assert problem(root, hook) is None
    root = write(tmp_path, "class Runner:\n    def step(self, a, b, c, d): ...\n")
    assert "new parameters d;" in str(problem(root, hook))


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        ("self, a", "has no parameter b; found (a)"),
        ("self, a, renamed", "has no parameter b"),
        ("self, b, a", "expected the order (a, b)"),
        ("self, a, b, c", "new parameters c"),
        ("self, a, b, *, c=None", "new parameters c"),
    ],
)
def test_changed_signature(tmp_path: Path, signature: str, words: str) -> None:
    root = write(tmp_path, f"class Runner:\n    def step({signature}): ...\n")
    found = problem(root, METHOD)
    assert found is not None
    assert words in found


def test_new_parameter_is_fine_where_we_pass_everything_on(tmp_path: Path) -> None:
    root = write(tmp_path, "class Runner:\n    def step(self, a, new, b, newer=1): ...\n")
    assert problem(root, Hook("vllm.runner", "Runner.step", "test", names=("a", "b"))) is None


def test_last_definition_counts_and_branches_are_searched(tmp_path: Path) -> None:
    text = (
        "try:\n    import x\nexcept ImportError:\n"
        "    class Runner:\n"
        "        @overload\n        def step(self, a): ...\n"
        "        async def step(self, a, b): ...\n"
    )
    assert problem(write(tmp_path, text), METHOD) is None


def test_missing_method_class_module_and_broken_file(tmp_path: Path) -> None:
    write(tmp_path, "class Runner:\n    def other(self): ...\n")
    assert problem(tmp_path, METHOD) == "no such function"
    write(tmp_path, "class Other: ...\n")
    assert problem(tmp_path, METHOD) == "no such function"
    write(tmp_path, "class Runner(:\n")
    assert "cannot be parsed" in (problem(tmp_path, METHOD) or "")
    gone = Hook("vllm.gone", "Runner.step", "test")
    assert problem(tmp_path, gone) == "there is no module vllm.gone"


def test_fields_attributes_constants_and_values(tmp_path: Path) -> None:
    text = (
        "LIMIT = 128\nKind = Literal['x', 'y']\n"
        "class Config:\n    a: int = 1\n    b: str\n"
        "    def __init__(self):\n        self.made = 1\n        self.typed: int = 2\n"
        "        self.first, (self.second, other.other) = 1, (2, 3)\n        local = 4\n"
        "    def step(self): ...\n    @property\n    def size(self): ...\n"
    )
    write(tmp_path, text)

    def check(name: str, kind: Kind, names: tuple[str, ...] = ()) -> str | None:
        return problem(tmp_path, Hook("vllm.runner", name, "test", kind, names))

    def read(*names: str, of: str = "Config") -> str | None:
        return problem(tmp_path, Reads("vllm.runner", of, "test", dict.fromkeys(names, "int")))

    assert check("LIMIT", "constant") is None
    assert check("OTHER", "constant") == "no such constant"
    assert check("Kind", "value", ("y",)) is None
    assert check("Kind", "value", ("z",)) == "does not allow 'z'"
    assert read("a", "b") is None
    assert read("a", "c", "d") == "has no attribute c, d"
    assert read("made", "typed", "first", "second") is None
    assert read("other") == "has no attribute other"  # set on another object
    assert read("step", "size") is None
    assert read("local") == "has no attribute local"
    assert read("a", of="Gone") == "no such class"


def test_attributes_of_base_classes_in_other_modules(tmp_path: Path) -> None:
    """Through relative imports, packages that pass a class on, other names, generics, cycles."""
    write(tmp_path, "class Mixin:\n    mixed: int\n", "vllm.deep.mixin")
    write(tmp_path, "from .mixin import Mixin\n", "vllm.deep.__init__")
    write(
        tmp_path,
        "from .deep import Mixin as Renamed\n"
        "class Base(Renamed):\n    def __init__(self):\n        self.based = 1\n",
        "vllm.base",
    )
    write(
        tmp_path,
        "try:\n    from vllm.base import Base\nexcept ImportError:\n    Base = object\n"
        "import torch\n"
        "class Again(Runner): ...\n"
        "class Runner(Base[int], torch.nn.Module, Again):\n    own = 1\n",
    )

    def read(*names: str) -> str | None:
        return problem(tmp_path, Reads("vllm.runner", "Runner", "test", dict.fromkeys(names, "")))

    assert read("own", "based", "mixed") is None
    assert read("based", "gone") == "has no attribute gone"
    found = compat.check(
        tmp_path, [Reads("vllm.runner", "Runner", "test", {"own": "int", "gone": "int"})]
    )
    assert found[0].missing == ("gone",)


def test_a_base_class_that_we_rely_on(tmp_path: Path) -> None:
    write(tmp_path, "class Tensors(NamedTuple):\n    a: int\n")
    assert problem(tmp_path, Reads("vllm.runner", "Tensors", "t", {"a": ""}, "NamedTuple")) is None
    found = problem(tmp_path, Reads("vllm.runner", "Tensors", "t", {}, "Struct"))
    assert found == "is no longer a Struct"


def test_what_only_tools_need_does_not_keep_an_engine_from_starting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(tmp_path, "class Runner:\n    own = 1\n")
    gone = Reads("vllm.runner", "Runner", "test", {"gone": "int"}, part="tools")
    monkeypatch.setattr(compat, "HOOKS", (gone,))
    compat.require.__wrapped__(tmp_path)
    monkeypatch.setattr(compat, "HOOKS", (dataclasses.replace(gone, part="engine"),))
    with pytest.raises(IncompatibleVLLMError, match="has no attribute gone"):
        compat.require.__wrapped__(tmp_path)


def test_what_was_in_order_is_looked_up_again_when_its_source_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tmp_path / "site"
    write(root, "class Runner(Base):\n    own = 1\n\nfrom vllm.base import Base\n")
    write(root, "class Base:\n    there = 1\n", "vllm.base")
    reads = Reads("vllm.runner", "Runner", "test", {"own": "int", "there": "int"})
    monkeypatch.setattr(compat, "HOOKS", (reads,))
    parsed: list[str] = []
    parse = compat.Source._parse

    def watched(self: compat.Source, module: str) -> ast.Module | None:
        parsed.append(module)
        return parse(self, module)

    monkeypatch.setattr(compat.Source, "_parse", watched)
    require = compat.require.__wrapped__
    require(root)
    assert parsed
    parsed.clear()
    require(root)
    assert not parsed
    # Another hook map, and another vLLM.
    monkeypatch.setattr(compat, "HOOKS", (dataclasses.replace(reads, attributes={"own": "int"}),))
    require(root)
    assert parsed
    monkeypatch.setattr(compat, "HOOKS", (reads,))
    write(root, "class Base:\n    gone = 1\n", "vllm.base")  # as long as before
    os.utime(root / "vllm/base.py", ns=(1, 1))
    with pytest.raises(IncompatibleVLLMError, match="has no attribute there"):
        require(root)
    with pytest.raises(IncompatibleVLLMError, match="has no attribute there"):
        require(root)  # what is wrong is not remembered


def test_a_damaged_note_and_a_folder_that_cannot_be_written_do_no_harm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tmp_path / "site"
    write(root, "class Runner:\n    own = 1\n")
    monkeypatch.setattr(compat, "HOOKS", (Reads("vllm.runner", "Runner", "t", {"own": "int"}),))
    compat.require.__wrapped__(root)
    (note,) = (tmp_path / "cache/vllm-spec-ext/compat").iterdir()
    for content in ("", "[]", "{}", '{"x": 1', '{"/nowhere": [1, 2]}'):
        note.write_text(content)
        compat.require.__wrapped__(root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache/vllm-spec-ext/compat" / note.name))
    compat.require.__wrapped__(root)
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    compat.require.__wrapped__(root)


def test_require_names_found_expected_fix_and_how_to_disable(tmp_path: Path) -> None:
    write(tmp_path, "__version__ = version = '0.99.1'\n", "vllm._version")
    with pytest.raises(IncompatibleVLLMError) as error:
        compat.require(tmp_path)
    for words in ("vLLM 0.99.1", "create_speculative_config", ">=0.32,<0.34", "pip install"):
        assert words in str(error.value)
    assert "VLLM_PLUGINS" in str(error.value)


def test_no_vllm_at_all(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleVLLMError, match="no vLLM found"):
        compat.check(tmp_path)


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("0.32.0", True),
        ("0.33.0+cpu", True),
        ("0.33.1rc2.dev3", True),
        ("0.31.9", False),
        ("0.34.0", False),
        ("1.0.0", False),
        ("dev", False),
        (None, False),
    ],
)
def test_version_range(version: str | None, tested: bool) -> None:
    assert compat.is_tested_version(version) is tested
