# SPDX-License-Identifier: Apache-2.0
"""Batches of requests that repeat themselves and each other, read by a late ``adaptive_ngram``."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from hypothesis import strategies as st
from number_corpus import NumberTokenizer, build_corpus
from texts_that_copy import texts_that_copy

from vllm_spec_ext.options import RequestOptions
from vllm_spec_ext.proposers.adaptive_ngram import AdaptiveNgram
from vllm_spec_ext.proposers.adaptive_ngram.options import AdaptiveNgramOptions
from vllm_spec_ext.proposers.base import UNSALTED, EngineHandle, RequestStep, StepContext

VOCAB = 10  # one more than the tokenizer knows
K = 6
BATCH = 3


ENGINE = EngineHandle(VOCAB, 4096, BATCH, K, "none", lambda: NumberTokenizer(VOCAB - 1))


@cache
def corpus() -> str:
    """Folder of a store, made once."""
    folder = TemporaryDirectory()
    corpus.folder = folder  # type: ignore[attr-defined]  # lives as long as the process
    draw = np.random.default_rng(5)
    documents = [draw.integers(0, VOCAB - 2, 40) // draw.integers(1, 4, 40) for _ in range(3)]
    build_corpus(Path(folder.name), documents, VOCAB - 1, min_count_bigram=1)
    return folder.name


@dataclass
class Request:
    """A prompt, what is said in each step, and who may see it."""

    prompt: list[int]
    steps: list[list[int]]
    share_group: str | None = UNSALTED
    room: int = K
    begins: int = 0  # step of the session


@dataclass
class Session:
    """At most ``BATCH`` requests at a time; later ones wait for a place."""

    options: dict[str, Any]
    requests: list[Request]


@dataclass
class Moment:
    """Right after a step, of each request: all tokens, and what the proposer drafts."""

    texts: list[list[int]]
    drafted: list[list[int]]
    late: Any  # what `late` returned


def start(options: dict[str, Any]) -> AdaptiveNgram:
    given = {**options, "tree": False}
    if given.pop("in_corpus", False):
        given["corpus"] = corpus()
    proposer = AdaptiveNgram(AdaptiveNgramOptions(**given))
    proposer.start(ENGINE)
    return proposer


def step_of(name: str, request: Request, text: Sequence[int], new: Sequence[int]) -> RequestStep:
    return RequestStep(
        request_id=name,
        token_ids=np.array(text, np.int32),
        num_prompt_tokens=len(request.prompt),
        new_tokens=new,
        room=request.room,
        options=RequestOptions(),
        share_group=request.share_group,
    )


Late = Callable[[list[RequestStep], list[list[int]]], Any]


def moments(session: Session, proposer: AdaptiveNgram, late: Late) -> Iterator[Moment]:
    """Each step of the batch.

    Args:
        session: What is said.
        proposer: Stands behind the step when that is given.
        late: Called before the proposer has read the step, with what it knows and all tokens.
    """
    waiting = list(enumerate(session.requests))
    running: dict[str, tuple[Request, list[int], list[list[int]]]] = {}
    number = 0
    while waiting or running:
        for index, request in list(waiting):
            if len(running) < BATCH and request.begins <= number:
                running[f"r{index}"] = (request, list(request.prompt), list(request.steps))
                waiting.remove((index, request))
        number += 1
        if not running:
            continue
        known = [step_of(name, one, text, []) for name, (one, text, _) in running.items()]
        steps = []
        for name, (one, text, left) in running.items():
            new = left.pop(0)
            text.extend(new)
            steps.append(step_of(name, one, text, new))
        texts = [list(text) for _, text, _ in running.values()]
        seen = late(known, texts)
        drafts = proposer.propose(StepContext(steps, fixed_length=True))
        yield Moment(texts, [draft.tokens.tolist() for draft in drafts], seen)
        gone = [name for name, (_, _, left) in running.items() if not left]
        proposer.finish(gone)
        for name in gone:
            del running[name]


# The corpus has no 8, 9 is the model's alone, and 12 nobody's.
TOKENS = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8, 9, 12])
OPTIONS = st.fixed_dictionaries(
    {
        "in_corpus": st.just(True),
        "overlay": st.sampled_from(["request", "shared", "both", "none"]),
        "max_cache_salts": st.just(1),
        "backoff": st.sampled_from(["mix", "empty", "off"]),
        "learn_prompt": st.booleans(),
        "half_life": st.sampled_from([0.0, 3.0, 500.0]),
        "cap": st.sampled_from([1.5, 3.0]),
        "request_buckets": st.just(16),
        "shared_buckets": st.just(16),
        "unseen_weight": st.sampled_from([0.0, 1.0]),
        "min_confidence": st.sampled_from([0.0, 0.05, 0.3]),
        "max_depth": st.sampled_from([None, 2]),
    }
) | st.fixed_dictionaries(
    {
        "overlay": st.sampled_from(["request", "shared", "both"]),
        "backoff": st.sampled_from(["mix", "empty", "off"]),
        "request_buckets": st.just(16),
        "shared_buckets": st.just(16),
        "half_life": st.sampled_from([0.0, 20.0]),
    }
)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    prompt, steps = draw(texts_that_copy(TOKENS, 6, K + 1))
    return Request(
        prompt,
        steps,
        draw(st.sampled_from([UNSALTED, UNSALTED, "a", "b", None])),
        draw(st.sampled_from([K, K, 2, 0])),
        draw(st.integers(0, 3)),
    )


SESSIONS = st.builds(Session, OPTIONS, st.lists(requests(), min_size=1, max_size=5))
