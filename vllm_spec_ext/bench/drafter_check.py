# SPDX-License-Identifier: Apache-2.0
"""Does a trained drafter do what it should, and if not, why? Judges what was measured.

Pure: no engine and no model. A cause is named only together with the figure that speaks for it.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from vllm_spec_ext.bench.drafter_parts import Recorded

AS_TRAINED = "as its files say"
WITHOUT_PROMPT = "without the prompt"
BEFORE_NORM = "states in front of the target's last norm"
BEHIND_NORM = "the last layer's states behind the target's last norm"
LAYER_BEFORE = "states of the layer before the last"

BROKEN = 0.5
"""Part of the expected acceptance below which a drafter is broken."""
LOW = 0.75
"""Part of it below which causes are looked for: text unlike that of the training costs as much (the
packaged heads accept 0.36 to 0.55 by kind of text, 0.52 of their training's)."""
SOUND = 0.25
"""Part of what is recorded that a draft token reaches whose weights are right, on any text: tokens
further ahead lose most where text is unlike that of the training. Random weights reach 0.05."""
CLEARLY = 0.1
"""Difference between two shares of the same places that is none of rounding."""
FIRST_TOKENS = 8  # behind the prompt: what is missing of its states shows there

Verdict = Literal["healthy", "low", "broken"]


class FirstToken(NamedTuple):
    """The first token of a draft, verified by the engine."""

    answer: int  # number of the answer
    place: int  # of the token in it, from 0
    right: bool
    token: int | None = None  # None = not known, of vLLM's own methods


@dataclass(frozen=True)
class Measured:
    """What the engine made of the drafts."""

    answers: tuple[tuple[list[int], list[int]], ...]  # token ids of prompt and answer
    firsts: tuple[FirstToken, ...]
    num_silent: int = 0  # steps that could have had a draft and had none

    def share(self, places: Iterable[FirstToken] | None = None) -> "Share":
        """First draft tokens accepted."""
        return Share.of(first.right for first in (self.firsts if places is None else places))

    def early(self) -> list[FirstToken]:
        """Those right behind the prompt."""
        return [first for first in self.firsts if first.place < FIRST_TOKENS]

    def late(self) -> list[FirstToken]:
        """The others."""
        return [first for first in self.firsts if first.place >= FIRST_TOKENS]

    def by_prompt_length(self) -> tuple[int, list[FirstToken], list[FirstToken]]:
        """The median length of the prompts, and what belongs to shorter and to longer ones."""
        lengths = [len(prompt) for prompt, _ in self.answers]
        middle = round(statistics.median(lengths))
        short = [first for first in self.firsts if lengths[first.answer] <= middle]
        long = [first for first in self.firsts if lengths[first.answer] > middle]
        return middle, short, long


@dataclass(frozen=True)
class Share:
    """Right ones of so many."""

    right: int
    total: int

    @classmethod
    def of(cls, flags: Iterable[bool]) -> "Share":
        """Count."""
        found = list(flags)
        return cls(sum(found), len(found))

    @property
    def value(self) -> float:
        """0 of none."""
        return self.right / self.total if self.total else 0.0

    @property
    def high(self) -> float:
        """Upper end of Wilson's 95 % interval."""
        return self._bound(1.96)

    @property
    def low(self) -> float:
        """Lower end of it."""
        return self._bound(-1.96)

    def _bound(self, z: float) -> float:
        if not self.total:
            return 1.0 if z > 0 else 0.0
        n, p = self.total, self.value
        middle = p + z * z / (2 * n)
        return (middle + z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))) / (1 + z * z / n)

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.right} of {self.total})"


@dataclass(frozen=True)
class Trials:
    """What :mod:`.drafter_trials` found."""

    drafted: Mapping[str, Sequence[Sequence[Sequence[int]]]]  # by name, answer and place
    agreement: float = 1.0
    layers: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> "Trials":
        """From its JSON."""
        return cls(found["trials"], found["agreement"], found["layers"])

    def share(self, name: str, measured: Measured, among: Iterable[FirstToken]) -> Share:
        """First tokens right at the same places."""
        answers = [answer for _, answer in measured.answers]
        return Share.of(
            self._first(name, one) == answers[one.answer][one.place]
            for one in among
            if self._first(name, one) is not None
        )

    def same(self, name: str, measured: Measured) -> Share:
        """First tokens that are the engine's, wherever these are known."""
        return Share.of(
            self._first(name, one) == one.token
            for one in measured.firsts
            if one.token is not None and self._first(name, one) is not None
        )

    def everywhere(self, name: str, measured: Measured, number: int = 0) -> Share:
        """Right tokens at all places of the answers, as a training counts; from 0 on."""
        flags = []
        for rows, (_, answer) in zip(self.drafted[name], measured.answers, strict=True):
            for place, row in enumerate(rows):
                if number < len(row) and place + number < len(answer):
                    flags.append(row[number] == answer[place + number])
        return Share.of(flags)

    def _first(self, name: str, one: FirstToken) -> int | None:
        rows = self.drafted[name][one.answer]
        row = rows[one.place] if one.place < len(rows) else ()
        return row[0] if row else None


