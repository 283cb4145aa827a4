# SPDX-License-Identifier: Apache-2.0
"""Decoding under a relaxed rule, written down a second time from the rules' definitions.

Nothing of the plugin is used: the target is the Hugging Face model, run without any cache; a rule
is its JSON; drafts are made of ranks of the target's own tokens, so that some are tolerated and
some are not. It is slow and only for the tiny model.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = -1


class Target:
    """Logits of the tiny model after any prefix."""

    def __init__(self, folder: Path) -> None:
        from transformers import LlamaForCausalLM

        self._model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._known: dict[tuple[int, ...], Tensor] = {}

    def logits(self, prefix: Sequence[int]) -> Tensor:
        """[vocab] float32."""
        key = tuple(prefix)
        if key not in self._known:
            with torch.no_grad():
                self._known[key] = self._model(torch.tensor([key])).logits[0, -1]
        return self._known[key]


def stands(rule: Mapping[str, Any], logits: Tensor, token: int, depth: int, forced: bool) -> bool:
    """Whether a rule tolerates a token.

    Args:
        rule: As a user writes it.
        logits: [vocab] of the row that verifies the token, forbidden ones at ``-inf``.
        token: The draft token.
        depth: 0 for the first draft token of a step.
        forced: The token belongs to the first path of its draft.
    """
    if logits[token] == -torch.inf:
        return False
    rank = int((logits > logits[token]).sum())
    kind = rule["type"]
    if kind == "top_k":
        return rank < rule["k"]
    if kind == "tolerance":
        return rank < rule["beta"] and float(logits.max() - logits[token]) <= rule["tau"]
    if kind == "distance":
        return abs(int(logits.argmax()) - token) <= rule["epsilon"]
    if kind == "min_block":
        return forced and depth < rule["length"] - 1
    assert kind == "any_of"
    return any(stands(member, logits, token, depth, forced) for member in rule["rules"])


@dataclass
class Decoded:
    """What the reference said, and the drafts that it was given on the way."""

    tokens: list[int] = field(default_factory=list)
    drafts: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    """Number of output tokens before the step -> tokens and parents."""
    num_tolerated: int = 0
    """Accepted tokens that were not the target's own choice."""
    num_refused: int = 0
    """Steps that ended although the draft went on."""
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Request:
    """A prompt and what may be said."""

    prompt: Sequence[int]
    num_tokens: int
    exact_ids: Sequence[int] = ()  # stop ids: only an exact match accepts these
    allowed: Sequence[int] | None = None
    parents: Sequence[int] = (-1, 0, 1, 2)  # shape of the drafts


def decode(target: Target, rule: Mapping[str, Any], request: Request, seed: int) -> Decoded:
    """Greedy decoding under a rule, drafts included."""
    random_ = random.Random(seed)
    found = Decoded()

    def masked(prefix: Sequence[int]) -> Tensor:
        logits = target.logits([*request.prompt, *prefix])
        if request.allowed is None:
            return logits
        only = torch.full_like(logits, -torch.inf)
        only[list(request.allowed)] = logits[list(request.allowed)]
        return only

    def emit(token: int) -> None:
        prefix = [*request.prompt, *found.tokens]
        found.logprobs.append(float(target.logits(prefix).log_softmax(-1)[token]))
        found.tokens.append(token)

    emit(int(masked([]).argmax()))
    while len(found.tokens) < request.num_tokens:
        room = request.num_tokens - len(found.tokens) - 1
        tokens, parents, paths = _draft(masked, found.tokens, request, room, random_)
        found.drafts[len(found.tokens)] = tokens, parents
        node = ROOT
        while True:
            logits = masked(found.tokens)
            choice = int(logits.argmax())
            children = [i for i, parent in enumerate(parents) if parent == node]
            taken = next((i for i in children if tokens[i] == choice), None)
            if taken is None:
                free = [i for i in children if tokens[i] not in request.exact_ids]
                good = [
                    i
                    for i in free
                    if stands(rule, logits, tokens[i], len(paths[i]), _first(parents, i))
                ]
                taken = max(good, key=lambda i: float(logits[tokens[i]]), default=None)
                found.num_tolerated += taken is not None
            if taken is None:
                found.num_refused += bool(children)
                emit(choice)
                break
            emit(tokens[taken])
            node = taken
    return found


def _first(parents: Sequence[int], node: int) -> bool:
    return all(parents[i] == i - 1 for i in range(node + 1))


def _draft(
    masked: Any, said: Sequence[int], request: Request, room: int, random_: random.Random
) -> tuple[list[int], list[int], list[list[int]]]:
    """A tree of the given shape, of better and worse tokens of the target, siblings different.

    Returns:
        Tokens, parents and the path above each node.
    """
    tokens: list[int] = []
    paths: list[list[int]] = []
    parents = list(request.parents[:room])
    for parent in parents:
        path = [] if parent == ROOT else [*paths[parent], tokens[parent]]
        logits = masked([*said, *path])
        best = logits.topk(5).indices.tolist()
        near = [(best[0] + step) % len(logits) for step in (1, 2, 3, 40)]
        siblings = {tokens[i] for i, other in enumerate(parents[: len(tokens)]) if other == parent}
        options = [*best, *best[:2], *near, *request.exact_ids]
        tokens.append(random_.choice([t for t in options if t not in siblings]))
        paths.append(path)
    return tokens, parents, paths


def sample(
    target: Target,
    rule: Mapping[str, Any],
    request: Request,
    draft: Sequence[int],
    count: int,
    generator: torch.Generator,
) -> list[tuple[int, ...]]:
    """Sampled outputs at temperature 1 when every step drafts the same chain.

    A tolerated draft token stands for certain; any other one if it is the token that is drawn.
    """
    assert request.allowed is not None
    allowed = list(request.allowed)
    found = []
    for _ in range(count):
        said: list[int] = []
        chain: list[int] = []  # what is left of the step's draft
        depth = 0
        while len(said) < request.num_tokens:
            logits = torch.full_like(target.logits(request.prompt), -torch.inf)
            logits[allowed] = target.logits([*request.prompt, *said])[allowed]
            drawn = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
            if chain and (drawn == chain[0] or stands(rule, logits, chain[0], depth, True)):
                said.append(chain.pop(0))
                depth += 1
                continue
            said.append(drawn)
            chain, depth = list(draft), 0
        found.append(tuple(said))
    return found
