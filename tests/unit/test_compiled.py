# SPDX-License-Identifier: Apache-2.0
"""Compiled loops: one set of numba settings, with and without a folder for the machine code."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("proposers", "scorers")

NO_CACHE = """
import errno, importlib, sys
from numba.core import caching

def read_only(self):
    raise OSError(errno.EROFS, "Read-only file system")

for locator in caching.CacheImpl._locator_classes:
    locator.ensure_cache_path = read_only
module = importlib.import_module(sys.argv[1])
kernels = [value for value in vars(module).values() if hasattr(value, "py_func")]
assert kernels and all(type(kernel._cache).__name__ == "NullCache" for kernel in kernels)
"""


def modules_with_kernels() -> list[str]:
    found = [
        "vllm_spec_ext." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if re.search(r"^@kernel\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert {name.split(".")[1] for name in found} == set(FOLDERS)
    return found


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )


@pytest.mark.parametrize("module", modules_with_kernels())
def test_kernels_need_no_folder_for_their_machine_code(module: str) -> None:
    """As in a read-only container without a home; they are compiled anew in every process."""
    done = run_python(NO_CACHE, module)
    assert done.returncode == 0, done.stderr


def test_a_kernel_runs_without_a_cache() -> None:
    code = (
        "from vllm_spec_ext.scorers.walk.tree import node_depths\n"
        "import numpy as np\n"
        "assert node_depths(np.array([-1, 0, 0]), np.array([0, 3])).tolist() == [0, 1, 1]\n"
    )
    done = run_python(NO_CACHE + code, "vllm_spec_ext.scorers.walk.tree")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("folder", FOLDERS)
def test_all_kernels_share_their_settings(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        assert "njit" not in path.read_text(encoding="utf-8"), path


def test_settings_of_one_kernel_reach_numba() -> None:
    pytest.importorskip("numba")
    from vllm_spec_ext.compiled import kernel

    def total(values: list[float]) -> float:
        return sum(values)

    loops: list[Any] = [kernel(total), kernel(fastmath={"reassoc"})(total)]
    assert [loop.targetoptions["fastmath"] for loop in loops] == [set(), {"reassoc"}]
    assert all(loop.targetoptions["nogil"] for loop in loops)


def test_a_kernel_is_compiled_anew_when_one_that_it_calls_has_changed(tmp_path: Path) -> None:
    """As after an update of a checkout, in which the caller's own file stays as it was."""
    pytest.importorskip("numba")
    inner = tmp_path / "inner.py"
    imports = "from vllm_spec_ext.compiled import kernel\n"
    inner.write_text(f"{imports}ADDED = 1\n\n@kernel\ndef added(x):\n    return x + ADDED\n")
    (tmp_path / "outer.py").write_text(
        f"{imports}from inner import added\n\n@kernel\ndef twice(x):\n    return 2 * added(x)\n"
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import outer; print(outer.twice(5))"
    hits = code + "; print(sum(outer.twice.stats.cache_hits.values()))"
    assert run_python(hits).stdout.split() == ["12", "0"]
    assert run_python(hits).stdout.split() == ["12", "1"]
    inner.write_text(inner.read_text().replace("ADDED = 1", "ADDED = 10"))
    assert run_python(hits).stdout.split() == ["30", "0"]
