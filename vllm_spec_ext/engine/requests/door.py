# SPDX-License-Identifier: Apache-2.0
"""Where requests enter: their options are checked before they reach the engine.

vLLM 0.32 has no hook for checking ``extra_args`` against the prompt, so once a configuration asks
for our methods ``InputProcessor.process_inputs`` of the front end is wrapped. A server calls that
on its event loop, where a long source text would let all other clients wait; so
``AsyncLLM.add_request`` is wrapped too, and resolves the options on a thread first. Both run once
an answer that is streamed has begun, when it is too late for HTTP 400; so what can be told without
the prompt is refused in ``AsyncLLM.generate``, which a server calls before, and for
``/v1/responses``, where it calls that in the stream, in what makes the stream.
"""

import asyncio
import copy
import dataclasses
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from vllm_spec_ext.engine.requests.options import (
    KEY,
    ResolvedOptions,
    check_form,
    has_options,
    resolve,
    share_group,
    with_facts,
)
from vllm_spec_ext.errors import RequestOptionError
from vllm_spec_ext.on_import import when_imported
from vllm_spec_ext.proposers.base import RequestFacts, RequestLimits

if TYPE_CHECKING:
    from vllm.engine.protocol import StreamingInput
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_spec_ext.engine.starting.spec_config import MethodSettings

_WRAPPED_BY = "_spec_ext_wrapped"
_CHECKED_BY = "_spec_ext_checked"  # of `generate`, which others wrap, too

# One thread of our own: requests with long options wait for each other, and never let requests
# without any wait for vLLM's tokeniser threads. vLLM's tokenizers may be used by several threads.
_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spec-ext-options")


def install_request_validation() -> None:
    """Wrap the four functions of this process, once."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    if not getattr(InputProcessor.process_inputs, _WRAPPED_BY, False):
        InputProcessor.process_inputs = _checking(InputProcessor.process_inputs)
    if not getattr(AsyncLLM.add_request, _WRAPPED_BY, False):
        AsyncLLM.add_request = _resolving_first(AsyncLLM.add_request)
    if not getattr(AsyncLLM.generate, _CHECKED_BY, False):
        AsyncLLM.generate = _refusing_at_once(AsyncLLM.generate)
    when_imported("vllm.entrypoints.openai.responses.serving", _wrap_responses)


def _wrap_responses(_: ModuleType) -> None:
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses as Responses

    if not getattr(Responses._generate_with_builtin_tools, _CHECKED_BY, False):
        Responses._generate_with_builtin_tools = _refusing_before_stream(
            Responses._generate_with_builtin_tools
        )


def _checking(original: Any) -> Any:
    """``process_inputs`` that checks our options, unless that was done already."""

    @functools.wraps(original)
    def process_inputs(self: "InputProcessor", *args: Any, **kwargs: Any) -> Any:
        request: EngineCoreRequest = original(self, *args, **kwargs)
        settings, params = _settings(self), request.sampling_params
        if settings is None or params is None:  # not our engine, or pooling
            return request
        # `params` is the request's own copy here; the caller's object stays as it was.
        if _is_unresolved(self, params):
            tokens = request.prompt_token_ids or []
            params.extra_args = _resolve(self, params, tokens, is_session=request.resumable)
        # Of a session's later pieces vLLM keeps the first one's salt, and they need not say it.
        shares = settings.share_unsalted and not request.resumable
        group = share_group(request.cache_salt, shares)
        params.extra_args = with_facts(params.extra_args, group, is_session=request.resumable)
        return request

    setattr(process_inputs, _WRAPPED_BY, True)
    return process_inputs


def _resolving_first(original: Any) -> Any:
    """``add_request`` that resolves the options of a rendered prompt on our thread.

    vLLM processes a prompt that is not rendered yet on a thread of its own, our part included. Of
    input that comes in pieces, options are resolved without a prompt: at first vLLM only looks
    whether it would take them, with a prompt that it makes up.
    """

    @functools.wraps(original)
    async def add_request(
        self: "AsyncLLM", request_id: Any, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        processor = self.input_processor
        if (
            _is_rendered(prompt)
            and _is_unresolved(processor, params)
            and _is_acceptable(prompt, processor.model_config.max_model_len)
        ):
            params = await _on_thread(processor, params, _token_ids(prompt))
        elif isinstance(prompt, AsyncGenerator):
            if _is_unresolved(processor, params):
                params = await _on_thread(processor, params, (), is_session=True)
            prompt = _pieces(processor, prompt)
        return await original(self, request_id, prompt, params, *args, **kwargs)

    setattr(add_request, _WRAPPED_BY, True)
    return add_request


async def _pieces(
    processor: "InputProcessor", pieces: "AsyncGenerator[StreamingInput, None]"
) -> "AsyncGenerator[StreamingInput, None]":
    """Of a session, those with options of their own with these resolved."""
    async for piece in pieces:
        params = piece.sampling_params
        if params is not None and _is_unresolved(processor, params):
            params = await _on_thread(processor, params, (), is_session=True)
            yield dataclasses.replace(piece, sampling_params=params)
        else:
            yield piece


async def _on_thread(
    processor: "InputProcessor",
    params: "SamplingParams",
    token_ids: Sequence[int],
    *,
    is_session: bool = False,
) -> "SamplingParams":
    """Parameters with resolved options; the caller's object stays as it was."""
    own = copy.copy(params)
    own.extra_args = await asyncio.get_running_loop().run_in_executor(
        _thread, partial(_resolve, processor, params, token_ids, is_session=is_session)
    )
    return own


