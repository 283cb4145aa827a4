# SPDX-License-Identifier: Apache-2.0
"""The process of one check: ``python -m gpu_check.child NAME RESULT FOLDER [SMALL_MODEL]``.

Writes what the check found to the file RESULT. What it needs and writes lies in ``FOLDER/NAME``,
the tiny model, too, which is made if it is not there.
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from gpu_check.catalogue import CheckFunction, named
from gpu_check.site import CheckFailed, Site
from vllm_spec_ext.atomic import write_json
from vllm_spec_ext.errors import SpecExtError


def site_on_gpu(model: Path, small_model: str | None) -> Site:
    """Engines of this machine's vLLM on the tiny model."""
    from tiny_engine import start_engine
    from tiny_model import build_tiny_model

    if not (model / "generation_config.json").exists():  # what is written last
        build_tiny_model(model)

    # vLLM's engines in one process share its process groups, and the first that is let go destroys
    # them for the others (0.32 ``EngineCore.shutdown``): all live as long as the process.
    alive: list[Any] = []

    def start(**arguments: Any) -> Any:
        alive.append(start_engine(**{"model": model, **arguments}))
        return alive[-1]

    return Site(start, model.parent, small_model=small_model)


def register_test_drafters() -> None:
    """Those of ``tests/engine``: one knows the right answer, so that much is accepted."""
    from vllm_spec_ext.proposers import registry

    for name in ("oracle", "noise"):
        registry.BUILTIN[name] = f"drafters:{name.title()}"


def outcome_of(function: CheckFunction, site: Site) -> dict[str, Any]:
    """Run a check; whatever it raises is its outcome."""
    try:
        return {"passed": True, "reason": None, "found": function(site)}
    except CheckFailed as failed:
        return {"passed": False, "reason": str(failed), "found": failed.found}
    except SpecExtError as error:
        return {"passed": False, "reason": str(error), "found": {}}
    except Exception as error:  # vLLM and CUDA raise what they like; the log has all of it
        traceback.print_exc()
        return {"passed": False, "reason": f"{type(error).__name__}: {error}", "found": {}}


def main(arguments: list[str]) -> int:
    """Run the check; returns the exit status."""
    name, result, folder, *small = arguments
    (check,) = named([name])
    register_test_drafters()
    own = Path(folder) / name
    own.mkdir(parents=True, exist_ok=True)
    site = site_on_gpu(own / "tiny", small[0] if small else None)
    outcome = outcome_of(check.load(), site)
    write_json(Path(result), json.loads(json.dumps(outcome, default=str)))
    return 0 if outcome["passed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
