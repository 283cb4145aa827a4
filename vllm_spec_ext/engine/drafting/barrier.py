# SPDX-License-Identifier: Apache-2.0
"""Between a proposer and the engine: what a proposer does wrong costs drafts, never the engine.

A proposer is code of a research method or of another package. If it raises, or returns something
that is no draft, the requests concerned get no draft in this step and decode plainly. Each kind of
failure is logged once, with what was found and what was expected, and every draft that was lost is
counted (``spec_ext:refused_drafts``). With ``VLLM_SPEC_EXT_STRICT=1`` it raises instead: tests and
authors of proposers want to see it.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from vllm_spec_ext.environment import STRICT, is_set
from vllm_spec_ext.errors import ProposerError, RanksApartError
from vllm_spec_ext.proposers.base import EMPTY_DRAFT, Draft, StepContext
from vllm_spec_ext.proposers.draft_tree import parents_of, tree_problem

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.spec_ext")

_ALMOST_ONE = 1.001  # of a probability that was rounded
SUM_TOLERANCE = 2e-2  # of a row of probabilities made in bfloat16; as in scorers.walk.residual

_RAISED = object()
ResultT = TypeVar("ResultT")


class Barrier:
    """Of one engine's proposer; counts what it stopped."""

    def __init__(self, name: str, vocab_size: int) -> None:
        """Start with a clean record.

        Args:
            name: Of the method, for messages.
            vocab_size: Of the target.
        """
        self._name = name
        self._vocab_size = vocab_size
        self._seen: set[str] = set()
        self.num_refused = 0  # drafts that were lost, since the engine started

    def call(self, what: str, function: Callable[[], ResultT], instead: ResultT) -> ResultT:
        """The function's result, or `instead` if it raises.

        Args:
            what: Name of the call, for messages.
            function: A call into the proposer.
            instead: What the engine goes on with.

        Raises:
            ProposerError: It raised, and the environment asks for strictness.
            RanksApartError: Nothing can go on.
        """
        try:
            return function()
        except RanksApartError:
            raise  # the other ranks wait for this one
        except Exception as error:
            kind = f"{what} raised {type(error).__name__}"
            self._report(kind, f"{what}() raised {type(error).__name__}: {error}", error)
            return instead

    def drafts(self, propose: Callable[[StepContext], Any], step: StepContext) -> list[Draft]:
        """Ask for drafts; returns one a request, each of which the engine can schedule.

        Args:
            propose: The proposer's method.
            step: What it is asked.

        Raises:
            ProposerError: Something is wrong, and the environment asks for strictness.
        """
        expected = len(step.requests)
        made = self.call("propose", lambda: propose(step), _RAISED)
        if isinstance(made, Sequence) and len(made) == expected:
            return [self._sound(draft) for draft in made]
        self.num_refused += expected
        if made is not _RAISED:
            found = len(made) if isinstance(made, Sequence) else _shown(made)
            self._report("number", f"propose() returned {found}, expected {expected} drafts")
        return [EMPTY_DRAFT] * expected

    def late_drafts(
        self, draft: Callable[[], Any], shape: tuple[int, int], device: "torch.device"
    ) -> "torch.Tensor | None":
        """Ask for drafts that are looked up on the device; None where there are none to be had.

        Which tokens they are only the device knows, and nobody waits for it: ids that the
        vocabulary does not have are moved into it there, as they would end the engine.

        Args:
            draft: The proposer's look-up.
            shape: [num_requests, num_drafted] that is expected.
            device: Of the engine.

        Raises:
            ProposerError: Something is wrong, and the environment asks for strictness.
        """
        import torch

        made = self.call("draft", draft, _RAISED)
        problem = _late_problem(made, shape, device)
        if problem is None:
            drafts = cast("torch.Tensor", made)
            return drafts.to(torch.int64).clamp(0, self._vocab_size - 1)
        self.num_refused += shape[0]
        if made is not _RAISED:
            self._report("late drafts", problem)
        return None

    def _sound(self, draft: Any) -> Draft:
        error: Exception | None = None
        try:
            problem = draft_problem(draft, self._vocab_size)
        except Exception as raised:  # fields of a kind that none of the checks expects
            kind = f"a draft whose checks raised {type(raised).__name__}"
            problem, error = (kind, f"{kind}: {raised}"), raised
        if problem is None:
            return draft
        self.num_refused += 1
        self._report(*problem, error)
        return EMPTY_DRAFT

    def _report(self, kind: str, message: str, error: Exception | None = None) -> None:
        text = f"proposer {self._name!r}: {message}"
        if is_set(STRICT):
            raise ProposerError(text) from error
        if kind in self._seen:
            return
        self._seen.add(kind)
        logger.error(
            "vllm-spec-ext: %s. The requests concerned get no draft in such a step; this kind of "
            "failure is logged once and counted in spec_ext:refused_drafts",
            text,
            exc_info=error,
        )


