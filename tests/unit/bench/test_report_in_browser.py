# SPDX-License-Identifier: Apache-2.0
"""The report, as a browser shows it: headless Chromium, without network."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_bench_report import _result

from vllm_spec_ext.bench import provenance, saved
from vllm_spec_ext.bench.drift import Drift
from vllm_spec_ext.cli.main import main

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--proxy-server=127.0.0.1:9",
]
BARS = {"tokens per step": (0x7A, 0x9C, 0xC6), "speed-up": (0x86, 0xB5, 0x8A)}

pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium here (.ci/run installs it)")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    result = _result(found=(1, 2, 9))
    result.facts["ngram"] = replace(result.facts["ngram"], lossless=False)
    result.drifts = [Drift("ngram", 1, 0.0, 0.5, -2.0, -1.5)]
    facts = provenance.collect(["vllm-spec", "bench"])
    run, out = folder / "run.json", folder / "page.html"
    run.write_text(json.dumps(saved.to_json(result, facts)))
    with pytest.raises(SystemExit) as stop:
        main(("report", str(run), "--out", str(out)))
    assert stop.value.code == 0
    return out


def browse(page: Path, width: int, *options: str) -> str:
    done = subprocess.run(
        [
            BROWSER,
            *QUIET,
            f"--user-data-dir={page.parent / 'profile'}",
            f"--window-size={width},2600",
            *options,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=800,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("width", [1280, 520])
def test_figures_and_text_are_drawn(page: Path, width: int, tmp_path: Path) -> None:
    shot = tmp_path / "shot.png"
    browse(page, width, f"--screenshot={shot}")
    pixels = np.asarray(Image.open(shot).convert("RGB")).astype(int)
    assert pixels.shape[1] == width
    for name, colour in BARS.items():
        drawn = (np.abs(pixels - colour).max(axis=2) < 6).sum()
        assert drawn > 500, f"no bars of {name}"
    dark = (pixels.max(axis=2) < 90).sum(axis=1) > 0
    assert dark.mean() > 0.1, "hardly any line has text"


@pytest.mark.parametrize("width", [1280, 520])
def test_nothing_sticks_out_on_the_side(page: Path, width: int) -> None:
    measuring = page.parent / f"measured-{width}.html"
    script = "<script>document.title = 'width ' + document.documentElement.scrollWidth</script>"
    measuring.write_text(page.read_text().replace("</body>", script + "</body>"))
    found = re.search(r"<title>width (\d+)", browse(measuring, width, "--dump-dom"))
    assert found is not None
    assert int(found[1]) <= width
