# SPDX-License-Identifier: Apache-2.0
"""A vLLM that has the plugin but does not ask for our methods behaves as without it."""

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from vllm_spec_ext import plugin

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
IMPORT_BUDGET_MS = 50


def fresh_process(code: str) -> str:
    """Run Python in a process of its own and return what it prints last."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def test_import_is_cheap_and_loads_no_torch() -> None:
    code = (
        "import time; start = time.process_time()\n"
        "from vllm_spec_ext import on_import, plugin\n"
        "plugin.register(); plugin.register()\n"
        "took = (time.process_time() - start) * 1e3\n"
        "import sys\n"
        "heavy = ('torch', 'vllm', 'numpy', 'numba', 'pydantic')\n"
        "loaded = [m for m in heavy if m in sys.modules]\n"
        "finders = [f for f in sys.meta_path if type(f).__module__ == on_import.__name__]\n"
        "print(took, len(finders), loaded)"
    )
    results = [fresh_process(code).split(" ", 2) for _ in range(3)]
    assert all(loaded == "[]" for *_, loaded in results)
    assert all(finders == "1" for _, finders, _ in results)
    # Processor time, and the best of three: other work on the machine is not the plugin's cost.
    assert min(float(took) for took, *_ in results) < IMPORT_BUDGET_MS


def test_vllm_finds_the_plugin() -> None:
    found = entry_points(group="vllm.general_plugins")
    ours = [entry for entry in found if entry.value == "vllm_spec_ext.plugin:register"]
    if not ours:
        pytest.skip("this package is not installed, so vLLM cannot find its entry point")
    assert len(ours) == 1


def test_registering_twice_wraps_once() -> None:
    import vllm.engine.arg_utils as module

    plugin.register()
    once = module.EngineArgs.create_speculative_config
    plugin.register()
    plugin.wrap_arguments(module)
    assert module.EngineArgs.create_speculative_config is once
    whole = module.EngineArgs.create_engine_config
    assert not hasattr(whole.__wrapped__, "__wrapped__")
    assert not getattr(once.__wrapped__, "_spec_ext_wrapped", False)


@pytest.mark.parametrize("has", [(), ("create_speculative_config",), ("create_engine_config",)])
def test_vllm_without_the_hooks_logs_once_and_is_left_alone(
    has: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    from types import ModuleType

    module = ModuleType("vllm.engine.arg_utils")
    theirs = dict.fromkeys(has, print)
    module.EngineArgs = type("EngineArgs", (), theirs)  # type: ignore[attr-defined]
    with caplog.at_level("ERROR", logger="vllm.spec_ext"):
        plugin.logger.addHandler(caplog.handler)
        try:
            plugin.wrap_arguments(module)
        finally:
            plugin.logger.removeHandler(caplog.handler)
    messages = {record.getMessage() for record in caplog.records}
    assert len(messages) == 1
    assert "no EngineArgs.create_speculative_config" in messages.pop()
    assert all(getattr(module.EngineArgs, name) is print for name in has)


def test_register_never_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(module: Any) -> None:
        raise RuntimeError("broken on purpose")

    import vllm.engine.arg_utils  # noqa: F401

    monkeypatch.setattr(plugin, "wrap_arguments", fail)
    plugin.register()


def test_ngram_config_is_vllms_own_and_nothing_else_is_wrapped(tiny_model: Path) -> None:
    """In fresh processes, with and without the plugin: same type, same values, same worker."""
    code = f"""
import os, sys
os.environ["VLLM_PLUGINS"] = "lora_filesystem_resolver"  # none of ours
if REGISTERED:
    from vllm_spec_ext.plugin import register
    register()
from vllm.engine.arg_utils import EngineArgs
results = []
for speculative in (None, {NGRAM!r}):
    args = EngineArgs(model={str(tiny_model)!r}, max_model_len=128, speculative_config=speculative)
    config = args.create_engine_config()
    spec = config.speculative_config
    kept = None if spec is None else sorted(
        (k, repr(v)) for k, v in vars(spec).items() if "config" not in k
    )
    results.append((type(spec).__module__, type(spec).__name__, kept,
                    config.parallel_config.worker_cls, config.use_v2_model_runner))
from vllm.v1.engine.input_processor import InputProcessor
wrapped = hasattr(InputProcessor.process_inputs, "__wrapped__")
ours = [m for m in sys.modules if m.startswith("vllm_spec_ext.engine")]
print(repr((results, wrapped, ours)))
"""
    with_plugin = fresh_process(code.replace("REGISTERED", "True"))
    without = fresh_process(code.replace("REGISTERED", "False"))
    assert with_plugin == without
    assert "vllm.config.speculative" in without


def test_asking_for_our_method_is_what_wraps_request_validation(tiny_model: Path) -> None:
    code = f"""
from vllm_spec_ext.plugin import register
register()
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.input_processor import InputProcessor
before = hasattr(InputProcessor.process_inputs, "_spec_ext_wrapped")
EngineArgs(model={str(tiny_model)!r}, max_model_len=128,
           speculative_config={{"method": "input_copy"}}).create_engine_config()
print(before, hasattr(InputProcessor.process_inputs, "_spec_ext_wrapped"))
"""
    assert fresh_process(code) == "False True"


@pytest.mark.v1_runner
def test_plain_and_ngram_engines_are_stock(make_engine: Any) -> None:
    """In one process with engines of ours: vLLM's classes, and the same text from its ngram."""
    from generation import run, tokens
    from scenarios import PROMPTS, Scenario
    from test_greedy_identity import runner_of

    plain = make_engine()
    ngram = make_engine(speculative_config=NGRAM)
    for engine in (plain, ngram):
        worker = engine.llm_engine.model_executor.driver_worker.worker
        for part in (worker, runner_of(engine)):
            assert type(part).__module__.startswith("vllm.")
            assert not any("spec_ext" in base.__module__ for base in type(part).__mro__)
    assert "NgramProposer" in type(runner_of(ngram).drafter).__name__
    scenario = Scenario([{"max_tokens": 24}], PROMPTS)
    assert tokens(run(ngram, scenario)) == tokens(run(plain, scenario))
