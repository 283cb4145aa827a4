# SPDX-License-Identifier: Apache-2.0
"""What a drafter drafts for recorded answers outside the engine: as trained, and read otherwise.

    python -m vllm_spec_ext.bench.drafter_trials --answers answers.json --json out

Target and drafter are plain transformers and torch here. If the drafter is good as its files say,
but not in the engine, the engine is at fault; if it is good only over other layers or states of the
target than its files say, these are. ``vllm-spec doctor --method`` runs it, in a process of its
own.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_spec_ext.bench.draft_acceptance import check_ids
from vllm_spec_ext.bench.drafter_check import (
    AS_TRAINED,
    BEFORE_NORM,
    BEHIND_NORM,
    LAYER_BEFORE,
    WITHOUT_PROMPT,
    other_layers,
)
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.blockwise.heads import BlockwiseHeads, load_heads
from vllm_spec_ext.training.batches import make_batch
from vllm_spec_ext.training.blockwise.tokens_seen import tokens_seen
from vllm_spec_ext.training.draft.evaluate import draft_states
from vllm_spec_ext.training.draft_vocab import DraftProjection
from vllm_spec_ext.training.hidden import HiddenSource, live_states
from vllm_spec_ext.training.nar.evaluate import Drafting, drafted_tokens
from vllm_spec_ext.training.nar.model import NarDrafter
from vllm_spec_ext.training.nar.schema import NarTraining
from vllm_spec_ext.training.shards import TokenData
from vllm_spec_ext.training.target import Target, load_target, load_tokenizer, pick_device
from vllm_spec_ext.training.text_copies import TextCopies

_BATCH = 4

Rows = list[list[list[int]]]
"""Of each answer, for each of its tokens, what is drafted from that place on."""

Trial = tuple[str, Rows, list[int] | None]
"""Its name, what was drafted, and the layers that were read, where the name says them."""


def measure(given: dict[str, Any]) -> dict[str, Any]:
    """Run all trials.

    Args:
        given: ``target`` and ``model`` (folders or names), ``kind`` of the drafter, ``dtype``, and
            ``answers``, pairs of prompt and answer as token ids.

    Returns:
        ``agreement``: part of the answers' tokens that this target would have said. ``trials``, by
        name: for each answer a row for each of its tokens, the tokens drafted at that place, the
        first one for the place itself; an empty row where nothing is drafted. ``layers``: of trials
        that read other layers, which ones.

    Raises:
        SpecExtError: Something cannot be loaded.
    """
    device = pick_device("auto")
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = auto if given["dtype"] == "auto" else getattr(torch, given["dtype"])
    target = load_target(given["target"], device, dtype)
    pairs = given["answers"]
    texts = [np.array([*prompt, *answer], np.int32) for prompt, answer in pairs]
    data = TokenData(
        Path(given["target"]),
        {},
        np.concatenate(texts),
        np.concatenate([[0], np.cumsum([len(text) for text in texts])]).astype(np.int64),
        np.array([len(prompt) for prompt, _ in pairs], np.int32),
    )
    run: Callable[..., Iterator[Trial]]
    run = {"heads": _heads, "block": _block, "draft_model": _draft_model}[given["kind"]]
    trials, layers = {}, {}
    for name, rows, read in run(given["model"], target, data):
        trials[name] = rows
        if read is not None:
            layers[name] = read
    return {"agreement": _agreement(target, data), "trials": trials, "layers": layers}


def _agreement(target: Target, data: TokenData) -> float:
    rows = _guesses(target, data)
    texts = [data.sequence(i)[int(data.prompt_lengths[i]) :] for i in range(len(data))]
    right = [
        row[0] == int(token)
        for answer, text in zip(rows, texts, strict=True)
        for row, token in zip(answer, text, strict=True)
    ]
    return sum(right) / max(1, len(right))


def _guesses(model: Target, data: TokenData) -> Rows:
    """The greedy next token of a model at every place of the answers."""
    rows: Rows = []
    for start in range(0, len(data), _BATCH):
        some = np.arange(start, min(start + _BATCH, len(data)))
        batch = make_batch(data, some, 0, _longest(data))
        with torch.no_grad():
            states = draft_states(model, batch.token_ids, batch.mask, batch.rows, batch.columns)
            best = model.project(states).argmax(-1).cpu().tolist()
        own = batch.rows.tolist()
        rows += [[[t] for t, r in zip(best, own, strict=True) if r == i] for i in range(len(some))]
    return rows


def _draft_model(name: str, target: Target, data: TokenData) -> Iterator[Trial]:
    check_ids(load_tokenizer(target.name), load_tokenizer(name), name)
    dtype = next(target.model.parameters()).dtype
    draft = load_target(name, target.device, dtype)
    yield AS_TRAINED, _guesses(draft, data), None
    yield WITHOUT_PROMPT, _guesses(draft, _without_prompts(data)), None


def _without_prompts(data: TokenData) -> TokenData:
    """The same answers behind the last token of their prompts alone."""
    prompts = data.prompt_lengths.tolist()
    texts = [data.sequence(i)[length - 1 :] for i, length in enumerate(prompts)]
    ends = np.concatenate([[0], np.cumsum([len(text) for text in texts])]).astype(np.int64)
    ones = np.ones(len(texts), np.int32)
    return replace(data, token_ids=np.concatenate(texts), offsets=ends, prompt_lengths=ones)


def _heads(name: str, target: Target, data: TokenData) -> Iterator[Trial]:
    _, heads = load_heads(name, hidden_size=target.hidden_size, vocab_size=target.vocab_size)
    heads.to(target.device, next(target.model.parameters()).dtype)
    last = target.num_layers

    def normed(layer: int) -> HiddenSource:
        states = live_states(target, (layer,))
        return lambda batch: target.final_states(states(batch))

    sources = {
        AS_TRAINED: live_states(target),
        BEFORE_NORM: live_states(target, (last,)),
        LAYER_BEFORE: normed(last - 1),
    }
    for trial, states in sources.items():
        yield trial, _of_heads(heads, target, data, states), None


def _of_heads(heads: BlockwiseHeads, target: Target, data: TokenData, states: HiddenSource) -> Rows:
    number = heads.config.num_heads
    copies = TextCopies.if_shown(data, heads.config.copy_match, number)
    projection = DraftProjection(target, heads.draft_vocab)
    tokens, starts = [], [0]
    for first in range(0, len(data), _BATCH):
        some = np.arange(first, min(first + _BATCH, len(data)))
        batch = make_batch(data, some, number, _longest(data), inputs=copies)
        with torch.no_grad():
            hidden = states(batch)
            seen = tokens_seen(batch, slice(None), hidden.device)
            drafts = heads(hidden.to(heads.b_out.dtype), seen, target.embed)
            shown = [None] * number if seen.shown is None else seen.shown.unbind(1)
            best = []
            for i in range(number):
                places = projection(drafts[:, i], shown[i]).argmax(-1)
                best.append(projection.tokens(places, shown[i]))
        tokens.append(torch.stack(best, 1).cpu().numpy())
        counts = np.bincount(batch.rows.numpy(), minlength=len(some))
        starts += (starts[-1] + np.cumsum(counts)).tolist()
    return _by_answer(np.concatenate(tokens), np.array(starts))


def _block(name: str, target: Target, data: TokenData) -> Iterator[Trial]:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(name))
    try:
        drafter = NarDrafter.load(folder)
    except (KeyError, TypeError, RuntimeError) as error:
        raise SpecExtError(
            f"{folder} is no drafter that can be run outside the engine ({error}); expected one of "
            "`vllm-spec train nar`, or a DFlash checkpoint that uses the target's embeddings"
        ) from error
    dtype = next(target.model.parameters()).dtype
    drafter = drafter.to(target.device, dtype).requires_grad_(False)
    settings = NarTraining(model=target.name, out=folder, max_length=max(_longest(data), 72))
    projection = DraftProjection(target, drafter.extras.draft_vocab)

    def drafted(layers: tuple[int, ...], *, normed: bool = False) -> Rows:
        # One layer more: heads in the drafter read the target's final states, as in the engine.
        read = (*(layer + 1 for layer in layers), target.num_layers)
        states, context = live_states(target, read), _Context(target, normed=normed)
        parts = Drafting(drafter, context, target, projection, data, states, settings)
        return _by_answer(*drafted_tokens(parts, np.arange(len(data))))

    own = drafter.config.target_layer_ids
    yield AS_TRAINED, drafted(own), None
    if own[-1] == target.num_layers - 1:
        yield BEHIND_NORM, drafted(own, normed=True), None
    for layers in other_layers(own, target.num_layers, settings.layer_ids(target.num_layers)):
        trial = "layers " + ", ".join(map(str, layers))
        yield trial, drafted(layers), list(layers)


def _by_answer(tokens: NDArray[np.int64], starts: NDArray[np.int64]) -> Rows:
    """Rows of each answer, the first place empty: its token comes with the prefill."""
    ends = starts.tolist()
    return [[[], *tokens[low:high].tolist()] for low, high in itertools.pairwise(ends)]


def _longest(data: TokenData) -> int:
    return int(np.diff(data.offsets).max())


class _Context(torch.nn.Module):
    """What a drafter's layers read of states that lie side by side: all but the last."""

    def __init__(self, target: Target, *, normed: bool) -> None:
        super().__init__()
        self._target = target  # no module, so its weights are not this one's
        self._normed = normed  # the last one read passes the target's last norm

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        size = self._target.hidden_size
        read = states[..., :-size]
        if not self._normed:
            return read
        last = self._target.final_states(read[..., -size:])
        return torch.cat([read[..., :-size], last.to(states.dtype)], dim=-1)


def main() -> None:
    """Measure, and write what was measured; exit status 2 for bad input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True, help="write the result here")
    given = parser.parse_args()
    try:
        found = measure(json.loads(given.answers.read_text(encoding="utf-8")))
        given.json.write_text(json.dumps(found), encoding="utf-8")
    except SpecExtError as error:
        parser.exit(2, f"SpecExtError: {error}\n")


if __name__ == "__main__":
    main()
