# SPDX-License-Identifier: Apache-2.0
"""Command line: ``make gpu-check``, or ``PYTHONPATH=scripts python -m gpu_check NAME...``.

Exit status: 0 if every check passed, 1 if one did not, 2 without a GPU or on bad input, 130 if it
was interrupted; what was checked by then stands in the JSON.
"""

import argparse
import os
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path

from gpu_check.catalogue import CHECKS, named
from gpu_check.machine import find_gpu, require_cuda_build
from gpu_check.report import Report, line
from gpu_check.running import (
    WHOLE_LIMIT_S,
    checks_at_once,
    child_command,
    run_check,
    run_checks,
)
from vllm_spec_ext.bench import provenance
from vllm_spec_ext.errors import SpecExtError


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    made.add_argument("checks", nargs="*", metavar="NAME", help="checks to run (default: all)")
    made.add_argument("--json", type=Path, default=Path("gpu-check.json"), help="the result")
    made.add_argument("--logs", type=Path, help="keep logs here (default: a temporary folder)")
    made.add_argument("--model", help="small model in place of SmolLM2-135M: a name or folder")
    made.add_argument(
        "--limit", type=float, default=WHOLE_LIMIT_S, help="seconds of all checks together"
    )
    made.add_argument(
        "--at-once",
        type=int,
        help="checks side by side (default: one for two cores and 4 GiB of the GPU, 8 at most)",
    )
    made.add_argument("--list", action="store_true", help="what there is to check")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run the checks; returns the exit status."""
    given = parser().parse_args(arguments)
    if given.list:
        print("\n".join(f"{check.name}: {check.proves}" for check in CHECKS))
        return 0
    try:
        checks = named(given.checks)
        gpu = find_gpu()
        require_cuda_build()
    except SpecExtError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    logs = given.logs or Path(tempfile.mkdtemp(prefix="gpu-check-"))
    logs.mkdir(parents=True, exist_ok=True)
    report = Report(
        given.json, [check.name for check in checks], asdict(gpu), provenance.collect(sys.argv)
    )
    try:
        report.write()  # before anything runs: is the file one that can be written?
    except OSError as error:
        print(f"gpu-check: cannot write {given.json}: {error}", file=sys.stderr)
        return 2
    command, stop = child_command(logs, given.model), threading.Event()
    fitting = checks_at_once(len(os.sched_getaffinity(0)), gpu.total_mib)
    print(f"gpu-check: {len(checks)} checks on {gpu.name}; logs in {logs}", flush=True)
    try:
        run_checks(
            report,
            checks,
            lambda check, limit_s: run_check(check, command, logs, limit_s, stop),
            lambda result: print(line(result), flush=True),
            at_once=fitting if given.at_once is None else max(1, given.at_once),
            stop=stop,
            whole_limit_s=given.limit,
        )
    except KeyboardInterrupt:
        print(f"gpu-check: interrupted; what was checked is in {given.json}", file=sys.stderr)
        return 130
    print(f"gpu-check: {'passed' if report.passed else 'FAILED'}; the result is in {given.json}")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
