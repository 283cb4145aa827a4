# SPDX-License-Identifier: Apache-2.0
"""Where requests enter: their options are checked before they reach the engine.

vLLM 0.32 has no hook for checking ``extra_args`` against the prompt, so once a configuration asks
for our methods ``InputProcessor.process_inputs`` of the front end is wrapped. A server calls that
on its event loop, where a long source text would let all other clients wait; so
``AsyncLLM.add_request`` is wrapped too, and resolves the options on a thread first.
"""

import asyncio
import copy
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from vllm_spec_ext.engine.request_options import KEY, ResolvedOptions, has_options, resolve
from vllm_spec_ext.errors import RequestOptionError
from vllm_spec_ext.proposers.base import RequestFacts

_WRAPPED_BY = "_spec_ext_wrapped"

# One thread of our own: requests with long options wait for each other, and never let requests
# without any wait for vLLM's tokeniser threads. vLLM's tokenizers may be used by several threads.
_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spec-ext-options")


def install_request_validation() -> None:
    """Wrap the two functions of this process, once."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    if not getattr(InputProcessor.process_inputs, _WRAPPED_BY, False):
        InputProcessor.process_inputs = _checking(InputProcessor.process_inputs)
    if not getattr(AsyncLLM.add_request, _WRAPPED_BY, False):
        AsyncLLM.add_request = _resolving_first(AsyncLLM.add_request)


def _checking(original: Any) -> Any:
    """``process_inputs`` that checks our options, unless that was done already."""

    @functools.wraps(original)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        params = request.sampling_params
        if _is_unresolved(self, params):
            # `params` is the request's own copy here; the caller's object stays as it was.
            params.extra_args = _resolve(self, params.extra_args, request.prompt_token_ids or [])
        return request

    setattr(process_inputs, _WRAPPED_BY, True)
    return process_inputs


def _resolving_first(original: Any) -> Any:
    """``add_request`` that resolves the options of a rendered prompt on our thread.

    vLLM processes a prompt that is not rendered yet on a thread of its own, our part included.
    """

    @functools.wraps(original)
    async def add_request(
        self: Any, request_id: Any, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        processor = self.input_processor
        token_ids = _rendered_token_ids(prompt)
        if (
            token_ids is not None
            and _is_unresolved(processor, params)
            and _is_acceptable(token_ids, processor.model_config.max_model_len)
        ):
            loop = asyncio.get_running_loop()
            params = await loop.run_in_executor(
                _thread, _with_resolved_options, processor, params, token_ids
            )
        return await original(self, request_id, prompt, params, *args, **kwargs)

    setattr(add_request, _WRAPPED_BY, True)
    return add_request


def _rendered_token_ids(prompt: Any) -> list[int] | None:
    if isinstance(prompt, dict) and "type" in prompt:
        return prompt.get("prompt_token_ids")
    return None


def _is_unresolved(processor: Any, params: Any) -> bool:
    from vllm_spec_ext.engine.spec_config import SpecExtConfig

    extra_args = getattr(params, "extra_args", None)  # pooling parameters have none
    return (
        isinstance(processor.speculative_config, SpecExtConfig)
        and extra_args is not None
        and has_options(extra_args)
        and not isinstance(extra_args.get(KEY), ResolvedOptions)
    )


def _is_acceptable(token_ids: list[int], max_model_len: int) -> bool:
    """False for a prompt that vLLM is about to refuse, whatever its options are."""
    return 0 < len(token_ids) < max_model_len and 0 <= min(token_ids) <= max(token_ids) < 2**31


def _with_resolved_options(processor: Any, params: Any, token_ids: list[int]) -> Any:
    own = copy.copy(params)  # the caller's object stays as it was
    own.extra_args = _resolve(processor, params.extra_args, token_ids)
    return own


def _resolve(processor: Any, extra_args: dict[str, Any], token_ids: list[int]) -> dict[str, Any]:
    from vllm.exceptions import VLLMValidationError

    model = processor.model_config
    facts = RequestFacts(
        prompt=np.asarray(token_ids, np.int32),
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        tokenizer=processor.tokenizer,
    )
    try:
        return resolve(processor.speculative_config.spec_ext, extra_args, facts)
    except RequestOptionError as error:
        raise VLLMValidationError(str(error), parameter=error.parameter) from error
