# SPDX-License-Identifier: Apache-2.0
"""Entry point of group ``vllm.general_plugins``: makes our methods known to vLLM.

vLLM calls :func:`register` in every process it starts. It wraps one function,
``EngineArgs.create_speculative_config``, and only where its module is in use; the wrapper hands
every configuration that is not ours to vLLM unchanged.
"""

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig
    from vllm.config.parallel import ParallelConfig
    from vllm.config.speculative import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.spec_ext")

_ARGUMENTS_MODULE = "vllm.engine.arg_utils"
_WRAPPED_BY = "_spec_ext_wrapped"


def register() -> None:
    """Wrap vLLM's configuration step; idempotent, cheap, and never raises."""
    try:
        module = sys.modules.get(_ARGUMENTS_MODULE)
        if module is not None:
            wrap_arguments(module)
        elif not any(isinstance(finder, _WrapOnImport) for finder in sys.meta_path):
            # Worker processes never build engine arguments, and importing the module there would
            # cost them a second; so wait until somebody does import it.
            sys.meta_path.insert(0, _WrapOnImport())
    except Exception:
        logger.exception("vllm-spec-ext could not register; its methods are not available")


def wrap_arguments(module: ModuleType) -> None:
    """Wrap ``EngineArgs.create_speculative_config`` of the given module, once."""
    engine_args: type[EngineArgs] | None = getattr(module, "EngineArgs", None)
    original: Callable[..., Any] | None = getattr(engine_args, "create_speculative_config", None)
    if engine_args is None or original is None:
        logger.error(
            "vllm-spec-ext: this vLLM has no EngineArgs.create_speculative_config; our methods are "
            "not available. Run `vllm-spec doctor`, or set VLLM_PLUGINS to leave this plugin out."
        )
        return
    if getattr(original, _WRAPPED_BY, False):
        return

    @functools.wraps(original)
    def create_speculative_config(
        self: "EngineArgs",
        target_model_config: "ModelConfig",
        target_parallel_config: "ParallelConfig",
    ) -> "SpeculativeConfig | None":
        method = requested_method(self)
        if method is None:
            try:
                return original(self, target_model_config, target_parallel_config)
            except ValueError as error:
                _explain_misspelt_method(error)
                raise
        from vllm_spec_ext.engine.starting.spec_config import build_spec_config

        return build_spec_config(self, method, target_model_config, target_parallel_config)

    setattr(create_speculative_config, _WRAPPED_BY, True)
    engine_args.create_speculative_config = create_speculative_config


def requested_method(engine_args: "EngineArgs") -> str | None:
    """The method that the arguments ask for, if it is one of ours."""
    given = getattr(engine_args, "speculative_config", None)
    method = given.get("method") if isinstance(given, dict) else None
    method = method or getattr(engine_args, "spec_method", None)
    if not isinstance(method, str):
        return None
    from vllm_spec_ext.proposers import registry

    return method if method in registry.names() else None


def _explain_misspelt_method(error: ValueError) -> None:
    """Where vLLM refused a method whose nearest name is one of ours, say so instead.

    vLLM's message lists its own methods only (0.32 config/speculative.py, the field ``method``).

    Raises:
        UnknownNameError: With the nearest name and all valid ones, vLLM's included.
    """
    problems: list[dict[str, Any]] = error.errors() if hasattr(error, "errors") else []
    wrong = next((problem for problem in problems if problem["loc"] == ("method",)), None)
    if wrong is None or not isinstance(wrong["input"], str):
        return
    import difflib
    import re

    from vllm_spec_ext.errors import UnknownNameError
    from vllm_spec_ext.proposers import registry

    context: dict[str, object] = wrong.get("ctx", {})
    theirs = re.findall(r"'([^']+)'", str(context.get("expected", "")))
    valid = [*registry.names(), *theirs]
    near = difflib.get_close_matches(wrong["input"], valid, n=1)
    if near and near[0] in registry.names():
        raise UnknownNameError("speculative method", wrong["input"], valid) from error


class _WrapOnImport(MetaPathFinder):
    """Wraps the arguments module right after its first import, then gets out of the way."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _ARGUMENTS_MODULE:
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _WrappingLoader(spec.loader)
        return spec


class _WrappingLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        wrap_arguments(module)
