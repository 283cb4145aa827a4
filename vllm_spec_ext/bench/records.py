# SPDX-License-Identifier: Apache-2.0
"""What one timed run leaves behind; plain data that crosses the process boundary."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TurnRecord:
    """One answer of the model, measured from the request's arrival to its last token."""

    num_prompt_tokens: int
    token_ids: tuple[int, ...]  # as the engine emitted them, never re-tokenised text
    step_sizes: tuple[int, ...]  # new tokens of each target step; the first one is the prefill's
    first_token_s: float
    wall_s: float
    step_s: tuple[float, ...]  # from the output before to that of each step
    stalled: tuple[int, ...] = ()  # steps that waited for another request's prefill

    @property
    def decode_steps(self) -> list[int]:
        """Steps after the first output that waited for nobody's prefill.

        Requests of one length prefill and end together, those of a speculating engine do not: in a
        batch their prefills would count against it.
        """
        stalled = set(self.stalled)
        return [step for step in range(1, len(self.step_sizes)) if step not in stalled]


@dataclass(frozen=True)
class QuestionRecord:
    """All turns of one prompt."""

    index: int  # position in the list of questions of this benchmark
    category: str
    turns: tuple[TurnRecord, ...]
    right: bool | None = None  # the last answer holds what was expected; None: nothing was

    @property
    def num_tokens(self) -> int:
        """Generated tokens over all turns."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def wall_s(self) -> float:
        """Seconds spent in its turns, prefill included."""
        return sum(turn.wall_s for turn in self.turns)

    @property
    def token_ids(self) -> list[int]:
        """Generated tokens of all turns, joined."""
        return [token for turn in self.turns for token in turn.token_ids]


@dataclass(frozen=True)
class EngineCounters:
    """vLLM's own counters over one run (``vllm:spec_decode_num_*``, ``vllm:num_preemptions``)."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    num_preemptions: int = 0  # requests that gave up their KV blocks, to be computed again

    def __sub__(self, earlier: "EngineCounters") -> "EngineCounters":
        """What was counted since ``earlier``."""
        before = earlier.accepted_per_position or (0,) * len(self.accepted_per_position)
        return EngineCounters(
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            tuple(now - then for now, then in zip(self.accepted_per_position, before, strict=True)),
            self.num_preemptions - earlier.num_preemptions,
        )

    def __add__(self, other: "EngineCounters") -> "EngineCounters":
        """Both together; the shorter list of positions is padded with zeros."""
        mine, theirs = self.accepted_per_position, other.accepted_per_position
        width = max(len(mine), len(theirs))

        def padded(counts: Sequence[int]) -> list[int]:
            return [*counts, *[0] * (width - len(counts))]

        return EngineCounters(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            tuple(a + b for a, b in zip(padded(mine), padded(theirs), strict=True)),
            self.num_preemptions + other.num_preemptions,
        )


@dataclass(frozen=True)
class EngineRun:
    """One pass over the questions by one engine."""

    questions: tuple[QuestionRecord, ...]  # in order of their index
    wall_s: float
    counters: EngineCounters
    propose_us: tuple[float, ...] | None  # drafter time of each step; None = not measurable
    rss_bytes: int  # resident memory of the engine's processes after the run


def join_runs(parts: Sequence[EngineRun]) -> EngineRun:
    """Passes over different questions as if they were one."""
    times = [part.propose_us for part in parts if part.propose_us is not None]
    return EngineRun(
        questions=tuple(record for part in parts for record in part.questions),
        wall_s=sum(part.wall_s for part in parts),
        counters=sum((part.counters for part in parts), EngineCounters()),
        propose_us=tuple(us for some in times for us in some) if times else None,
        rss_bytes=max(part.rss_bytes for part in parts),
    )


@dataclass(frozen=True)
class Run:
    """An :class:`EngineRun` with its place in the benchmark."""

    method: str
    batch_size: int
    repeat: int  # 0-based
    result: EngineRun


@dataclass(frozen=True)
class EngineFacts:
    """What an engine says about itself after it started."""

    dtype: str  # "float32", "bfloat16", ...
    lossless: bool  # False for methods that change the output on purpose
    device: str
    start_s: float
    kv_tokens: int | None = None  # room for KV of requests; None where vLLM does not say
    prompt_lengths: tuple[int, ...] = ()  # tokens of each question's first turn
