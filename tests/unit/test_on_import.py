# SPDX-License-Identifier: Apache-2.0
"""A module is changed right after its first import, whoever looked for it before."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vllm_spec_ext.on_import import when_imported


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of one that was never imported."""
    name = "imported_later"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_looking_for_a_module_is_not_importing_it(module: str) -> None:
    seen: list[ModuleType] = []
    finders = len(sys.meta_path)
    when_imported(module, seen.append)
    when_imported(module, seen.append)  # once is enough
    assert len(sys.meta_path) == finders + 1
    assert importlib.util.find_spec(module) is not None
    assert not seen
    found = importlib.import_module(module)
    assert seen == [found]
    assert len(sys.meta_path) == finders
    importlib.reload(found)
    when_imported(module, seen.append)
    assert seen == [found, found]


def test_an_import_that_failed_is_tried_again(module: str, tmp_path: Path) -> None:
    seen: list[ModuleType] = []
    when_imported(module, seen.append)
    file = tmp_path / f"{module}.py"
    file.write_text("raise RuntimeError('not yet')\n")
    with pytest.raises(RuntimeError, match="not yet"):
        importlib.import_module(module)
    file.write_text("the_value = 2\n")
    assert importlib.import_module(module).the_value == 2
    assert len(seen) == 1
