# SPDX-License-Identifier: Apache-2.0
"""The benchmark of ``make gpu-bench`` on the tiny model: one engine after another."""

import json
from pathlib import Path
from typing import Any

from gpu_bench.measuring import measure_missing, measure_part
from gpu_bench.parts_folder import PartsFolder
from gpu_bench.plan import Part, chosen
from gpu_check.machine import find_gpu
from gpu_check.site import Site, require
from vllm_spec_ext.bench.session import BenchResult
from vllm_spec_ext.bench.settings import BenchSettings

PARTS = ("plain", "input_copy", "input_copy_sync")
KEPT_MIB = 2048  # of memory that an engine which has ended may seem to hold
TEXTS = ("Repeat: one two three four five six.", "true false null [1, 2, 3]")


def bench_alone(site: Site) -> dict[str, Any]:
    """Each engine takes the whole GPU, so the next one starts only if it gave all back."""
    model = site.folder / "tiny"
    settings = settings_for(model, site.folder / "prompts.jsonl", eager=not site.on_gpu)
    parts = chosen(PARTS if site.on_gpu else PARTS[:2])
    result = BenchResult(settings, [part.method for part in parts], settings.questions())
    before = find_gpu().used_mib if site.on_gpu else 0
    used = {}

    def measure(part: Part) -> Any:
        measured = measure_part(
            part, settings, result.questions, site.folder / f"bench-{part.name}.log"
        )
        used[part.name] = find_gpu().used_mib if site.on_gpu else 0
        return measured

    folder = PartsFolder(site.folder / "parts", {})
    folder.forget(PARTS)  # of an earlier check
    measure_missing(parts, folder, result, measure, print)
    found = {
        "used_mib_before": before,
        "used_mib_after": used,
        "runs": len(result.runs),
        "failures": result.failures,
    }
    require(not result.failures, f"engines failed: {result.failures}", **found)
    require(
        not result.broken_promises(),
        "answers of the benchmark's engines differ from plain decoding's in float32",
        **found,
    )
    kept = max(used.values()) - before
    require(
        kept < KEPT_MIB,
        f"{kept} MiB of the GPU were not given back by an engine that ended, expected less than "
        f"{KEPT_MIB}",
        **found,
    )
    return found


def settings_for(model: Path, prompts: Path, *, eager: bool) -> BenchSettings:
    """Two short prompts, few tokens."""
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return BenchSettings(
        model=str(model),
        prompts=str(prompts),
        max_tokens=24,
        max_model_len=256,
        batch_size=[1, 2],
        repeats=1,
        dtype="float32",
        engine_args={"enforce_eager": True} if eager else {},
    )
