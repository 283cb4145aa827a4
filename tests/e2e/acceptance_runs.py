# SPDX-License-Identifier: Apache-2.0
"""Runs the benchmark's engines one after another; a script, not a test.

Standard input holds the settings, the argument is the folder for logs and :data:`RESULT`. One
program, so that its engine processes can be forked from it.
"""

import json
import pickle
import sys
from pathlib import Path

from vllm_spec_ext.bench.engine_client import EngineClient
from vllm_spec_ext.bench.records import Run
from vllm_spec_ext.bench.session import BenchResult, sampling_of
from vllm_spec_ext.bench.settings import BenchSettings

RESULT = "result.pickle"
# Their drafts depend on what was answered before, or on clocks; those of others do not, and four
# requests at a time take a third of the time.
ONE_AT_A_TIME = ("auto", "auto_with_heads", "copy_by_default")


def main() -> None:
    """As ``vllm-spec bench``, but never two engines at once: all of them take 14 GiB."""
    folder = Path(sys.argv[1])
    settings = BenchSettings.model_validate(json.load(sys.stdin))
    result = BenchResult(settings, settings.all_methods(), settings.questions())
    recorded = None
    for method in result.methods:
        with EngineClient(method.name, folder / f"{method.name}.log") as engine:
            sampling = sampling_of(settings)
            engine.start(settings.model, method, settings.llm_args(), sampling)
            result.facts[method.name] = engine.prepare(result.questions, settings.warm_up, 1)
            at_once = 1 if method.name in ONE_AT_A_TIME else 4
            run = engine.run(range(len(result.questions)), at_once)
            if method.name == "auto":
                recorded = engine.record(range(len(result.questions)), 1)
        # All as if of one batch size: a report compares answers within one.
        result.runs.append(Run(method.name, 1, 0, run))
    (folder / RESULT).write_bytes(pickle.dumps((result, recorded)))


if __name__ == "__main__":
    main()
