# SPDX-License-Identifier: Apache-2.0
"""Random HTTP requests: right ones, wrong ones, and ones that nobody should send.

Pure: a seed gives the same requests every time; :mod:`fuzz_load` sends them. Not generated, as
plain vLLM 0.32 answers them with HTTP 500 as well: see :data:`VLLMS_OWN`.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

VOCAB_SIZE = 512
MAX_MODEL_LEN = 256

RESPONSES = "responses"
# Shapes of bodies that plain vLLM 0.32 answers with HTTP 500: a route and a body of each.
VLLMS_OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "structured_outputs that is no object": (
        "completions",
        {"prompt": "a", "structured_outputs": [0, 1]},
    ),
    "a parameter with a lone surrogate": ("completions", {"prompt": "a", "stop": "\ud800"}),
}

Expectation = Literal["accepted", "refused", "any"]


@dataclass(frozen=True)
class FuzzRequest:
    """One request, and what must become of it."""

    route: str  # behind /v1/
    body: bytes
    expect: Expectation
    names: tuple[str, ...] = ()  # a refusal must name one of these; none = it is vLLM's own
    good: int | None = None  # index in GOOD: the text must be that of an idle server
    same: bool = False  # every server of this model must give the same text
    stream: bool = False
    leave_after_s: float | None = None  # the client hangs up


@dataclass
class _Draft:
    """A request under construction."""

    body: dict[str, Any]
    expect: Expectation = "accepted"
    names: tuple[str, ...] = ()
    xargs: dict[str, Any] = field(default_factory=dict)


DEEP_LIST = "[" * 20_000
DEEP_OBJECT = '{"type":' * 20_000
ODD_TEXTS = ["", " ", "\ud800", "\x00", "漢字🙂é", "x" * 5000, "<|end|>", "%s{}\\", "null", "-1"]
ODD_VALUES: list[Any] = [
    *ODD_TEXTS,
    *(None, True, False, 0, -1, 1, 2**31, 2**40, 2**64, 10**30, 1.5, -0.0, 1e308),
    *(float("nan"), float("inf"), DEEP_LIST, DEEP_OBJECT, "9" * 5000, "[1, 2", "{"),
    *([], [[]], {}, [None], ["a"], [1, "a"], [0, 1], [1] * 3000, {"a": {"b": []}}, {"": ""}),
]

# Per-request options of every method: values that are right with any prompt, and wrong ones.
RIGHT: dict[str, list[Any]] = {
    "enabled": [True, False, 0, 1, "true", "false"],
    "max_draft_tokens": [0, 1, 3, 128, 10**30, None, "5"],
    "scorer": ["exact", None, {"type": "exact"}, '{"type": "exact"}'],
    "source_span": [[0, 1], ["0", "1"], None],
    "source_markers": [None],
    "source_text": ["The quick brown fox", "é漢🙂", "x" * 200, None],
    "source_token_ids": [[1, 2, 3], [0, VOCAB_SIZE - 1], [], [5] * (4 * MAX_MODEL_LEN), None],
    "remember": [True, False],
}
WRONG: dict[str, list[Any]] = {
    "enabled": ["perhaps", 7, [], {}, None, 1.5],
    "max_draft_tokens": [-1, "many", 1.5, [1], {}, float("nan"), "9" * 5000],
    "scorer": [DEEP_LIST, DEEP_OBJECT, "loose", "", {"type": []}, {"k": 99}, '{"k": NaN}', '{"a'],
    "source_span": [[0, 9999], [3, 3], [-1, 2], [0], "all", [0, 10**30], [0, 2**40], {}, ["a", 1]],
    "source_markers": [["<none>", "<none>"], ["a"], ["", "b"], "ab", ["x" * 2000, "y"], {}, 3],
    "source_text": ["", 5, ["a", "b"], "word " * 20_000, "x" * 500_000, {}, "\ud800"],
    "source_token_ids": [
        *([VOCAB_SIZE], [2**40], [10**30], [-1], [1, "x"], "12", 5, [1.5], [None], [[1]]),
        [1] * (4 * MAX_MODEL_LEN + 1),
    ],
    "remember": ["perhaps", 7, [], None],
}
ETA_RIGHT: list[dict[str, Any]] = [
    {"eta_cutoff": 0.001},
    {"eta_cutoff": 0},
    {"eta_cutoff": 0.1, "eta_alpha": 10**18},
]
ETA_WRONG: list[dict[str, Any]] = [
    *({"eta_cutoff": 1}, {"eta_cutoff": -0.1}, {"eta_cutoff": "x"}, {"eta_alpha": 0.5}),
    *({"eta_cutoff": float("nan")}, {"eta_cutoff": 0.1, "eta_alpha": 0}, {"eta_cutoff": [1]}),
]

# vLLM's own parameters: sets that it takes, and values that may be anything.
OWN_RIGHT: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.7, "n": 2},
    {"temperature": 0, "stop": ["a", "\n"]},
    {"temperature": 0, "min_tokens": 2},
    {"temperature": 0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0.5, "repetition_penalty": 1.3},
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0, "skip_special_tokens": False},
    {"temperature": 0, "stop_token_ids": [5, 6, 7]},
]
# Sampling of requests whose text is the same whatever is drafted; those that draw get a seed.
SAME_SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "min_tokens": 4},
    {"temperature": 0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0, "stop": ["a", "\n"]},
    {"temperature": 1.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.5, "repetition_penalty": 1.3},
    {"temperature": 0.7, "n": 2},
]
LONG_PROMPT = 200  # tokens; what is left of MAX_MODEL_LEN is for the answer
STRUCTURES: list[dict[str, Any]] = [
    {"structured_outputs": {"choice": ["yes", "no", "漢字"]}},
    {"structured_outputs": {"regex": "[0-9]{1,4}(a|b)"}},
    {"structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}},
    {"structured_outputs": {"regex": "(["}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"json": "{"}},
    {"structured_outputs": {"json": True, "regex": "a"}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "none of these"}},
]
OWN_FIELDS = [
    *("temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids"),
    *("min_tokens", "max_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logprobs", "prompt_logprobs", "logit_bias", "bad_words", "allowed_token_ids", "echo"),
    *("ignore_eos", "truncate_prompt_tokens", "response_format", "structured_outputs", "priority"),
    *("stream", "stream_options", "cache_salt", "add_special_tokens", "top_logprobs", "user"),
    *("prompt", "messages", "model", "vllm_xargs", "suffix", "best_of", "length_penalty"),
]
RESPONSES_FIELDS = [
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "priority"),
    *("structured_outputs", "cache_salt", "user", "model", "vllm_xargs", "stream"),
    *("input", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "include"),
    *("parallel_tool_calls", "previous_response_id", "reasoning", "service_tier", "store"),
    *("background", "text", "tool_choice", "tools", "top_logprobs", "truncation", "prompt"),
    *("include_reasoning", "previous_input_messages", "chat_template_kwargs"),
]
OWN_VALUES: dict[str, list[Any]] = {
    "logprobs": [0, 1, 5, 99, True],
    "prompt_logprobs": [0, 2, -1],
    "logit_bias": [{"5": 1.5}, {"99999": 1}, {"a": 1}],
    "bad_words": [["a b", "the"], [""]],
    "allowed_token_ids": [[1, 2, 3], [VOCAB_SIZE], []],
    "truncate_prompt_tokens": [1, 5, -1, 9999],
    "max_tokens": [0, 1, 9999, -1],
    "n": [1, 4, 0, 100],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}],
    "prompt": [[[1, 2], [3]], ["a", "b"], [VOCAB_SIZE], [2**40], [-1], [], [[]], "a " * 9000],
    "messages": [[], [{}], [{"role": "user"}], [{"role": "wizard", "content": "x"}]],
    "vllm_xargs": [{}, {"x": 1}, {"x": {}}, {"spec_ext": {}}, {"spec_ext.x": None}],
    "input": [
        *([], [{}], [{"role": "user"}], [{"role": "wizard", "content": "x"}], "a " * 9000),
        [{"role": "user", "content": [{"type": "input_text", "text": "é漢🙂"}]}],
        [{"type": "message", "role": "assistant", "content": [{"type": "output_text"}]}],
        *([{"type": "function_call"}], [{"type": "reasoning"}], [{"type": "none of these"}]),
    ],
    "max_output_tokens": [0, 1, 9999, -1],
    "include": [["message.output_text.logprobs"], ["none of these"]],
    "top_logprobs": [0, 2, 99],
    "text": [
        *({"format": {"type": "json_object"}}, {"format": {"type": "none of these"}}),
        {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
        {"verbosity": "low"},
    ],
    "tools": [[{}], [{"type": "function"}], [{"type": "web_search_preview"}]],
    "tool_choice": ["none", "auto", "required", {"type": "function", "name": "a"}],
    "reasoning": [{"effort": "low"}, {"effort": "none of these"}, {"summary": "auto"}],
    "truncation": ["auto", "disabled"],
    "service_tier": ["flex"],
    "metadata": [{"a": "b"}],
    "previous_response_id": ["resp_1"],
}

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog",
    "begin one two three end begin four five six end one two",
    'value true false null [1, 2, 3] {"key": "text"} value true',
    "é漢🙂 a request may finish early, é漢🙂 a request may",
    "Speculative decoding drafts several tokens and verifies",
]

_GREEDY = {"temperature": 0, "max_tokens": 16}
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": TEXTS[0], **_GREEDY}),
    ("completions", {"prompt": TEXTS[2], **_GREEDY}),
    ("completions", {"prompt": [9, 8, 7, 6, 5] * 9, **_GREEDY}),
    ("chat/completions", {"messages": [{"role": "user", "content": TEXTS[1]}], **_GREEDY}),
    (
        "completions",
        {"prompt": TEXTS[1], **_GREEDY, "vllm_xargs": {"spec_ext.max_draft_tokens": 2}},
    ),
    (RESPONSES, {"input": TEXTS[4], "temperature": 0, "max_output_tokens": 16}),
]


def good_body(index: int, model: str) -> dict[str, Any]:
    """A request whose text may not depend on what else the server does.

    A relaxed server is asked for the exact rule: under its own, drafts decide about the text.
    """
    body = {"model": model, **GOOD[index][1]}
    body["vllm_xargs"] = {**body.get("vllm_xargs", {}), "spec_ext.scorer": "exact"}
    return body


def generate(seed: int, count: int, model: str, fields: list[str]) -> Iterator[FuzzRequest]:
    """Random requests.

    Args:
        seed: Decides all of them.
        count: How many.
        model: Name that the server gave its model.
        fields: Names of the method's request options; others are wrong.
    """
    rng = random.Random(seed)
    kinds = [_good, _ours_right, _ours_wrong, _ours_odd, _own_odd, _structured, _raw]
    weights = [15, 20, 25, 15, 15, 5, 5]
    for kind in rng.choices(kinds, weights, k=count):
        yield kind(rng, model, fields)


def generate_mixed(seed: int, model: str, fields: list[str]) -> Iterator[FuzzRequest]:
    """Requests without end: half of them right, with a text that no draft may change.

    Args:
        seed: Decides all of them.
        model: Name that the server gave its model.
        fields: Names of the method's request options; others are wrong.
    """
    rng = random.Random(seed)
    kinds = [_same, _ours_right, _ours_wrong, _ours_odd, _own_odd, _structured, _raw]
    weights = [50, 15, 8, 5, 8, 10, 4]
    while True:
        yield rng.choices(kinds, weights)[0](rng, model, fields)


def _same(rng: random.Random, model: str, fields: list[str]) -> FuzzRequest:
    """Greedy or seeded, with any options of ours; prompts of a few tokens to most of the room."""
    route = rng.choice(["completions", "completions", "chat/completions", RESPONSES])
    sampling = dict(rng.choice(SAME_SAMPLING))
    if sampling["temperature"]:
        sampling["seed"] = rng.randrange(2**31)
    if route in ("chat/completions", RESPONSES):
        text = " ".join(rng.choices(TEXTS, k=rng.randrange(1, 3)))
        prompt = _chat(route, text)
    elif rng.random() < 0.3:
        prompt = {"prompt": rng.choice(TEXTS)[: rng.randrange(1, 20)]}
    else:
        piece = [rng.randrange(3, 400) for _ in range(rng.randrange(3, 60))]
        prompt = {"prompt": (piece * LONG_PROMPT)[: rng.randrange(8, LONG_PROMPT)]}
    length = {_length_field(route): rng.randrange(4, 49)}
    draft = _Draft({"model": model, **prompt, **sampling, **length})
    if rng.random() < 0.15:
        draft.body.update(rng.choice(STRUCTURES[:3]))
    names = [name for name in fields if name != "scorer"]
    chosen = rng.sample(names, rng.randrange(min(3, len(names) + 1)))
    if len([name for name in chosen if name.startswith("source_")]) > 1:
        chosen = []
    _spell(rng, draft, {"scorer": "exact", **{name: rng.choice(RIGHT[name]) for name in chosen}})
    draft.body["vllm_xargs"] = draft.xargs
    return FuzzRequest(route, _dump(draft.body), "accepted", draft.names, same=True)


def _good(rng: random.Random, model: str, fields: list[str]) -> FuzzRequest:
    index = rng.randrange(len(GOOD))
    return FuzzRequest(GOOD[index][0], _dump(good_body(index, model)), "accepted", good=index)


def _ours_right(rng: random.Random, model: str, fields: list[str]) -> FuzzRequest:
    route, draft = _plain(rng, model)
    names = [name for name in fields if not name.startswith("source_")]
    sources = [name for name in fields if name.startswith("source_")]
    chosen = rng.sample(names, rng.randrange(1, len(names)))
    chosen += rng.sample(sources, min(len(sources), rng.randrange(2)))
    if rng.random() < 0.2:
        draft.xargs.update(rng.choice(ETA_RIGHT))
    _spell(rng, draft, {name: rng.choice(RIGHT[name]) for name in chosen})
    return _finish(rng, route, draft)


def _ours_wrong(rng: random.Random, model: str, fields: list[str]) -> FuzzRequest:
    route, draft = _plain(rng, model)
    draft.expect = "refused"
    if rng.random() < 0.15:
        given = rng.choice(ETA_WRONG)
        draft.xargs.update(given)
        draft.names = ("eta_", "vllm_xargs")
    elif rng.random() < 0.15:
        draft.xargs["spec_ext"] = rng.choice(["", "{", "[1]", "3", "null", DEEP_LIST, DEEP_OBJECT])
        draft.names = ("spec_ext",)
    else:
        name = rng.choice([*WRONG, "no_such_option", "source_spam", "x" * 300, "\ud800"])
        given = {name: rng.choice(WRONG.get(name, [1]))}
        draft.names = (f"spec_ext.{name}"[:90], "vllm_xargs", "extra_args")
        if name == "\ud800":
            draft.names = ("spec_ext.\\ud800", "vllm_xargs", "surrogate")
        _spell(rng, draft, given)
    return _finish(rng, route, draft)


def _ours_odd(rng: random.Random, model: str, fields: list[str]) -> FuzzRequest:
    """Any value for any option of ours: it may be right or wrong."""
    route, draft = _plain(rng, model)
    draft.expect = "any"
    given = {rng.choice(list(WRONG)): rng.choice(ODD_VALUES) for _ in range(rng.randrange(1, 4))}
    draft.names = ("spec_ext", "vllm_xargs", "surrogate", "extra_args")
    _spell(rng, draft, given)
    return _finish(rng, route, draft)


def _own_odd(rng: random.Random, model: str, fields: list[str]) -> FuzzRequest:
    """Any value for parameters of vLLM's own, beside a right option of ours."""
    route, draft = _plain(rng, model)
    draft.expect = "any"
    for _ in range(rng.randrange(1, 3)):
        name = rng.choice(RESPONSES_FIELDS if route == RESPONSES else OWN_FIELDS)
        values = [value for value in OWN_VALUES.get(name, []) + ODD_VALUES if value != "\ud800"]
        if name == "structured_outputs":
            values = [value for value in values if value is None or isinstance(value, dict)]
        draft.body[name] = rng.choice(values)
    if rng.random() < 0.5 and "vllm_xargs" not in draft.body:
        _spell(rng, draft, {"max_draft_tokens": 3})
    draft.names = ()
    return _finish(rng, route, draft)


