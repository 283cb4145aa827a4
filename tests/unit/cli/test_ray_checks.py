# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of Ray."""

from pathlib import Path

import pytest

from vllm_spec_ext.cli import ray_checks
from vllm_spec_ext.cli.ray_checks import MissingImport, check_node, missing_imports
from vllm_spec_ext.errors import SpecExtError

HERE = {"vllm-spec-ext": "0.1.0", "ray": "2.60.0", "vllm": "0.32.0"}

RAY_CODE = """
from typing import TYPE_CHECKING
import vllm.there
from vllm import there, thing
from vllm.there import Gone, Passed
if TYPE_CHECKING:
    from vllm.for_checkers import X
try:
    from vllm.newer import A
except ImportError:
    from vllm.there import Passed as A
try:
    from vllm.needed import B
except ImportError as error:
    raise ImportError("install vLLM") from error
def later():
    from vllm.in_function import C
from vllmette import nothing_of_ours
"""


def test_missing_imports(tmp_path: Path) -> None:
    vllm, llm = tmp_path / "vllm", tmp_path / "ray"
    vllm.mkdir()
    llm.mkdir()
    (vllm / "__init__.py").write_text("thing = 1\n")
    (vllm / "there.py").write_text("from os import path as Passed\n")
    (llm / "code.py").write_text(RAY_CODE)
    found = {gap.name for gap in missing_imports(llm, tmp_path)}
    assert found == {"vllm.there.Gone", "vllm.needed.B", "vllm.in_function.C"}


def test_what_is_lost() -> None:
    kv = MissingImport("_internal/serve/routing_policies/kv_aware/vllm/tokenizer.py", "vllm.x")
    assert kv.lost == "KV-aware routing in Ray Serve"
    assert MissingImport("_internal/serve/core/server.py", "vllm.x").lost is None


@pytest.mark.parametrize(
    ("version", "gaps", "statuses"),
    [
        (None, [], ["ok"]),
        ("2.60.1", [], ["ok", "ok"]),
        ("2.61.0", [], ["note", "ok"]),
        ("2.60.0", [MissingImport("_internal/serve/x.py", "vllm.x")], ["ok", "broken"]),
    ],
)
def test_ray_here(
    version: str | None,
    gaps: list[MissingImport],
    statuses: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(ray_checks, "installed_version", lambda name: version)
    monkeypatch.setattr(ray_checks, "missing_imports", lambda *folders: gaps)
    found = ray_checks.ray_checks()
    assert [check.status for check in found] == statuses
    assert all(check.fix for check in found if check.status != "ok")


def test_the_tested_ray_fits() -> None:
    pytest.importorskip("ray")
    pytest.importorskip("vllm")
    assert [check.status for check in ray_checks.ray_checks()] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ({"vllm-spec-ext": None}, "no vllm-spec-ext, expected 0.1.0"),
        ({"vllm": "0.29.0"}, "vllm 0.29.0, here it is 0.32.0"),
        ({"VLLM_PLUGINS": "other"}, "VLLM_PLUGINS='other' leaves out 'spec_ext'"),
        ({"VLLM_PLUGINS": "other,spec_ext"}, ""),
        ({}, ""),
    ],
)
def test_a_node(there: dict[str, str | None], words: str) -> None:
    found = check_node("10.0.0.7", {**HERE, "VLLM_PLUGINS": None, **there}, HERE)
    assert found.name == "node 10.0.0.7"
    assert found.status == ("broken" if words else "ok")
    assert words in found.found
    assert bool(found.fix) == bool(words)


def test_no_ray_or_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ray_checks, "installed_version", lambda name: None)
        with pytest.raises(SpecExtError, match=r"found no Ray, .* fix: pip install"):
            ray_checks.node_checks("auto")
    ray = pytest.importorskip("ray")

    def refuse(**arguments: object) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(SpecExtError, match="found no Ray cluster at 'auto': nobody there"):
        ray_checks.node_checks("auto")

    def differ(**arguments: object) -> None:
        raise RuntimeError("Version mismatch")

    monkeypatch.setattr(ray, "init", differ)
    with pytest.raises(SpecExtError, match="Version mismatch; fix: the same Ray and Python"):
        ray_checks.node_checks("auto")


def test_a_build_of_this_vllm_is_the_nodes_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_checks.compat, "vllm_version", lambda: "0.32.0+cu129")
    monkeypatch.setattr(ray_checks, "installed_version", HERE.get)
    there = {**HERE, "VLLM_PLUGINS": None}
    monkeypatch.setattr(ray_checks, "_ask_nodes", lambda address: [("10.0.0.7", there)])
    assert [check.status for check in ray_checks.node_checks("auto")] == ["ok"]
