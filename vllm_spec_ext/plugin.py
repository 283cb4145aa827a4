# SPDX-License-Identifier: Apache-2.0
"""Entry point of group ``vllm.general_plugins``: makes our methods known to vLLM.

vLLM calls :func:`register` in every process it starts. It wraps two functions of ``EngineArgs``,
``create_speculative_config`` and ``create_engine_config`` around it, and only where their module is
in use; the wrappers hand every configuration that is not ours to vLLM unchanged.
"""

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_spec_ext.on_import import when_imported

if TYPE_CHECKING:
    from vllm.config.speculative import SpeculativeConfig
    from vllm.config.vllm import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

logger = logging.getLogger("vllm.spec_ext")

_ARGUMENTS_MODULE = "vllm.engine.arg_utils"
_WRAPPED_BY = "_spec_ext_wrapped"


def register() -> None:
    """Wrap vLLM's configuration step; idempotent, cheap, and never raises."""
    try:
        # Worker processes never build engine arguments, and importing the module there would cost
        # them a second; so wait until somebody does import it.
        when_imported(_ARGUMENTS_MODULE, wrap_arguments)
    except Exception:
        logger.exception("vllm-spec-ext could not register; its methods are not available")


def wrap_arguments(module: ModuleType) -> None:
    """Wrap the two functions of the given module's ``EngineArgs``, once."""
    engine_args: type[EngineArgs] | None = getattr(module, "EngineArgs", None)
    original: Callable[..., Any] | None = getattr(engine_args, "create_speculative_config", None)
    around: Callable[..., Any] | None = getattr(engine_args, "create_engine_config", None)
    if engine_args is None or original is None or around is None:
        logger.error(
            "vllm-spec-ext: this vLLM has no EngineArgs.create_speculative_config, or no "
            "create_engine_config; our methods are not available. Run `vllm-spec doctor`, or set "
            "VLLM_PLUGINS to leave this plugin out."
        )
        return
    if getattr(original, _WRAPPED_BY, False):
        return

    @functools.wraps(original)
    def create_speculative_config(
        self: "EngineArgs", *args: Any, **kwargs: Any
    ) -> "SpeculativeConfig | None":
        method = requested_method(self)
        if method is None:
            try:
                return original(self, *args, **kwargs)
            except ValueError as error:
                _explain_misspelt_method(error)
                raise
        from vllm_spec_ext.engine.starting.spec_config import build_spec_config

        return build_spec_config(self, method, *args, **kwargs)

    setattr(create_speculative_config, _WRAPPED_BY, True)
    engine_args.create_speculative_config = create_speculative_config
    engine_args.create_engine_config = _leaving_arguments(around)


def _leaving_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """``create_engine_config`` after which the arguments are those that the user gave."""

    @functools.wraps(original)
    def create_engine_config(
        self: "EngineArgs",
        usage_context: "UsageContext | None" = None,
        *args: Any,
        **kwargs: Any,
    ) -> "VllmConfig":
        if requested_method(self) is None:
            return original(self, usage_context, *args, **kwargs)
        from vllm_spec_ext.engine.starting.given_arguments import kept

        with kept(self, usage_context):
            return original(self, usage_context, *args, **kwargs)

    return create_engine_config


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
