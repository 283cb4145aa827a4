# SPDX-License-Identifier: Apache-2.0
"""Per-request options: from ``SamplingParams.extra_args`` / ``vllm_xargs`` to a checked object.

Offline a client writes ``extra_args={"spec_ext": {"source_span": [3, 40]}}``. HTTP's
``vllm_xargs`` takes no nested objects, so there each option is a key of its own,
``{"spec_ext.source_span": [3, 40]}``, or ``"spec_ext"`` holds JSON text. Both forms work in both
places. vLLM 0.32 has no hook for checking ``extra_args`` against the prompt, so once a
configuration asks for our methods the front end's ``InputProcessor.process_inputs`` is wrapped.

The wrapper also tells the worker a request's share group, which vLLM keeps from it: the salt stays
in the scheduler. It travels among the extra arguments too, and what a client put there is dropped.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_spec_ext.config import EtaOptions, RequestOptions, parse_options
from vllm_spec_ext.errors import RequestOptionError, SpecExtError
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import UNSALTED
from vllm_spec_ext.scorers.narrow import narrow

if TYPE_CHECKING:
    from vllm_spec_ext.engine.spec_config import MethodSettings

KEY = "spec_ext"

GROUP_KEY = "spec_ext_share_group"
"""Set by the front end for every request; no option, and never a client's to say."""

# Eta sampling is a sampling parameter, so it stands beside the others: name -> EtaOptions field.
ETA_KEYS = {"eta_cutoff": "epsilon", "eta_alpha": "alpha"}

_PREFIX = KEY + "."
_WRAPPED_BY = "_spec_ext_wrapped"


def collect(extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Our options among a request's extra arguments, in flat form.

    Raises:
        RequestOptionError: ``spec_ext`` is neither an object nor JSON text of one.
    """
    found: dict[str, Any] = {}
    for name, value in (extra_args or {}).items():
        if name.startswith(_PREFIX):
            found[name.removeprefix(_PREFIX)] = value
        elif name == KEY:
            found.update(_as_object(value))
    return found


def _as_object(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise RequestOptionError(KEY, f"not valid JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise RequestOptionError(
            KEY, f"found {type(value).__name__}, expected an object of options"
        )
    return value


def parse_request(
    schema: type[RequestOptions], extra_args: Mapping[str, Any] | None, method: str
) -> RequestOptions:
    """Validate a request's options.

    Raises:
        RequestOptionError: Naming the first wrong field.
    """
    given = collect(extra_args)
    try:
        return parse_options(schema, given, f"a request to {method}")
    except SpecExtError as error:
        wrong = _first_wrong_field(schema, given)
        raise RequestOptionError(_PREFIX + wrong if wrong else KEY, str(error)) from error


def _first_wrong_field(schema: type[RequestOptions], given: Mapping[str, Any]) -> str:
    for name, value in given.items():
        if name not in schema.model_fields:
            return name
        try:
            parse_options(schema, {name: value}, "")
        except SpecExtError:
            return name
    return ""


def parse_eta(extra_args: Mapping[str, Any] | None) -> EtaOptions | None:
    """A request's eta sampling, None if it asks for none.

    Raises:
        RequestOptionError: A value out of range, or ``eta_alpha`` alone.
    """
    given = {key: extra_args[key] for key in ETA_KEYS if extra_args and key in extra_args}
    if not given:
        return None
    if "eta_cutoff" not in given:
        raise RequestOptionError("eta_alpha", "given without eta_cutoff; add eta_cutoff")
    for key, field in ETA_KEYS.items():
        if key in given:
            try:
                parse_options(EtaOptions, {"epsilon": 0.0, field: given[key]}, "eta sampling")
            except SpecExtError as error:
                raise RequestOptionError(key, str(error)) from error
    options = EtaOptions(epsilon=given["eta_cutoff"], alpha=given.get("eta_alpha"))
    return options if options.epsilon else None


def has_options(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether a request carries options of ours; most do not, and pay nothing."""
    return any(
        name == KEY or name.startswith(_PREFIX) or name in ETA_KEYS for name in extra_args or ()
    )


def resolve(
    settings: "MethodSettings",
    extra_args: Mapping[str, Any] | None,
    prompt_token_ids: list[int],
    tokenizer: Any,
) -> dict[str, Any]:
    """Extra arguments as the engine gets them: checked, and resolved against the prompt.

    Raises:
        RequestOptionError: Naming the field.
    """
    parse_eta(extra_args)
    proposer = registry.load(settings.method)
    options = parse_request(proposer.info.request_options, extra_args, settings.method)
    narrow(settings.rule, options.scorer, _PREFIX + "scorer")
    prompt = np.asarray(prompt_token_ids, np.int32)
    try:
        options = proposer.resolve_request(options, prompt, tokenizer)
    except RequestOptionError as error:
        # A proposer knows its fields by their bare names; the client wrote the prefix.
        message = str(error).removeprefix(f"{error.parameter}: ")
        raise RequestOptionError(_PREFIX + error.parameter, message) from error
    others = {
        name: value
        for name, value in (extra_args or {}).items()
        if name != KEY and not name.startswith(_PREFIX)
    }
    return {**others, KEY: options.model_dump(mode="json", exclude_defaults=True)}


def share_group(cache_salt: str | None, share_unsalted: bool) -> str | None:
    """The group of requests that may see what this one said; None if there is no other.

    Args:
        cache_salt: The request's own; hashed, as it is a secret and extra arguments are logged.
        share_unsalted: Whether requests without one are a group.
    """
    if cache_salt:
        return hashlib.sha256(f"{GROUP_KEY}:{cache_salt}".encode()).hexdigest()[:32]
    return UNSALTED if share_unsalted else None


def with_share_group(
    extra_args: Mapping[str, Any] | None, group: str | None
) -> dict[str, Any] | None:
    """Extra arguments with the share group in place of whatever the client said it was."""
    others = {name: value for name, value in (extra_args or {}).items() if name != GROUP_KEY}
    if group is not None:
        others[GROUP_KEY] = group
    return others or None


def parse_share_group(extra_args: Mapping[str, Any] | None) -> str | None:
    """The group that the front end set. Without one, or with none of ours, nothing is shared."""
    group = (extra_args or {}).get(GROUP_KEY)
    return group if isinstance(group, str) else None


def install_request_validation() -> None:
    """Wrap ``InputProcessor.process_inputs`` of this process, once."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_spec_ext.engine.spec_config import SpecExtConfig

    original = InputProcessor.process_inputs
    if getattr(original, _WRAPPED_BY, False):
        return

    @functools.wraps(original)
    def process_inputs(self: InputProcessor, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        params = request.sampling_params
        if not isinstance(self.speculative_config, SpecExtConfig) or params is None:
            return request
        settings = self.speculative_config.spec_ext
        # `params` is the request's own copy here; the caller's object stays as it was.
        group = share_group(request.cache_salt, settings.share_unsalted)
        params.extra_args = with_share_group(params.extra_args, group)
        if not has_options(params.extra_args):
            return request
        try:
            params.extra_args = resolve(
                settings,
                params.extra_args,
                request.prompt_token_ids or [],
                self.tokenizer,
            )
        except RequestOptionError as error:
            raise VLLMValidationError(str(error), parameter=error.parameter) from error
        return request

    setattr(process_inputs, _WRAPPED_BY, True)
    InputProcessor.process_inputs = process_inputs