def draft_problem(draft: Any, vocab_size: int) -> tuple[str, str] | None:
    """Why the engine cannot schedule a draft: the kind of problem, and it in words; None if it can.

    A draft longer than its room is no problem: it is cut.
    """
    if not isinstance(draft, Draft):
        return "type", f"found a {type(draft).__name__}, expected a Draft"
    tokens = draft.tokens
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        return "tokens", f"tokens: found {_shown(tokens)}, expected [n] integers"
    if not len(tokens):
        return None
    ids = tokens.tolist()  # for so few, numpy's own minimum takes ten times as long
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        return "token ids", f"tokens: found id {wrong}, expected 0 to {vocab_size - 1}"
    if draft.parents is not None:
        parents = draft.parents
        if not isinstance(parents, np.ndarray) or parents.ndim != 1 or parents.dtype.kind != "i":
            return "parents", f"parents: found {_shown(parents)}, expected [n] integers"
        problem = tree_problem(parents.tolist(), len(tokens))
        if problem is not None:
            return "parents", f"parents: {problem}"
    shown = _problem_for_display(draft)
    if shown is not None or draft.probs is None:
        return shown
    return _distribution_problem(draft, vocab_size)


def _late_problem(made: object, shape: tuple[int, int], device: "torch.device") -> str | None:
    import torch

    expected = f"integers {list(shape)} on {device.type}"
    if not isinstance(made, torch.Tensor):
        return f"draft() returned {_shown(made)}, expected {expected}"
    is_right = made.shape == shape and made.device.type == device.type
    if is_right and made.dtype in (torch.int32, torch.int64):
        return None
    found = f"{made.dtype}{list(made.shape)} on {made.device.type}"
    return f"draft() returned {found}, expected {expected}"


def _problem_for_display(draft: Draft) -> tuple[str, str] | None:
    """What is wrong with what metrics, ``top`` and ``explain-step`` would show of a draft."""
    paths, sources = draft.path_probs, draft.sources
    if paths is not None:
        is_array = isinstance(paths, np.ndarray) and paths.dtype.kind == "f"
        if not is_array or paths.shape != draft.tokens.shape:
            expected = f"floats of shape {draft.tokens.shape}"
            return "path_probs", f"path_probs: found {_shown(paths)}, expected {expected}"
        wrong = [value for value in paths.tolist() if not 0.0 <= value <= _ALMOST_ONE]
        if wrong:
            return "path_probs", f"path_probs: found {wrong[0]:.4g}, expected 0 to 1"
    if sources is not None:
        if not isinstance(sources, Sequence) or len(sources) != len(draft.tokens):
            found = len(sources) if isinstance(sources, Sequence) else _shown(sources)
            return "sources", f"sources: found {found}, expected one for each node"
        unnamed = [names for names in sources if not _are_names(names)]
        if unnamed:
            return "sources", f"sources: found {unnamed[0]!r}, expected a tuple of names"
    return None if draft.strengths is None else _strengths_problem(draft)


def _strengths_problem(draft: Draft) -> tuple[str, str] | None:
    """What is wrong with the words for how strong the evidence of each source is."""
    strengths, sources = draft.strengths, draft.sources
    if sources is None:
        return "strengths", "strengths: found no sources, expected the sources that they belong to"
    if not isinstance(strengths, Sequence) or len(strengths) != len(sources):
        found = len(strengths) if isinstance(strengths, Sequence) else _shown(strengths)
        return "strengths", f"strengths: found {found}, expected one for each node"
    for named, names in zip(strengths, sources, strict=True):
        if not _are_names(named) or len(named) != len(names):
            return "strengths", f"strengths: found {named!r}, expected one for each of {names!r}"
    return None


def _are_names(names: object) -> bool:
    return isinstance(names, tuple) and all(type(name) is str for name in names)


def _distribution_problem(draft: Draft, vocab_size: int) -> tuple[str, str] | None:
    """What is wrong with the distributions that a draft was drawn from."""
    import torch

    probs, expected = draft.probs, (len(draft), vocab_size)
    if draft.drawn not in ("iid", "without_replacement"):
        return "drawn", f"drawn: found {draft.drawn!r}, expected 'iid' or 'without_replacement'"
    if not isinstance(probs, torch.Tensor) or not probs.is_floating_point():
        return "probs", f"probs: found {_shown(probs)}, expected a tensor of floats"
    if tuple(probs.shape) != expected:
        return "probs", (
            f"probs: found shape {tuple(probs.shape)}, expected {expected}, a distribution a node"
        )
    # As it is verified: in float32 a token of tiny probability may have none.
    tokens = torch.from_numpy(draft.tokens.astype(np.int64)).to(probs.device)
    own = probs.gather(1, tokens[:, None]).to(torch.float32)
    # Waits for the device once; distributions are rare, and wrong ones would bias the output.
    least, sums, drawn = torch.stack(
        [probs.amin(dim=1).float(), probs.sum(dim=1, dtype=torch.float32) - 1.0, own[:, 0]]
    ).cpu()
    if not (least >= 0).all() or not (sums.abs() <= SUM_TOLERANCE).all():
        return "probs", (
            f"probs: found rows that sum to {(sums + 1.0).tolist()[:4]}, least {least.min():.3g}; "
            "expected probabilities that sum to 1"
        )
    if not (drawn > 0).all():
        return "probs", "probs: found a token of probability 0 in the row that it was drawn from"
    named = zip(parents_of(draft), draft.tokens.tolist(), strict=True)
    if draft.drawn == "without_replacement" and len(set(named)) < len(draft):
        return "drawn", "drawn without replacement: found a token twice among siblings"
    return None


def _shown(value: object) -> str:
    kind = type(value).__name__
    return f"{kind} {value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else kind
