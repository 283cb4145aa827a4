# SPDX-License-Identifier: Apache-2.0
"""The hook map against the installed vLLM, and against sources in which something changed."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_spec_ext import compat
from vllm_spec_ext.errors import IncompatibleVLLMError
from vllm_spec_ext.source_lookup import Hook

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)

METHOD = Hook("vllm.runner", "Runner.step", "test", names=("a", "b"), exact=True)


def write(root: Path, text: str, module: str = "vllm.runner") -> Path:
    path = root.joinpath(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return root


def problem(root: Path, hook: Hook) -> str | None:
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


def test_every_import_from_vllm_is_in_the_table() -> None:
    known = {(hook.module, hook.name.partition(".")[0]) for hook in compat.HOOKS}
    package = Path(compat.__file__).parent
    for path in [package / "plugin.py", *sorted((package / "engine").glob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("vllm."):
                continue
            for name in node.names:
                # Some names are imported from the package that re-exports them.
                where = [m for m, n in known if n == name.name and m.startswith(str(node.module))]
                assert where, f"{path.name}: {node.module}.{name.name} is not in compat.HOOKS"


@pytest.mark.parametrize(
    ("variable", "name"), [("model", "ModelConfig"), ("parallel", "ParallelConfig")]
)
def test_settings_that_we_refuse_are_in_the_table(variable: str, name: str) -> None:
    known: set[str] = set()
    for hook in compat.HOOKS:
        if hook.name == name:
            known.update(hook.names)
        elif hook.name.startswith(f"{name}."):
            known.add(hook.name.partition(".")[2])
    text = (Path(compat.__file__).parent / "engine" / "limits.py").read_text()
    read = set(re.findall(rf"\b{variable}\.(\w+)", text))
    assert read <= known, f"add to compat.HOOKS: {sorted(read - known)}"


def test_hooks_are_unique_and_documented() -> None:
    names = [str(hook) for hook in compat.HOOKS]
    assert len(set(names)) == len(names)
    for hook in compat.HOOKS:
        assert hook.why, hook
        assert len(hook.tested) == 2, hook


def test_method_with_the_expected_parameters(tmp_path: Path) -> None:
    root = write(tmp_path, "class Runner:\n    def step(self, a, b): ...\n")
    assert problem(root, METHOD) is None


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
    )
    write(tmp_path, text)

    def check(name: str, kind: str, names: tuple[str, ...] = ()) -> str | None:
        return problem(tmp_path, Hook("vllm.runner", name, "test", kind, names))  # type: ignore[arg-type]

    assert check("LIMIT", "constant") is None
    assert check("OTHER", "constant") == "no such constant"
    assert check("Kind", "value", ("y",)) is None
    assert check("Kind", "value", ("z",)) == "does not allow 'z'"
    assert check("Config", "class", ("a", "b")) is None
    assert check("Config", "class", ("a", "c")) == "has no field c"
    assert check("Config.a", "field") is None
    assert check("Config.c", "field") == "no such field"
    assert check("Config.made", "attribute") is None
    assert check("Config.typed", "attribute") is None
    assert check("Config.a", "attribute") == "no such attribute"


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
