# SPDX-License-Identifier: Apache-2.0
"""What a method inside another one gets to hear of a request's options."""

import numpy as np

from vllm_spec_ext.options import RequestOptions
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import RequestStep
from vllm_spec_ext.proposers.inner_method import asked_of
from vllm_spec_ext.proposers.input_copy.options import InputCopyRequest

GIVEN = {"enabled": False, "max_draft_tokens": 3, "scorer": "exact", "remember": False}


def asked(method: str, options: RequestOptions) -> RequestOptions:
    request = RequestStep("a", np.arange(4, dtype=np.int32), 3, [3], 8, options)
    return asked_of(registry.info(method), request).options


def test_what_every_method_takes_reaches_an_inner_one() -> None:
    assert GIVEN.keys() == RequestOptions.model_fields.keys()
    copying = InputCopyRequest.model_validate({**GIVEN, "source_span": (0, 2)})
    for method in ("suffix_tree", "input_copy"):
        assert asked(method, copying) == copying
    assert asked("input_copy", RequestOptions.model_validate(GIVEN)) == copying.model_copy(
        update={"source_span": None}
    )