def _structured(rng: random.Random, model: str, fields: list[str]) -> FuzzRequest:
    route, draft = _plain(rng, model)
    draft.expect = "any"
    draft.body.update(rng.choice(STRUCTURES))
    _spell(rng, draft, {"enabled": True})
    draft.names = ()
    return _finish(rng, route, draft)


def _raw(rng: random.Random, model: str, fields: list[str]) -> FuzzRequest:
    """A body that is damaged as text."""
    route, draft = _plain(rng, model)
    _spell(rng, draft, {"max_draft_tokens": 3})
    body = bytearray(_dump({**draft.body, "vllm_xargs": draft.xargs}))
    damage: list[Callable[[], None]] = [
        lambda: body.__delitem__(slice(rng.randrange(len(body)), None)),
        lambda: body.__setitem__(rng.randrange(len(body)), rng.randrange(256)),
        lambda: body.__setitem__(slice(None), b"[" * 2000),
        lambda: body.__setitem__(slice(None), b""),
        lambda: body.__setitem__(slice(None), b"[1, 2]"),
    ]
    rng.choice(damage)()
    return FuzzRequest(route, bytes(body), "any")


def _plain(rng: random.Random, model: str) -> tuple[str, _Draft]:
    """A request that vLLM takes."""
    text = rng.choice(TEXTS)
    text = text[: rng.randrange(1, len(text) + 1)]
    route = rng.choice(["completions", "chat/completions", RESPONSES])
    if route in ("chat/completions", RESPONSES):
        prompt = _chat(route, text)
    elif rng.random() < 0.4:
        ids = [rng.randrange(3, 400) for _ in range(rng.randrange(1, 80))]
        prompt = {"prompt": ids * rng.randrange(1, 3)}
    else:
        prompt = {"prompt": text}
    length = {_length_field(route): rng.randrange(2, 24)}
    return route, _Draft({"model": model, **prompt, **rng.choice(OWN_RIGHT), **length})


