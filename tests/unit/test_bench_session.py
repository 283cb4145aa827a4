# SPDX-License-Identifier: Apache-2.0
"""What the benchmark refuses to measure."""

from types import SimpleNamespace

import psutil
import pytest

from vllm_spec_ext.bench import session
from vllm_spec_ext.errors import SpecExtError


def test_a_full_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    left = session.MIN_FREE_BYTES
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=left))
    session._require_memory(7)
    left -= 1
    with pytest.raises(SpecExtError, match="511 MiB of memory are left with 7 engines"):
        session._require_memory(7)
