# SPDX-License-Identifier: Apache-2.0
"""What is said of a measurement that ended without a result."""

import sys
from pathlib import Path

import pytest

from vllm_spec_ext.bench import served
from vllm_spec_ext.bench.engine_client import EngineFailed
from vllm_spec_ext.bench.own_process import measure_apart
from vllm_spec_ext.errors import SpecExtError

# Libraries in C print in whatever encoding they like, and a killed process says nothing.
NOT_UTF8 = r"import os; os.write(2, b'ValueError: caf\xe9\n'); os._exit(1)"
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("code", "said"), [(NOT_UTF8, "it failed: ValueError: caf"), (KILLED, "ended with status -9")]
)
def test_the_end_is_explained(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "measurement_that_ends.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EngineFailed, match=said):
        measure_apart("measurement_that_ends", [], tmp_path / "out.json", "it failed")
    with pytest.raises(SpecExtError, match=r"caf|status -9"):
        served._drive([sys.executable, "-c", code], "a")
