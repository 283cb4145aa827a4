# SPDX-License-Identifier: Apache-2.0
"""Fixtures: engines on a tiny random model, in the test process, shared by the tests of a module.

The environment must be set before this is imported; each folder's ``conftest.py`` does.
"""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from generation import run, tokens
from one_process import once, without_collection
from scenarios import LONG, LONG_SIZES, SCENARIOS
from tiny_engine import start_engine
from tiny_model import build_tiny_model

from vllm_spec_ext.proposers import registry

EngineFactory = Callable[..., Any]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def _one_process_many_engines() -> Iterator[None]:
    """Let several engines live in one process; see :func:`one_process.once`."""
    # Here, because exceptions that modules keep from their import hold the callers' variables,
    # engines among them.
    import vllm.entrypoints.llm  # noqa: F401
    from vllm.triton_utils import dispatcher

    patch = pytest.MonkeyPatch()
    patch.setattr(dispatcher, "register_kernels", once(dispatcher.register_kernels))
    yield
    patch.undo()


@pytest.fixture(scope="module", autouse=True)
def _test_drafters() -> Iterator[None]:
    """Register the drafters of this folder, for this folder's tests alone."""
    patch = pytest.MonkeyPatch()
    for name in ("oracle", "branches", "noise", "fixed", "drawn", "script", "broken"):
        patch.setitem(registry.BUILTIN, name, f"drafters:{name.title()}")
    patch.setitem(registry.BUILTIN, "model_paths", "model_drafters:ModelPaths")
    patch.setitem(registry.BUILTIN, "view_reviews", "view_drafters:ViewReviews")
    yield
    patch.undo()


@pytest.fixture(scope="module")
def make_engine(tiny_model: Path, _one_process_many_engines: None) -> Iterator[EngineFactory]:
    """Engines by their arguments; equal arguments share one engine, and all end with the module.

    All at once, because vLLM's process groups belong to the process: the first engine that ends
    takes them from the others.
    """
    engines: dict[str, Any] = {}

    def make(**arguments: Any) -> Any:
        key = repr(sorted(arguments.items()))
        if key not in engines:
            engines[key] = start_engine(**{"model": tiny_model, **arguments})
        return engines[key]

    yield make
    with without_collection():
        for key in list(engines):
            engines.pop(key).llm_engine.engine_core.shutdown()
    gc.collect()


@pytest.fixture(scope="module")
def plain(make_engine: EngineFactory) -> Any:
    """An engine that does not draft."""
    return make_engine()


@pytest.fixture(scope="module")
def expected(plain: Any) -> dict[str, Any]:
    """What it answers in each scenario."""
    return {name: tokens(run(plain, SCENARIOS[name])) for name in SCENARIOS}


@pytest.fixture(scope="module")
def expected_long(make_engine: EngineFactory) -> Any:
    """What an engine that does not draft answers to prompts of many pages."""
    return tokens(run(make_engine(**LONG_SIZES), LONG))