def _refusing_at_once(original: Any) -> Any:
    """``generate`` that refuses bad options when it is called, not when its answer is read."""

    @functools.wraps(original)
    def generate(
        self: "AsyncLLM", prompt: Any, sampling_params: "SamplingParams", *args: Any, **kwargs: Any
    ) -> "AsyncIterator[RequestOutput]":
        _refuse_form(self.input_processor, sampling_params)
        stream: AsyncIterator[RequestOutput] = original(
            self, prompt, sampling_params, *args, **kwargs
        )
        return stream

    setattr(generate, _CHECKED_BY, True)
    return generate


def _refusing_before_stream(original: Any) -> Any:
    """The generator of ``/v1/responses``, whose first step is taken behind the status."""

    @functools.wraps(original)
    def generate(
        self: "OpenAIServingResponses",
        request_id: str,
        engine_input: Any,
        sampling_params: "SamplingParams",
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        _refuse_form(self.engine_client.input_processor, sampling_params)
        return original(self, request_id, engine_input, sampling_params, *args, **kwargs)

    setattr(generate, _CHECKED_BY, True)
    return generate


def _refuse_form(processor: "InputProcessor", params: "SamplingParams") -> None:
    """Of options that were not resolved yet."""
    if not _is_unresolved(processor, params):
        return
    model = processor.model_config
    limits = RequestLimits(model.get_vocab_size(), model.max_model_len)
    try:
        check_form(cast("MethodSettings", _settings(processor)), params.extra_args, limits)
    except RequestOptionError as error:
        raise _refusal(error) from error


def _refusal(error: RequestOptionError) -> Exception:
    """What vLLM answers with HTTP 400."""
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError(str(error), parameter=error.parameter)


def _is_rendered(prompt: Any) -> bool:
    return isinstance(prompt, dict) and "type" in prompt


def _token_ids(prompt: Mapping[str, Any]) -> list[int]:
    """Of a rendered prompt; none where it is embeddings alone."""
    return prompt.get("prompt_token_ids") or []


def _settings(processor: "InputProcessor") -> "MethodSettings | None":
    """Ours, if the engine runs one of our methods."""
    from vllm_spec_ext.engine.starting.spec_config import SpecExtConfig

    config = processor.speculative_config
    return config.spec_ext if isinstance(config, SpecExtConfig) else None


def _is_unresolved(processor: "InputProcessor", params: object) -> bool:
    from vllm.sampling_params import SamplingParams

    if not isinstance(params, SamplingParams) or _settings(processor) is None:
        return False
    given = params.extra_args or {}
    return has_options(given) and not isinstance(given.get(KEY), ResolvedOptions)


def _is_acceptable(prompt: Mapping[str, Any], max_model_len: int) -> bool:
    """False for a rendered prompt that vLLM is about to refuse, whatever its options are."""
    token_ids = _token_ids(prompt)
    length = len(token_ids) or len(prompt.get("prompt_embeds", ()))
    in_range = not token_ids or 0 <= min(token_ids) <= max(token_ids) < 2**31
    return 0 < length < max_model_len and in_range


def _resolve(
    processor: "InputProcessor",
    params: "SamplingParams",
    token_ids: Sequence[int],
    *,
    is_session: bool,
) -> dict[str, Any]:
    model = processor.model_config
    facts = RequestFacts(
        prompt=np.asarray(token_ids, np.int32),
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        tokenizer=processor.tokenizer,
        is_session=is_session,
    )
    try:
        settings = cast("MethodSettings", _settings(processor))
        return resolve(settings, params.extra_args, facts)
    except RequestOptionError as error:
        raise _refusal(error) from error
