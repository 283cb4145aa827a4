# SPDX-License-Identifier: Apache-2.0
"""What to compare: method names and their speculative configurations."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_spec_ext import parsed_method
from vllm_spec_ext.errors import SpecExtError, UnknownNameError
from vllm_spec_ext.proposers import registry

PLAIN = "plain"

# vLLM's own methods that need no checkpoint, with the settings they are usually quoted with.
VLLM_METHODS: dict[str, dict[str, Any]] = {
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    },
    "suffix": {"method": "suffix", "num_speculative_tokens": 16},
}

# The other names of `SpeculativeMethod` in vLLM 0.32 config/speculative.py, written down because
# importing that takes seconds (torch). A unit test compares them. First those that draft with a
# checkpoint named by "model", then those whose layers come with the target, or that need none.
CHECKPOINT_METHODS = ("dflash", "draft_model", "eagle", "eagle3", "medusa", "mlp_speculator")
OTHER_METHODS = ("dspark", "mtp", "ngram_gpu")

DEFAULT_METHODS = (PLAIN, "ngram", "input_copy")


@dataclass(frozen=True)
class Method:
    """One row of the comparison."""

    name: str
    config: dict[str, Any] | None
    """The engine's ``speculative_config``; ``None`` decodes plainly."""

    @property
    def ours(self) -> bool:
        """Whether this plugin provides the method (its worker then answers our RPCs)."""
        return self.config is not None and self.config.get("method") in registry.names()


def ngram_grid() -> list[Method]:
    """Four settings of vLLM's ``ngram``, so that ours is compared with its best one."""
    return [
        Method(
            f"ngram-{low}-{high}-k{k}",
            {
                "method": "ngram",
                "num_speculative_tokens": k,
                "prompt_lookup_min": low,
                "prompt_lookup_max": high,
            },
        )
        for low, high in ((1, 3), (2, 4))
        for k in (5, 8)
    ]


def parse_method(text: str) -> Method:
    """Read ``NAME`` or ``NAME=JSON``.

    A name alone is ``plain``, one of vLLM's methods above, or one of ours. JSON without a
    ``method`` changes settings of the method that NAME stands for; with one, NAME is only a label.

    Raises:
        UnknownNameError: The name stands for no method and the JSON names none.
        SpecExtError: The JSON cannot be read, is no object, or lacks the ``model`` that drafts.
    """
    name, has_json, body = text.partition("=")
    name = name.strip()
    if not name:
        raise SpecExtError(f"method {text!r} has no name; expected NAME or NAME=JSON")
    given: dict[str, Any] = {}
    if has_json:
        try:
            given = json.loads(body)
        except json.JSONDecodeError as error:
            raise SpecExtError(
                f"settings of method {name!r} are not JSON: {error.msg} at character {error.pos}; "
                f"found {body!r}, expected e.g. '{name}={{\"num_speculative_tokens\": 8}}'"
            ) from error
    return from_settings(name, given)


def from_settings(name: str, given: Mapping[str, Any] | None) -> Method:
    """A method from its name and (possibly partial) settings.

    Raises:
        SpecExtError: As :func:`parse_method`, and for wrong options of a method of ours.
    """
    if given is not None and not isinstance(given, Mapping):
        raise SpecExtError(
            f"settings of method {name!r} must be an object; "
            f"found {type(given).__name__}: {given!r}"
        )
    settings = dict(given or {})
    if settings.get("method") == PLAIN or (name == PLAIN and "method" not in settings):
        extra = settings.keys() - {"method"}
        if extra:
            raise SpecExtError(f"plain decoding has no settings; found {', '.join(sorted(extra))}")
        return Method(name, None)
    if "method" not in settings:
        if name in VLLM_METHODS:
            settings = VLLM_METHODS[name] | settings
        elif name in (*registry.names(), *CHECKPOINT_METHODS, *OTHER_METHODS):
            settings = {"method": name, **settings}
        else:
            known = [PLAIN, *VLLM_METHODS, *CHECKPOINT_METHODS, *OTHER_METHODS, *registry.names()]
            raise UnknownNameError("method", name, [*known, "NAME=JSON"])
    if settings["method"] in CHECKPOINT_METHODS and not settings.get("model"):
        raise SpecExtError(
            f"method {name!r} drafts with a checkpoint, but its settings {settings} name none; "
            f'expected a "model" among them: {name}={{"model": "NAME_OR_FOLDER", ...}}'
        )
    if settings["method"] in registry.names():  # what is wrong is told before any engine starts
        parsed_method.parse_method(settings, settings["method"])
    return Method(name, settings)


def collect(
    names: Sequence[str], specs: Iterable[Method] = (), *, grid: bool = False
) -> list[Method]:
    """All methods of a benchmark, plain decoding first: everything is measured against it.

    Plain decoding under a second name shows how much of a difference is noise.

    Raises:
        SpecExtError: Two methods have the same name.
    """
    methods = [parse_method(name) for name in names]
    methods += specs
    if grid:
        methods += ngram_grid()
    if all(method.config is not None for method in methods):
        methods.insert(0, Method(PLAIN, None))
    methods.sort(key=lambda method: method.config is not None)
    seen: set[str] = set()
    for method in methods:
        if method.name in seen:
            raise SpecExtError(
                f"two methods are called {method.name!r}; give one another label: LABEL=JSON"
            )
        seen.add(method.name)
    return methods
