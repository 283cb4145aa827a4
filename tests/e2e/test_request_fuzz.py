# SPDX-License-Identifier: Apache-2.0
"""No HTTP request kills, stalls or bloats a server, or changes another one's text.

A few hundred random requests for each configuration; ``VLLM_SPEC_FUZZ_REQUESTS=10000`` or
``python tests/e2e/fuzz_load.py --requests 10000`` for a long run.
"""

import importlib.util
import os
import re
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from fuzz_load import CONFIGURATIONS, MAX_GROWTH_BYTES, NAME, Server, fuzz, serving
from process_samples import Sample, grew
from request_fuzz import RESPONSES, RIGHT, WRONG, generate

from vllm_spec_ext.cli.plugin_visibility import invisible_because
from vllm_spec_ext.proposers import registry

COUNT = int(os.environ.get("VLLM_SPEC_FUZZ_REQUESTS", "400"))
REPLICAS = {"adaptive_ngram": 2}  # data parallelism, with a file of what each of them learns
SEED = int(os.environ.get("VLLM_SPEC_FUZZ_SEED", "0"))

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(importlib.util.find_spec("aiohttp") is None, reason="needs aiohttp"),
    pytest.mark.skipif(
        invisible_because() is not None, reason=f"vLLM sees no plugin: {invisible_because()}"
    ),
]


def test_every_request_option_of_every_method_is_fuzzed() -> None:
    known = {
        field
        for name in registry.BUILTIN
        for field in registry.info(name).request_options.model_fields
    }
    assert set(RIGHT) == set(WRONG) == known


def test_a_seed_gives_the_same_requests() -> None:
    one, two = (list(generate(5, 50, NAME, ["enabled", "scorer"])) for _ in range(2))
    assert one == two


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        ({}, None),
        ({"memory_bytes": 512 << 20}, None),  # less
        ({"memory_bytes": 1040 << 20}, "memory grows"),
        ({"open_files": 30}, "10 open_files more"),
        ({"threads": 70}, "20 threads more"),
    ],
)
def test_what_grows_under_load_is_found(later: dict[str, int], expected: str | None) -> None:
    held = {"memory_bytes": 1024 << 20, "open_files": 20, "threads": 50, "processes": 3}
    warming = [Sample(60.0 * minute, 64 << 20, 1, 1, 1) for minute in range(5)]
    taken = [
        Sample(60.0 * minute, **(held if minute < 14 else {**held, **later}))
        for minute in range(5, 25)
    ]
    taken[3] = replace(taken[3], open_files=200, memory_bytes=4 << 30)  # for a moment
    found = grew("server", [*warming, *taken], 300.0)
    assert (found is None) == (expected is None)
    assert expected is None or expected in str(found)
    assert grew("server", taken[:4], 0.0) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.path.append(str(Path(__file__).parents[1] / "engine"))
    from tiny_model import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


def finished_by_replica(server: Server) -> dict[str, float]:
    """Requests that came to their end, by number of the replica."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        match = re.match(r'vllm:request_success_total\{[^}]*engine="(\d+)"[^}]*\} (\S+)$', line)
        if match:
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


@pytest.mark.timeout(600 + COUNT)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_no_request_harms_a_server(configuration: str, model: Path, tmp_path: Path) -> None:
    speculative = dict(CONFIGURATIONS[configuration])
    method = speculative["method"]
    replicas = REPLICAS.get(configuration, 1)
    if replicas > 1:
        learned = tmp_path / "learned"
        learned.mkdir()
        overlay_file = str(learned / "{replica}.safetensors")
        speculative.update(overlay="shared", overlay_file=overlay_file, share_unsalted=True)
    with serving(model, tmp_path / "server.log", speculative, replicas=replicas) as server:
        warm = fuzz(server, method, SEED + 1, 100)
        before = server.memory_bytes()
        report = fuzz(server, method, SEED, COUNT)
        assert server.is_alive()
        grown = server.memory_bytes() - before
        finished = finished_by_replica(server)
    assert warm.failures + report.failures == [], f"{warm.text()}\n{report.text()}"
    assert sum(report.statuses.values()) == COUNT
    assert report.statuses["200"] > COUNT / 5
    assert report.statuses["400"] > COUNT / 5
    assert min(report.routes[name] for name in ("completions", "chat/completions", RESPONSES)) > (
        COUNT / 10
    )
    assert grown < replicas * MAX_GROWTH_BYTES, f"{grown >> 20} MiB more\n{report.text()}"
    assert len(finished) == replicas
    assert min(finished.values()) > COUNT / 20, finished
    if replicas > 1:  # each has saved what it learned, under a name of its own
        assert len([*learned.iterdir()]) == replicas