@dataclass(frozen=True)
class Cause:
    """What is wrong, how that is known, and what to do."""

    name: str
    figure: str
    fix: str
    certain: bool = True  # the figure leaves nothing else


@dataclass(frozen=True)
class Judgement:
    """The verdict on one checkpoint: ``broken`` if less than half of what should be is accepted, or
    if a cause is certain: other layers may cost only some of the first tokens, and more later."""

    verdict: Verdict
    causes: tuple[Cause, ...] = ()


def judge(expected: Recorded, measured: Measured, trials: Trials | None = None) -> Judgement:
    """Compare what was expected with what was measured.

    Args:
        expected: What the drafter's files say.
        measured: What the engine accepted.
        trials: What it drafts outside the engine; None = not tried, or not known how.
    """
    share = measured.share()
    if not share.total or measured.num_silent > share.total:
        return Judgement("broken", (_silent(measured),))
    causes = _without_trials(measured) if trials is None else _causes(expected, measured, trials)
    certain = [cause for cause in causes if cause.certain]
    if certain or share.high < BROKEN * expected.expected:
        return Judgement("broken", tuple(causes))
    if share.value >= LOW * expected.expected:
        return Judgement("healthy")
    return Judgement("low", tuple(causes))


def other_layers(
    own: tuple[int, ...], num_layers: int, default: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Layers that a drafter may have been trained on instead, counted from 0.

    One or two up or down, as layers are counted from 0 or 1 and with or without the embeddings; and
    what trainers take by default.

    Args:
        own: Those that it names.
        num_layers: Of the target.
        default: Of our trainer.
    """
    moved = [tuple(layer + step for layer in own) for step in (1, -1, 2, -2)]
    # EAGLE-3's: the second layer, the middle, and the third from the end.
    eagle = (1, num_layers // 2 - 1, num_layers - 4)
    found: list[tuple[int, ...]] = []
    for layers in [*moved, default, eagle]:
        fits = len(layers) == len(own) and layers[0] >= 0 and layers[-1] < num_layers
        if fits and layers != own and layers not in found:
            found.append(layers)
    return found


def _silent(measured: Measured) -> Cause:
    count = len(measured.firsts)
    return Cause(
        "no drafts",
        f"{measured.num_silent} steps had room for a draft and had none, {count} had one",
        "look into the engine's log for why it does not draft (a failed load, states of the prompt "
        "that are missing, a limit of its context)",
    )


def _misses_prompt(measured: Measured) -> bool:
    early, late = measured.share(measured.early()), measured.share(measured.late())
    return early.high < BROKEN * late.value


def _without_trials(measured: Measured) -> list[Cause]:
    if not _misses_prompt(measured):
        return []
    return [_prompt_missing(measured, "")]


def _prompt_missing(measured: Measured, more: str) -> Cause:
    early, late = measured.share(measured.early()), measured.share(measured.late())
    return Cause(
        "prompt states missing",
        f"the first {FIRST_TOKENS} tokens behind the prompt: {early}, later ones: {late}{more}",
        "the drafter does not see the prompt's states in the engine; report it with this output, "
        "and try --engine-arg enable_prefix_caching=false and enable_chunked_prefill=false",
    )


def _causes(expected: Recorded, measured: Measured, trials: Trials) -> list[Cause]:
    if trials.agreement < 1.0 - CLEARLY:
        return [
            Cause(
                "another target in the engine",
                f"read by transformers, the target would have said {trials.agreement:.2f} of the "
                "engine's own greedy answers, expected 1.00",
                "the engine serves other weights or another precision than --model names (an "
                "adapter, a quantization); train the drafter for what is served",
            )
        ]
    inside = measured.share()
    outside = trials.share(AS_TRAINED, measured, measured.firsts)
    if outside.value - inside.value > CLEARLY or _loses_behind_prompt(measured, trials):
        return [_wiring(measured, trials, inside, outside)]
    return _files(expected, measured, trials, outside)


def _wiring(measured: Measured, trials: Trials, inside: Share, outside: Share) -> Cause:
    """Good outside the engine, bad inside."""
    figure = f"outside the engine it drafts {outside} right at the same places, inside {inside}"
    if _loses_behind_prompt(measured, trials):
        parts = (measured.early(), measured.late())
        early, late = (trials.share(AS_TRAINED, measured, part) for part in parts)
        return _prompt_missing(measured, f"; outside the engine {early} and {late}")
    same = {name: trials.same(name, measured) for name in trials.drafted}
    best = max(same, key=lambda name: same[name].value)
    if same[best].value > max(same[AS_TRAINED].value + CLEARLY, BROKEN):
        figure += (
            f"; the engine's drafts are those of {best} at {same[best]} of the places, against "
            f"{same[AS_TRAINED]} of what its files say"
        )
        name = {
            WITHOUT_PROMPT: "prompt states missing",
            BEFORE_NORM: "wrong norm",
            BEHIND_NORM: "wrong norm",
        }.get(best, "wrong layers")
        return Cause(f"{name}, in the engine", figure, _REPORT)
    return Cause("wrong wiring in the engine", figure, _REPORT)


def _loses_behind_prompt(measured: Measured, trials: Trials) -> bool:
    """The engine is worse than the files right behind the prompt, and no worse later."""
    early, late = (
        trials.share(AS_TRAINED, measured, part).value - measured.share(part).value
        for part in (measured.early(), measured.late())
    )
    return early > 2 * CLEARLY and late < CLEARLY


_REPORT = (
    "the drafter is fine, and the engine gives it something else than it was trained on; report it "
    "with this output and the model's name"
)
_RETRAIN = (
    "serve the target that it was trained for, or train it again for this one (`vllm-spec train`)"
)


def _files(expected: Recorded, measured: Measured, trials: Trials, outside: Share) -> list[Cause]:
    """Inside and outside the engine alike."""
    own = trials.everywhere(AS_TRAINED, measured)
    others = {
        name: trials.everywhere(name, measured)
        for name in trials.drafted
        if name not in (AS_TRAINED, WITHOUT_PROMPT)
    }
    best = max(others, key=lambda name: others[name].value, default=None)
    least = BROKEN * (expected.everywhere or expected.expected)
    if best is not None and others[best].value > max(own.value + CLEARLY, least):
        figure = f"over {best} it drafts {others[best]} right at all places, {AS_TRAINED} {own}"
        layers = trials.layers.get(best)
        if layers is not None:
            fix = (
                f"set target_layer_ids in its config.json to {list(layers)} (it says "
                f"{list(expected.layers or ())})"
            )
            return [Cause("wrong layers", figure, fix)]
        name = "wrong layers" if best == LAYER_BEFORE else "wrong norm"
        return [
            Cause(
                name,
                figure,
                "it was trained on other states than vLLM gives; train it again with `vllm-spec "
                "train`, which reads them as the engine does",
            )
        ]
    damaged = _damaged(expected, measured, trials)
    if damaged is not None:
        return [damaged]
    figure = f"{outside} outside the engine, too, {expected.expected:.2f} expected"
    if expected.finetuned:
        return [
            Cause(
                "target fine-tuned",
                f"{figure}; the target was fine-tuned with these heads",
                "serve the model that was saved with them",
                certain=False,
            )
        ]
    told = "" if expected.target is None else f"; it was trained for {expected.target}"
    if outside.high < BROKEN * expected.expected:
        return [Cause("not trained for this target", figure + told, _RETRAIN)]
    return [
        Cause(
            "target fine-tuned since, or text unlike that of the training",
            figure + told,
            "measure with prompts like those of the training (--prompts); if that changes nothing, "
            "the target was changed: train the drafter again for it",
            certain=False,
        )
    ]


def _damaged(expected: Recorded, measured: Measured, trials: Trials) -> Cause | None:
    """One draft token far worse than another one, against what is recorded of both."""
    rates = [
        (trials.everywhere(AS_TRAINED, measured, number), told)
        for number, told in enumerate(expected.per_token)
    ]
    parts = [found.value / told if told else 0.0 for found, told in rates]
    sound = max(range(len(parts)), key=parts.__getitem__, default=0)
    if not parts or parts[sound] < SOUND:
        return None
    bad = min(range(len(parts)), key=parts.__getitem__)
    (found, told), (other, known) = rates[bad], rates[sound]
    if found.high >= LOW * parts[sound] * told:
        return None
    return Cause(
        "damaged weights",
        f"draft token {bad + 1} is right at {found} of all places, recorded are {told:.2f}; "
        f"token {sound + 1} at {other}, recorded are {known:.2f}",
        "copy the checkpoint again from where it was trained, or train it again",
    )
