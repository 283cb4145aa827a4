# SPDX-License-Identifier: Apache-2.0
"""A method inside another one: how it is named in options, and how it is asked."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, StringConstraints, model_validator

from vllm_spec_ext.options import Options, RequestOptions
from vllm_spec_ext.proposers.description import ProposerInfo
from vllm_spec_ext.proposers.records import RequestStep

Name = Annotated[str, StringConstraints(min_length=1)]


class InnerMethod(Options):
    """A method with its own options beside its name: ``{"method": NAME, ...}``."""

    method: Name
    """Its name."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Of the method; they may stand beside ``method`` instead."""

    @model_validator(mode="before")
    @classmethod
    def _collect(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        own = {key: value for key, value in given.items() if key not in ("method", "options")}
        options = given.get("options", {})
        if own and isinstance(options, Mapping):
            options = {**options, **own}
        return {"method": given.get("method"), "options": options}


def asked_of(info: ProposerInfo, request: RequestStep) -> RequestStep:
    """The request with options of this method's class."""
    schema = info.request_options
    if isinstance(request.options, schema):
        return request
    common = {name: getattr(request.options, name) for name in RequestOptions.model_fields}
    return replace(request, options=schema(**common))
