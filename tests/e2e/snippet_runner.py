# SPDX-License-Identifier: Apache-2.0
"""Runs Python snippets on one shared engine; a script, not a test.

Standard input holds ``{"model": folder, "results": file, "snippets": [[page, code], ...]}``; the
results are ``{page: [{"out": text, "error": traceback or null}, ...]}``. Every ``LLM(...)`` of a
snippet gets the same engine, on the small model: an engine start costs more than all snippets
together. Snippets of a page share their names, as in a notebook.
"""

import contextlib
import io
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = dict[str, str | None]

CONFIG = {"method": "input_copy"}


def shared_engine(model: str) -> Callable[..., Any]:
    """A stand-in for ``LLM`` that hands out one engine.

    Raises:
        AssertionError: A snippet asks for another speculative configuration than the first one.
    """
    from vllm import LLM

    engine = LLM(
        model,
        max_model_len=1024,
        max_num_seqs=8,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=CONFIG,
    )

    def get(_model: str, **arguments: Any) -> Any:
        assert arguments["speculative_config"] == CONFIG, arguments
        return engine

    return get


def run(code: str, names: dict[str, Any]) -> Run:
    """Execute one snippet as a script and keep what it prints."""
    out = io.StringIO()
    error = None
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(code, "<snippet>", "exec"), names)
        except BaseException:
            error = traceback.format_exc()
    return {"out": out.getvalue(), "error": error}


def main() -> None:
    """Run all snippets in the given order."""
    import vllm

    given = json.load(sys.stdin)
    vllm.LLM = shared_engine(given["model"])
    sys.argv = ["snippet", given["model"]]
    pages: dict[str, dict[str, Any]] = {}
    results: dict[str, list[Run]] = {}
    for page, code in given["snippets"]:
        names = pages.setdefault(page, {"__name__": "__main__"})
        results.setdefault(page, []).append(run(code, names))
    Path(given["results"]).write_text(json.dumps(results))
    vllm.LLM("", speculative_config=CONFIG).llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
