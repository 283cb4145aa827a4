# SPDX-License-Identifier: Apache-2.0
"""Scorers: one acceptance rule a module."""

if __name__ != "vllm_spec_ext.scorers":
    raise ImportError(
        f"imported as {__name__!r}; import 'vllm_spec_ext.scorers' instead, "
        "or every class in it would exist twice"
    )
