# SPDX-License-Identifier: Apache-2.0
"""Proposers by name: ours, those of other packages, and what may be wrong with those."""

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_spec_ext.cli import environment_checks
from vllm_spec_ext.errors import SpecExtError, UnknownNameError
from vllm_spec_ext.plugin import requested_method
from vllm_spec_ext.proposers import registry

Install = Callable[..., None]

MODULE = """
from vllm_spec_ext.proposers.base import BaseProposer, proposer

@proposer("echo", summary="Says nothing.")
class Echo(BaseProposer):
    def propose(self, step):
        return []

class Bare(BaseProposer):
    pass
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Pretend that other packages list these entry points."""
    (tmp_path / "echo_package.py").write_text(MODULE)
    (tmp_path / "broken_package.py").write_text("import no_such_module_at_all")
    monkeypatch.syspath_prepend(tmp_path)

    def pretend(**targets: str) -> None:
        group = registry.ENTRY_POINT_GROUP
        found = [EntryPoint(name.rstrip("_"), target, group) for name, target in targets.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: found)
        registry._third_party.cache_clear()

    yield pretend
    registry._third_party.cache_clear()
    sys.modules.pop("echo_package", None)


def test_every_builtin_is_what_it_says() -> None:
    for name in registry.BUILTIN:
        found = registry.info(name)
        assert found.name == name
        assert found.summary.endswith(".")
        assert found.best_for
        assert found.cost
        assert found.num_speculative_tokens is not None


def test_a_third_partys_proposer(install: Install) -> None:
    install(echo="echo_package:Echo")
    assert registry.names() == [*registry.BUILTIN, "echo"]
    assert registry.info("echo").summary == "Says nothing."
    assert registry.info("echo").num_speculative_tokens is None
    assert "echo_package" in sys.modules


def test_names_load_nothing(install: Install) -> None:
    install(echo="echo_package:Echo", broken="broken_package:Broken")
    assert set(registry.names()) == {*registry.BUILTIN, "echo", "broken"}
    assert "echo_package" not in sys.modules


def test_duplicates_are_refused(install: Install) -> None:
    install(echo="echo_package:Echo", echo_="other_package:Echo")
    with pytest.raises(SpecExtError, match=r"two proposers are called 'echo'.*uninstall or rename"):
        registry.load("echo")
    install(input_copy="echo_package:Echo")
    with pytest.raises(SpecExtError, match=r"two proposers are called 'input_copy'"):
        registry.load("input_copy")


def test_doctor_names_a_duplicate_and_goes_on(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_checks, "installed_version", lambda name: "0.32.0")
    install(auto="echo_package:Echo")
    check = environment_checks._methods()
    assert check.status == "broken"
    assert "two proposers are called 'auto'" in check.found


def test_duplicates_disturb_nobody_who_does_not_ask_for_them(install: Install) -> None:
    """Another engine in this environment, of vLLM's own method."""
    install(echo="echo_package:Echo", echo_="other_package:Echo", auto="echo_package:Echo")
    assert registry.names() == [*registry.BUILTIN, "echo"]
    asked: Any = SimpleNamespace(speculative_config={"method": "ngram"})
    assert requested_method(asked) is None
    assert registry.info("input_copy").name == "input_copy"


def test_classes_without_the_decorator_or_under_another_name(install: Install) -> None:
    install(bare="echo_package:Bare", wrong_name="echo_package:Echo")
    for name in ("bare", "wrong_name"):
        with pytest.raises(SpecExtError, match=rf"not a class decorated with @proposer.'{name}'"):
            registry.load(name)


def test_modules_that_cannot_be_imported(install: Install) -> None:
    install(broken="broken_package:Broken", missing="echo_package:Nothing")
    with pytest.raises(SpecExtError, match=r"'broken' .*cannot be imported: No module named"):
        registry.load("broken")
    with pytest.raises(SpecExtError, match=r"'missing' .*cannot be imported"):
        registry.load("missing")


def test_unknown_method_offers_the_nearest() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown speculative method: 'input_copi'"
    ) as error:
        registry.load("input_copi")
    assert "Did you mean 'input_copy'?" in str(error.value)