def _chat(route: str, text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    if route == RESPONSES:
        return {"input": text if len(text) % 2 else messages}
    return {"messages": messages}


def _length_field(route: str) -> str:
    return "max_output_tokens" if route == RESPONSES else "max_tokens"


def _spell(rng: random.Random, draft: _Draft, options: dict[str, Any]) -> None:
    """Write options in one of the two ways; objects and null can be written in one only."""
    fits = all(_fits_xargs(value) for value in options.values())
    if fits and rng.random() < 0.6:
        draft.xargs.update({f"spec_ext.{name}": value for name, value in options.items()})
    else:
        draft.xargs["spec_ext"] = json.dumps(options)
        # What is wrong with the text as a whole has no field.
        draft.names += ("spec_ext: not valid JSON", "spec_ext: found")


def _fits_xargs(value: Any) -> bool:
    """What ``vllm_xargs`` takes as it is; it reads booleans as numbers."""
    if isinstance(value, list):
        return all(_fits_xargs(item) and not isinstance(item, list) for item in value)
    return isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 2**63)


def _finish(rng: random.Random, route: str, draft: _Draft) -> FuzzRequest:
    if draft.xargs:
        draft.body["vllm_xargs"] = draft.xargs
    stream = rng.random() < 0.4 and "stream" not in draft.body
    if stream:
        draft.body["stream"] = True
    leave = rng.choice([0.0, 0.01, 0.05, 0.2]) if rng.random() < 0.1 else None
    return FuzzRequest(
        route, _dump(draft.body), draft.expect, draft.names, stream=stream, leave_after_s=leave
    )


def _dump(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()
