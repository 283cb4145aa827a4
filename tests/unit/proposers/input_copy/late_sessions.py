# SPDX-License-Identifier: Apache-2.0
"""Texts full of repetitions, read by ``input_copy`` step by step: and what it drafts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from texts_that_copy import texts_that_copy

from vllm_spec_ext.proposers.base import UNSALTED, EngineHandle, RequestStep, StepContext
from vllm_spec_ext.proposers.input_copy import InputCopy
from vllm_spec_ext.proposers.input_copy.copy_state import LateState
from vllm_spec_ext.proposers.input_copy.late_reference import Texts
from vllm_spec_ext.proposers.input_copy.options import InputCopyOptions, InputCopyRequest

VOCAB = 10
K = 6
FOLDED = np.array([0, 1, 1, 3, 4, 5, 5, 7, 8, 9, VOCAB], np.int32)  # 2 is 1, and 6 is 5
ENGINE = EngineHandle(VOCAB, 4096, 8, K, "none", lambda: None)


@dataclass
class Session:
    """Requests of one share group, one after the other."""

    options: dict[str, Any]
    requests: list["Request"]


@dataclass
class Request:
    """A prompt, and what is said in each step."""

    prompt: list[int]
    steps: list[list[int]]
    given: dict[str, Any] = field(default_factory=dict)


@dataclass
class Moment:
    """Right after a step: a request, the state before it, and what the proposer drafts."""

    request: RequestStep
    before: LateState
    texts: Texts
    drafted: list[int]
    late: Any  # what `late` returned


def start(options: dict[str, Any]) -> InputCopy:
    proposer = InputCopy(InputCopyOptions(**options))
    proposer.start(ENGINE)
    proposer._folded = FOLDED
    return proposer


def step_of(name: str, request: Request, output: list[int], new: list[int]) -> RequestStep:
    return RequestStep(
        request_id=name,
        token_ids=np.array([*request.prompt, *output], np.int32),
        num_prompt_tokens=len(request.prompt),
        new_tokens=new,
        room=K,
        options=InputCopyRequest(**request.given),
        share_group=UNSALTED,
    )


def moments(
    session: Session,
    proposer: InputCopy,
    late: Callable[[RequestStep, list[int]], Any] | None = None,
) -> Iterator[Moment]:
    """Each step of each request.

    Args:
        session: What is said.
        proposer: Stands behind the step when that is given.
        late: Called before the proposer has read the step, with what it knows and all tokens.
    """
    for number, request in enumerate(session.requests):
        name, output = f"r{number}", list[int]()
        copy = proposer.known_copy(step_of(name, request, [], []))
        for new in request.steps:
            before, known = LateState.of(copy), step_of(name, request, output, [])
            output += new
            step = step_of(name, request, output, new)
            memory = proposer.earlier_answers(UNSALTED)
            answers = [] if memory is None else memory.tokens.tolist()
            seen = late(known, [*request.prompt, *output]) if late else None
            [draft] = proposer.propose(StepContext([step], fixed_length=True))
            heading = copy.heading.tolist()
            texts = Texts(list(output), copy.source.tolist(), answers, heading)
            yield Moment(step, before, texts, draft.tokens.tolist(), seen)
        proposer.finish([name])


TOKENS = st.integers(0, 7)
OPTIONS = st.fixed_dictionaries(
    {
        "max_ngram": st.sampled_from([1, 2, 4, 16]),
        "min_ngram": st.just(1),
        "output_min_ngram": st.sampled_from([1, 2]),
        "match": st.sampled_from(["unique", "latest", "best"]),
        "near": st.sampled_from([0, 3, 64]),
        "realign": st.sampled_from([0, 4]),
        "also_output": st.booleans(),
        "earlier_answers": st.sampled_from([0, 40, 200]),
    }
)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    prompt, steps = draw(texts_that_copy(TOKENS, 8, K + 1))
    given: dict[str, Any] = {}
    kind = draw(st.sampled_from(["prompt", "span", "ids"]))
    if kind == "span":
        begin = draw(st.integers(0, len(prompt) - 1))
        given["source_span"] = (begin, draw(st.integers(begin + 1, len(prompt))))
    elif kind == "ids":
        # A tokenizer may know ids that the model cannot say.
        given["source_token_ids"] = draw(st.lists(st.integers(0, VOCAB + 1), max_size=20))
    return Request(prompt, steps, given)


@st.composite
def sessions(draw: st.DrawFn) -> Session:
    options, found = draw(OPTIONS), draw(st.lists(requests(), min_size=1, max_size=3))
    for request in found[1:]:
        if draw(st.booleans()):  # the same is asked again
            request.prompt, request.given = found[0].prompt, found[0].given
    return Session(options, found)


SESSIONS = sessions()

WELL_COPIED = Session(
    {"earlier_answers": 40},
    [Request([7], [[9, 3, 4, 0]]), Request([7, 8, 3, 4, 1], [[7, 8, 3], [4]])],
)
"""An earlier answer agrees in two tokens, the source in four."""
