# SPDX-License-Identifier: Apache-2.0
"""No request ends or stalls an engine: bad options are refused, slow ones wait on a thread."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generation import sampling_params
from test_greedy_identity import runner_of

from vllm_spec_ext.engine.requests.options import ResolvedOptions, parse_share_group

PROMPT = "one two three four one two"


def ask(engine: Any, extra_args: dict[str, Any] | None) -> list[int]:
    params = sampling_params({"max_tokens": 6})
    params.extra_args = extra_args
    (out,) = engine.generate(PROMPT, params, use_tqdm=False)
    return list(out.outputs[0].token_ids)


@pytest.mark.parametrize(
    "options",
    [
        {"source_token_ids": [1, 512]},
        {"source_token_ids": [2**40]},
        {"source_token_ids": [-1]},
        {"source_token_ids": [1] * 2000},
        {"source_span": [0, 2**40]},
        {"source_text": "text without a tokenizer"},
        {"scorer": {"type": {"a": 1}}},
        {"max_draft_tokens": "many"},
    ],
)
def test_what_went_around_the_front_end_runs_with_defaults(
    options: dict[str, Any], make_engine: Any
) -> None:
    engine = make_engine(speculative_config={"method": "input_copy", "num_speculative_tokens": 16})
    plain = ask(engine, None)
    # Options that look resolved are not looked at again before the worker.
    assert ask(engine, {"spec_ext": ResolvedOptions(options)}) == plain
    assert ask(engine, {"spec_ext": ResolvedOptions(options), "eta_cutoff": "x"}) == plain


def test_a_request_that_wants_no_drafts_gets_none(make_engine: Any) -> None:
    """Whatever the method: this one looks at no option."""
    engine = make_engine(speculative_config={"method": "fixed", "num_speculative_tokens": 4})
    outcomes = runner_of(engine).drafter._proposer.outcomes
    plain = ask(engine, {"spec_ext": {"tokens": [7, 8, 9], "enabled": False}})
    assert not any(outcome.num_drafted for outcome in outcomes)
    assert ask(engine, {"spec_ext": {"tokens": [7, 8, 9]}}) == plain
    assert any(outcome.num_drafted for outcome in outcomes)


@pytest.mark.parametrize("is_piece", [False, True])
def test_a_later_piece_of_a_salted_session_is_nobody_elses(
    is_piece: bool, make_engine: Any
) -> None:
    """vLLM keeps the salt of the first one; those behind it need not say it again."""
    engine = make_engine(
        speculative_config={"method": "input_copy", "num_speculative_tokens": 16}
    ).llm_engine
    request = engine.input_processor.process_inputs(
        "session",
        {"type": "token", "prompt_token_ids": [5, 6]},
        sampling_params({"max_tokens": 6}),
        supported_tasks=engine.get_supported_tasks(),
        resumable=is_piece,
    )
    group = parse_share_group(request.sampling_params.extra_args)
    assert (group is None) == is_piece


class FakeServer:
    """As much of an ``AsyncLLM`` as a request passes before it reaches the engine."""

    def __init__(self, model: Path) -> None:
        from vllm.engine.arg_utils import EngineArgs

        speculative = {"method": "input_copy", "num_speculative_tokens": 4}
        args = EngineArgs(model=str(model), speculative_config=speculative, max_model_len=128)
        config = args.create_engine_config()
        self.encoding_threads: list[int] = []
        self.may_encode = threading.Event()
        self.input_processor = SimpleNamespace(
            speculative_config=config.speculative_config,
            model_config=config.model_config,
            tokenizer=SimpleNamespace(encode=self.encode),
        )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.encoding_threads.append(threading.get_ident())
        assert self.may_encode.wait(60)
        return [1, 2, 3]


async def add_request(self: Any, request_id: str, prompt: Any, params: Any) -> Any:
    """Stands for vLLM's own: gives back the parameters that it got."""
    return params


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"spec_ext.source_spam": 1}, "spec_ext.source_spam"),
        ({"spec_ext": '{"max_draft_tokens": "many"}'}, "spec_ext.max_draft_tokens"),
        ({"eta_alpha": 0.1}, "eta_alpha"),
        ({"spec_ext.scorer": '{"type": "typical"}'}, "spec_ext.scorer"),  # the server has no rule
        ({"spec_ext.source_token_ids": [1, 512]}, "spec_ext.source_token_ids"),
        ({"spec_ext": '{"source_token_ids": [1099511627776]}'}, "spec_ext.source_token_ids"),
        ({"spec_ext.source_token_ids": [1] * 513}, "spec_ext.source_token_ids"),
        ({"spec_ext.source_span": [0, 9]}, None),  # the prompt tells
        ({"spec_ext.source_text": "x" * 5000, "spec_ext.source_spam": 1}, None),  # takes long
        ({"spec_ext": '{"source_spam": "' + "x" * 5000 + '"}'}, None),
        ({"other": 1}, None),
        (None, None),
    ],
)
def test_a_stream_is_refused_before_it_begins(
    given: dict[str, Any] | None, refused: str | None, server_of_tiny: FakeServer
) -> None:
    """Behind its status, which comes first, an error is no HTTP 400."""
    from vllm.exceptions import VLLMValidationError

    from vllm_spec_ext.engine.requests.door import _refusing_at_once

    begun: list[Any] = []
    generate = _refusing_at_once(lambda self, prompt, params, name: begun.append(params))
    params = sampling_params({})
    params.extra_args = given
    if refused is None:
        generate(server_of_tiny, prompt="x", sampling_params=params, name="a")
        assert begun == [params]
        return
    with pytest.raises(VLLMValidationError) as error:
        generate(server_of_tiny, "x", params, "a")
    assert error.value.parameter == refused
    assert not begun


