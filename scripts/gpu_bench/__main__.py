# SPDX-License-Identifier: Apache-2.0
"""Command line: ``make gpu-bench``, or ``PYTHONPATH=scripts python -m gpu_bench [PART...]``.

Exit status: 0 if every part was measured, 1 if an engine failed or answers that must be identical
are not, 2 without a GPU or on bad input, 130 if it was interrupted: the same command goes on.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_bench.measuring import conditions_of, measure_missing, measure_part
from gpu_bench.parts_folder import PartsFolder
from gpu_bench.plan import PARTS, Part, chosen, parts_of_heads
from gpu_check.machine import find_gpu, require_cuda_build
from vllm_spec_ext.atomic import write_bytes, write_json
from vllm_spec_ext.bench import provenance, report, saved
from vllm_spec_ext.bench.session import BenchResult
from vllm_spec_ext.bench.settings import BenchSettings, parse_batch_sizes
from vllm_spec_ext.cli.demo_drafters import demo_heads
from vllm_spec_ext.errors import SpecExtError


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(prog="gpu_bench", description=__doc__)
    names = ", ".join(part.name for part in (*PARTS, *parts_of_heads("")))
    made.add_argument("parts", nargs="*", metavar="PART", help=f"of {names} (default: all)")
    made.add_argument("--model", help="name or folder (default: SmolLM2-135M, fetched by pip)")
    made.add_argument("--heads", help="of the model, for `blockwise` (default: SmolLM2-135M's)")
    made.add_argument("--out", type=Path, default=Path("gpu-bench"), help="folder of the results")
    made.add_argument("--limit", type=int, help="prompts, spread evenly over the bundled ones")
    made.add_argument("--prompts", default="bundled", help="JSON Lines file with prompts")
    made.add_argument("--max-tokens", type=int, default=128, help="of an answer")
    made.add_argument("--max-model-len", type=int, default=2048, help="prompt and answer, tokens")
    made.add_argument("--batch-size", default="1,8,32", help="requests in flight, comma-separated")
    made.add_argument("--repeats", type=int, default=3, help="timed passes of each")
    made.add_argument("--dtype", default="auto", help="float32 makes identity a condition")
    made.add_argument("--fresh", action="store_true", help="measure again what is on file")
    return made


def settings_of(given: argparse.Namespace, model: str) -> BenchSettings:
    """Settings of all parts; raises SpecExtError."""
    from vllm_spec_ext.bench.settings import merge

    values: dict[str, Any] = {
        "model": model,
        "methods": ["plain"],
        "prompts": given.prompts,
        "limit": given.limit,
        "max_tokens": given.max_tokens,
        "max_model_len": given.max_model_len,
        "batch_size": parse_batch_sizes(given.batch_size),
        "repeats": given.repeats,
        "dtype": given.dtype,
    }
    return merge({}, values)


def write_results(
    result: BenchResult,
    parts: Sequence[Part],
    folder: Path,
    facts: dict[str, Any],
    machine: dict[str, Any],
) -> None:
    """The one JSON to send back, and its tables."""
    whole = {"machine": machine, **saved.to_json(result, facts)}
    whole["engine_args"] = {part.name: part.engine_args for part in parts}
    write_json(folder / "gpu-bench.json", whole)
    write_bytes(folder / "gpu-bench.md", report.markdown(result, facts).encode())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing and write the result; returns the exit status."""
    given = parser().parse_args(arguments)
    try:
        parts = chosen(given.parts, _parts(given))
        gpu = asdict(find_gpu())
        require_cuda_build()
        return _measure(given, parts, gpu)
    except SpecExtError as error:
        print(f"gpu-bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gpu-bench: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130


def _measure(given: argparse.Namespace, parts: Sequence[Part], gpu: dict[str, Any]) -> int:
    model = given.model or _demo_model()
    settings = settings_of(given, model)
    facts = provenance.collect(sys.argv)
    result = BenchResult(settings, [part.method for part in parts], settings.questions())
    del gpu["used_mib"]  # changes from run to run
    folder = PartsFolder(given.out / "parts", conditions_of(settings, result.questions, gpu, facts))
    if given.fresh:
        folder.forget([part.name for part in parts])
    logs = given.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    measure_missing(
        parts,
        folder,
        result,
        lambda part: measure_part(part, settings, result.questions, logs / f"{part.name}.log"),
        lambda text: print(f"gpu-bench: {text}", flush=True),
    )
    write_results(result, _parts(given), given.out, facts, gpu)
    print(f"gpu-bench: the result is in {given.out / 'gpu-bench.json'}")
    return 1 if result.failures or result.broken_promises() else 0


def _parts(given: argparse.Namespace) -> tuple[Part, ...]:
    """Those of heads, too, where there are any."""
    heads = given.heads
    if heads is None and given.model is None:
        heads = str(demo_heads())
    return PARTS if heads is None else (*PARTS, *parts_of_heads(heads))


def _demo_model() -> str:
    from vllm_spec_ext.cli.demo_model import ensure_demo_model

    return str(ensure_demo_model())


if __name__ == "__main__":
    sys.exit(main())
