# SPDX-License-Identifier: Apache-2.0
"""`vllm-spec doctor --method` on the small real model: a drafter that is fine, and broken ones."""

import importlib.util
import json
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import damaged_drafters
import pytest
from published_runs import model_folder, vllm_spec

from vllm_spec_ext.cli.demo_drafters import demo_heads

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(
        not any(entry.name == "spec_ext" for entry in entry_points(group="vllm.general_plugins")),
        reason="needs this package installed, so that vLLM finds its entry point",
    ),
]

_MAX_TOKENS = 40
_PROMPTS = (
    "Repeat this list and number the items: a tent, two sleeping bags, a stove, a lamp.",
    "Write three sentences about a harbour in the morning.",
    "Explain in simple words why the sky is blue.",
    "Write a Python function that returns the average of a list of numbers.",
)


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in _PROMPTS))
    return file


def examined(method: str, folder: Path, prompt_file: Path) -> tuple[int, dict[str, Any]]:
    """Exit status, and what is said of the one drafter."""
    done = vllm_spec(
        *("doctor", "--method", f"{method}={json.dumps({'model': str(folder)})}", "--json"),
        *("--model", model_folder(), "--prompts", str(prompt_file)),
        *("--max-tokens", str(_MAX_TOKENS)),
        forked=True,
    )
    assert done.returncode in (0, 1), done.stderr
    (found,) = json.loads(done.stdout)["drafters"]
    return done.returncode, found


def test_packaged_heads_are_healthy(prompt_file: Path) -> None:
    status, found = examined("blockwise", demo_heads(), prompt_file)
    assert (status, found["verdict"], found["causes"]) == (0, "healthy", [])
    assert found["measured"]["first_token"]["share"] > 0.75 * found["expected"]
    assert found["measured"]["steps_without_draft"] == 0


@pytest.mark.parametrize(
    ("method", "damage", "cause", "figure"),
    [
        ("blockwise", damaged_drafters.shuffled_head, "damaged weights", "draft token 1 is right"),
        ("blockwise", damaged_drafters.random_heads, "not trained for this target", "expected"),
    ],
)
def test_the_cause_is_named(
    method: str,
    damage: Callable[[Path], Path],
    cause: str,
    figure: str,
    prompt_file: Path,
    tmp_path: Path,
) -> None:
    status, found = examined(method, damage(tmp_path / "drafter"), prompt_file)
    assert (status, found["verdict"]) == (1, "broken")
    assert [one["name"] for one in found["causes"]] == [cause]
    assert figure in found["causes"][0]["figure"]
    # The engine drafts what the files say: the fault is theirs.
    inside = found["measured"]["first_token"]["share"]
    assert found["trials"]["as its files say"]["share"] == pytest.approx(inside, abs=0.05)


def test_heads_trained_without_the_last_norm(prompt_file: Path, tmp_path: Path) -> None:
    folder = damaged_drafters.heads_before_norm(
        tmp_path / "drafter", model_folder(), prompt_file, _MAX_TOKENS
    )
    status, found = examined("blockwise", folder, prompt_file)
    assert (status, found["verdict"]) == (1, "broken")
    assert [one["name"] for one in found["causes"]] == ["wrong norm"]
    assert "in front of the target's last norm" in found["causes"][0]["figure"]


def test_heads_of_another_tokenizer_start_no_engine(prompt_file: Path, tmp_path: Path) -> None:
    folder = damaged_drafters.random_heads(tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    config["tokenizer_fingerprint"] = "sha256:" + 64 * "0"
    (folder / "config.json").write_text(json.dumps(config))
    status, found = examined("blockwise", folder, prompt_file)
    assert status == 1
    assert [one["name"] for one in found["causes"]] == ["other tokenizer"]
    assert found["measured"] is None
