# SPDX-License-Identifier: Apache-2.0
"""Options: what all of them have in common, and how they are read."""

from vllm_spec_ext.options.base import MethodOptions, Options, RequestOptions
from vllm_spec_ext.options.online import OnlineOptions
from vllm_spec_ext.options.parse import parse_json, parse_options, unknown_option

__all__ = [
    "MethodOptions",
    "OnlineOptions",
    "Options",
    "RequestOptions",
    "parse_json",
    "parse_options",
    "unknown_option",
]
