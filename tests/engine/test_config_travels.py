# SPDX-License-Identifier: Apache-2.0
"""The configuration is built on one machine and used on another, as Ray Serve does on GPUs."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import ARGUMENTS

SPECULATIVE = {"method": "input_copy", "num_speculative_tokens": 6}

ARRIVES = """
import pickle, sys
config = pickle.load(open(sys.argv[1], "rb"))
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.metrics.loggers import StatLoggerManager
settings = config.speculative_config.spec_ext
assert InputProcessor.process_inputs._spec_ext_wrapped
assert StatLoggerManager.__init__._spec_ext_wrapped
print(settings.method, settings.options.max_ngram, config.parallel_config.worker_cls)
"""


@pytest.fixture
def build(tiny_model: Path) -> Any:
    """Builds the configuration of a server's engine; each call for the same arguments."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    given = {key: value for key, value in ARGUMENTS.items() if key != "disable_log_stats"}
    arguments = AsyncEngineArgs(model=str(tiny_model), speculative_config=SPECULATIVE, **given)
    return arguments.create_engine_config


def test_building_twice_gives_the_same_and_leaves_nothing(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    one, two = (build().speculative_config for _ in range(2))
    assert list(tmp_path.iterdir()) == []
    assert one.spec_ext == two.spec_ext
    assert (one.draft_models, one.cache_views) == (two.draft_models, two.cache_views)


def test_a_copy_is_equal_and_wraps_nothing_twice(build: Any) -> None:
    from vllm.v1.metrics.loggers import StatLoggerManager

    config = build().speculative_config
    wrapped = StatLoggerManager.__init__
    copied = copy.deepcopy(config)
    assert copied.spec_ext == config.spec_ext
    assert StatLoggerManager.__init__ is wrapped


def test_it_arrives_in_a_process_with_the_package(build: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.pickle"
    config = build()
    path.write_bytes(pickle.dumps(config))
    done = subprocess.run(
        [sys.executable, "-c", ARRIVES, str(path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = config.speculative_config.spec_ext.options.max_ngram
    assert done.stdout.split() == ["input_copy", str(expected), config.parallel_config.worker_cls]


def test_a_process_without_the_package_says_so_in_our_words(build: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.pickle"
    path.write_bytes(pickle.dumps(build().speculative_config))
    done = subprocess.run(  # -S: a Python without its packages
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import pickle; pickle.load(open({str(path)!r}, 'rb'))",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "of vllm-spec-ext arrived where packages are missing: found no vllm_spec_ext;" in last
    assert "runtime_env" in last
