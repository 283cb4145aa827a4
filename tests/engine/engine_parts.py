# SPDX-License-Identifier: Apache-2.0
"""The parts of an engine that hold memory, watched without keeping them alive."""

import gc
import weakref
from typing import Any


class EngineParts:
    """Says which parts of an engine are left after it should have ended."""

    def __init__(self, engine: Any) -> None:
        """Look at an engine in this process; only weak references are kept.

        Args:
            engine: An ``LLM``, of ours or plain.
        """
        core = engine.llm_engine.engine_core.engine_core
        runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
        parts = {
            "engine": engine,
            "scheduler": core.scheduler,
            "runner": runner,
            "target": runner.get_model(),
            **{f"KV cache {i}": cache for i, cache in enumerate(runner.kv_caches)},
        }
        drafter: Any = getattr(runner, "drafter", None)
        if hasattr(drafter, "models"):  # one of ours
            parts |= {"drafter": drafter, "proposer": drafter._proposer, "models": drafter.models}
            for i, paged in enumerate(drafter.models.paged):
                parts[f"draft model {i}"] = paged.module
        self._parts = {name: weakref.ref(part) for name, part in parts.items()}

    def left(self) -> list[str]:
        """Names of the parts that are still alive, once nothing but a leak holds them."""
        gc.unfreeze()  # vLLM freezes what is there while an engine starts, earlier ones included
        gc.collect()
        return [name for name, part in self._parts.items() if part() is not None]