@pytest.fixture(scope="module")
def server_of_tiny(tiny_model: Path) -> FakeServer:
    return FakeServer(tiny_model)


EMBEDS = {"type": "embeds", "prompt_embeds": torch.zeros(3, 8)}
MIXED = EMBEDS | {"prompt_token_ids": [5, 0, 7], "is_token_ids": [True, False, True]}


@pytest.mark.parametrize(
    ("prompt", "num_tokens"),
    [({"type": "token", "prompt_token_ids": [5, 6, 7]}, 3), (MIXED, 3), (EMBEDS, 0)],
    ids=["token_ids", "mixed", "embeddings"],
)
def test_a_server_resolves_options_beside_its_event_loop(
    prompt: dict[str, Any], num_tokens: int, tiny_model: Path
) -> None:
    from vllm.exceptions import VLLMValidationError

    from vllm_spec_ext.engine.requests.door import _resolving_first

    server, add = FakeServer(tiny_model), _resolving_first(add_request)
    given = {"spec_ext.source_text": "text", "other": 1}

    async def serve() -> None:
        params = sampling_params({})
        params.extra_args = given
        waiting = asyncio.create_task(add(server, "slow", prompt, params))
        while not server.encoding_threads:
            await asyncio.sleep(0.001)  # the loop goes on while the tokenizer is busy
        plain = sampling_params({})
        assert await add(server, "plain", prompt, plain) is plain
        assert not waiting.done()
        server.may_encode.set()
        resolved = await waiting
        assert params.extra_args is given, "the caller's object stays as it was"
        assert resolved.extra_args == {"other": 1, "spec_ext": {"source_token_ids": [1, 2, 3]}}
        assert isinstance(resolved.extra_args["spec_ext"], ResolvedOptions)
        params.extra_args = {"spec_ext.source_span": [0, 9]}
        with pytest.raises(
            VLLMValidationError, match=f"the prompt has {num_tokens} tokens"
        ) as error:
            await add(server, "wrong", prompt, params)
        assert error.value.parameter == "spec_ext.source_span"
        for refused in ([], [2**40], [-1], [1] * 128):  # by vLLM, which says why
            odd = {"type": "token", "prompt_token_ids": refused}
            assert await add(server, "odd", odd, params) is params
        for length in (0, 128):
            odd = {"type": "embeds", "prompt_embeds": torch.zeros(length, 8)}
            assert await add(server, "odd", odd, params) is params

    asyncio.run(serve())
    assert server.encoding_threads != [threading.get_ident()]


def server_of_sessions(engine: Any) -> Any:
    """vLLM's own front end as far as the queue of its engine; what would go there is kept."""
    from vllm.v1.engine.async_llm import AsyncLLM

    class Server(AsyncLLM):
        errored = False

        def __init__(self) -> None:  # without an engine
            self.input_processor = engine.input_processor
            self.model_config = engine.model_config
            self.vllm_config = engine.vllm_config
            self.sent: list[Any] = []

        async def get_supported_tasks(self) -> Any:
            return engine.get_supported_tasks()

        def _run_output_handler(self) -> None:
            pass

        async def _add_request(self, request: Any, *others: Any) -> None:
            self.sent.append(request)

        def shutdown(self, timeout: float | None = None) -> None:
            pass

    return Server()


@pytest.mark.parametrize("of_the_piece", [False, True])
def test_options_of_input_that_comes_in_pieces(*, of_the_piece: bool, make_engine: Any) -> None:
    """Before its first piece vLLM looks at a session with a prompt of one token, made up."""
    from vllm.engine.protocol import StreamingInput
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import InputStreamError

    engine = make_engine(
        speculative_config={"method": "input_copy", "num_speculative_tokens": 16}
    ).llm_engine

    async def sent(options: dict[str, Any]) -> list[Any]:
        def params(extra_args: dict[str, Any] | None) -> Any:
            made = sampling_params({"output_kind": RequestOutputKind.DELTA})
            made.extra_args = extra_args
            return made

        async def pieces() -> Any:
            for tokens in ([5, 6, 7, 8], [9]):
                piece = {"type": "token", "prompt_token_ids": tokens}
                yield StreamingInput(piece, params(options) if of_the_piece else None)

        server = server_of_sessions(engine)
        queue = await server.add_request("s", pieces(), params(None if of_the_piece else options))
        await queue._input_stream_task
        try:
            queue.get_nowait()
        except InputStreamError as error:
            raise error.cause from error
        return list(server.sent)

    first, second, _ = asyncio.run(sent({"spec_ext.source_token_ids": [5, 6]}))
    for request in (first, second):
        assert request.resumable
        assert request.sampling_params.extra_args["spec_ext"] == {"source_token_ids": [5, 6]}
    for places in ({"source_span": [0, 3]}, {"source_markers": ["a", "b"]}):
        (name, value), *_ = places.items()
        with pytest.raises(VLLMValidationError, match="no whole prompt") as error:
            asyncio.run(sent({f"spec_ext.{name}": value}))
        assert error.value.parameter == f"spec_ext.{name}"
