# SPDX-License-Identifier: Apache-2.0
"""Proposers: one drafting method a module. See :mod:`vllm_spec_ext.proposers.base`."""

if __name__ != "vllm_spec_ext.proposers":
    raise ImportError(
        f"imported as {__name__!r}; import 'vllm_spec_ext.proposers' instead, "
        "or every class in it would exist twice"
    )
