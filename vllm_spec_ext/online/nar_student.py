# SPDX-License-Identifier: Apache-2.0
"""The block drafter of ``nar`` as the trainer has it, beside the target whose states it reads.

What makes the context's keys and values of these states stays frozen
(:func:`~vllm_spec_ext.proposers.nar.layout.makes_context`): the engine's cache holds what the
weights of the start made, and every version reads that.
"""

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_spec_ext.atomic import disk_full_named
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.online.divergences import divergence, outcomes, overlap
from vllm_spec_ext.online.folder import FolderFacts
from vllm_spec_ext.online.starts import copies_at, recorded_rows
from vllm_spec_ext.online.student import MOST_WEIGHT, Columns, Judged
from vllm_spec_ext.online.teacher import as_drawn
from vllm_spec_ext.online.text_states import TextStates
from vllm_spec_ext.online.trace import Trace
from vllm_spec_ext.proposers.nar.layout import CONFIG_NAME, makes_context
from vllm_spec_ext.training.batches import IGNORED
from vllm_spec_ext.training.draft_vocab import DraftProjection
from vllm_spec_ext.training.nar.blocks import Blocks
from vllm_spec_ext.training.nar.losses import CANDIDATES, drafted_log_probs, path_weights
from vllm_spec_ext.training.nar.model import NarDrafter
from vllm_spec_ext.training.nar.pass_batch import StatesRead, slot_states, slot_tokens
from vllm_spec_ext.training.target import Target, load_target, pick_dtype

_WINDOW = 1024  # tokens of a text that are read
# Slots behind a wrong one do not count. A slot weighs as for a drafter that is right in every
# second one, and not by what this one says, or losses of two versions could not be compared.
_RIGHT = 0.5


class NarStudent:
    """See :class:`.student.Student`."""

    module: NarDrafter
    row_positions = 16

    def __init__(
        self, facts: FolderFacts, device: torch.device, target: Target | None = None
    ) -> None:
        """Load the target.

        Args:
            facts: Of the folder.
            device: Where to train.
            target: If it is here already.
        """
        self._options = facts.options
        self._drafting = facts.drafting
        self._target = target or load_target(facts.target, device, pick_dtype("auto", device))
        self._states: TextStates | None = None

    def load(self, folder: Path) -> None:
        """Take the drafter of a folder.

        Raises:
            SpecExtError: It holds none, or one of another target.
        """
        try:
            drafter = NarDrafter.load(folder)
            self._config = json.loads((folder / CONFIG_NAME).read_text())
        except Exception as error:  # json, safetensors, torch and its unpickler raise many types
            raise SpecExtError(
                f"{folder} holds no block drafter that can be trained: {error}"
            ) from error
        target, config = self._target, drafter.config
        sizes = (config.vocab_size, config.num_target_layers, config.num_state_units)
        expected = target.hidden_size * len(config.target_layer_ids)
        if sizes != (target.vocab_size, target.num_layers, expected):
            raise SpecExtError(
                f"{folder}: the drafter is for a target of {sizes[0]} tokens and {sizes[1]} "
                f"layers, {target.name} has {target.vocab_size} and {target.num_layers}, or states "
                "of another size"
            )
        for name, weight in drafter.named_parameters():
            weight.requires_grad_(not makes_context(name))
        self.module = drafter.to(target.device).train()
        self._projection = DraftProjection(target, drafter.extras.draft_vocab)
        self._num_slots = min(self._drafting.get("slots", config.num_slots), config.num_slots)
        self._copy_match = config.nar.copy_match if self._drafting.get("copies", 1) else 0
        if self._states is None:  # all versions read the same
            layers = [layer + 1 for layer in config.target_layer_ids]
            if layers[-1] != target.num_layers:  # the heads' final states are made of this one
                layers.append(target.num_layers)
            self._states = TextStates(target, layers)

    def columns(self, traces: Sequence[Trace]) -> Columns:
        """One row for some starts of a trace: its text, and their blocks."""
        parts: dict[str, list[Tensor]] = {}
        for trace in map(as_drawn, traces):
            begin = max(0, len(trace.token_ids) - _WINDOW)
            inside = np.flatnonzero(trace.starts >= begin)
            for first in range(0, len(inside), self.row_positions):
                row = self._row(trace, begin, inside[first : first + self.row_positions])
                for name, value in row.items():
                    parts.setdefault(name, []).append(torch.from_numpy(value))
        return {name: torch.stack(values) for name, values in parts.items()}

    def judge(self, batch: Columns) -> Judged:
        """All slots of all blocks at once, each behind the text's own tokens.

        Starts are weighted as those of :class:`.heads_student.HeadsStudent`.
        """
        at = {name: batch[name].to(self._target.device) for name in batch if name != "ids"}
        blocks = Blocks(
            anchors=at["anchors"].long(),
            first=at["first"].long(),
            targets=at["targets"].long(),
            copies=at["copies"].long() if self._copy_match else None,
            kinds=at["kinds"].long() if self._copy_match else None,
            prefix=torch.zeros_like(at["anchors"], dtype=torch.int64),
        )
        known = at["known"].flatten(0, 1)  # [blocks, slots]
        rows = known.flatten().nonzero().squeeze(1)
        masks = torch.zeros_like(blocks.targets, dtype=torch.bool)
        with self._autocast():
            read = self._read(batch)
            states = slot_states(self.module, self._target, read, blocks, masks)
            states = states.flatten(0, 2)[rows]
            if not len(rows):
                nothing = states.sum() * 0.0
                return Judged(nothing, nothing.detach(), 0)
            tokens = slot_tokens(blocks).take(rows)
            likeliest = at["likeliest"].flatten(0, 2)[rows].long()
            shown = None if tokens.shown is None else tokens.shown.unsqueeze(1)
            places = self._projection.places(likeliest, shown)
            found = drafted_log_probs(
                states,
                tokens,
                places.clamp(min=-1),
                self._projection,
                self.module.extras,
                self._target.embed,
                self._drafting.get("candidates", CANDIDATES),
            )
        probs, tails = (at[name].flatten(0, 2)[rows] for name in ("probs", "tails"))
        own = torch.arange(found.shape[1], device=found.device).expand_as(found)
        log_p, log_q, share = outcomes(found, torch.where(places >= 0, own, -1), probs, tails)
        weights = path_weights(torch.full_like(known, _RIGHT, dtype=torch.float32), known)
        weights = (weights * at["weights"].flatten()[:, None]).flatten()[rows]
        weights = weights / weights.sum()
        losses = share * divergence(self._options.loss, log_p, log_q)
        with torch.no_grad():
            accepted = (weights * share * overlap(log_p, log_q)).sum()
        return Judged((weights * losses).sum(), accepted, len(rows))

    def files(self) -> dict[str, bytes]:
        """In float32: a small step must not be lost in rounding."""
        with tempfile.TemporaryDirectory() as name, disk_full_named(Path(name)):
            folder = Path(name)
            self.module.save(folder)
            paths = sorted(path for path in folder.rglob("*") if path.is_file())
            made = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        # The own configuration says all that ours does, and what only other readers know.
        config = {name: value for name, value in self._config.items() if name != "dtype"}
        made[CONFIG_NAME] = json.dumps({**config, "torch_dtype": "float32"}, indent=2).encode()
        return made

    def _row(
        self, trace: Trace, begin: int, some: NDArray[np.int64]
    ) -> Mapping[str, NDArray[np.generic]]:
        """Blocks at some starts, of a text that is read from a position on.

        approximation: what is more than a window back is not read, and positions count from the
        window's beginning, which rotary embeddings do not see. What is left of a rejected draft is
        not known, so no slot is shown it.
        """
        blocks, slots = self.row_positions, self._num_slots
        count, likeliest = len(some), trace.top_tokens.shape[1]
        starts = trace.starts[some].astype(np.int64)
        text = trace.token_ids
        ids = np.zeros(_WINDOW, np.int32)
        ids[: len(text) - begin] = text[begin:]
        ahead = starts[:, None] + np.arange(1, slots + 1)  # rows of the slots' teachers
        at, known = recorded_rows(trace, ahead)
        said = text[(ahead + 1).clip(max=len(text) - 1)]

        def padded(values: NDArray[np.generic], fill: int = 0) -> NDArray[np.generic]:
            made = np.full((blocks, *values.shape[1:]), fill, values.dtype)
            made[:count] = values
            return made

        chances = trace.chances[some].clip(min=1.0 / MOST_WEIGHT)
        row: dict[str, NDArray[np.generic]] = {
            "text": np.array(_number_of(text[begin:])),
            "ids": ids,
            "length": np.array(len(text) - begin),
            # A block needs a token in front of it.
            "anchors": padded((starts + 1 - begin).astype(np.int32), 1),
            "first": padded(text[starts + 1]),
            "targets": padded(np.where(ahead + 1 < len(text), said, IGNORED).astype(np.int32)),
            "known": padded(known),
            "likeliest": padded(trace.top_tokens[at]),
            "probs": padded(trace.top_probs[at]),
            "tails": padded(trace.tails[at]),
            "weights": padded(1.0 / chances),
        }
        assert row["probs"].shape == (blocks, slots, likeliest)
        return row | (self._copies(text, starts, padded) if self._copy_match else {})

    def _copies(
        self,
        text: NDArray[np.int32],
        starts: NDArray[np.int64],
        padded: Callable[[NDArray[np.generic]], NDArray[np.generic]],
    ) -> dict[str, NDArray[np.generic]]:
        """What slots are shown, of the whole text, as in serving."""
        slots = self._num_slots
        tokens, lengths = copies_at(text, starts, self._copy_match, slots)
        kinds = lengths.astype(np.int32)[:, None].repeat(slots, axis=1)
        return {"copies": padded(tokens.astype(np.int32)), "kinds": padded(kinds)}

    def _read(self, batch: Columns) -> StatesRead:
        """The states of the texts of a batch, side by side."""
        assert self._states is not None
        lengths = batch["length"].tolist()
        found = [
            self._states.of(number, ids[:length])
            for number, ids, length in zip(
                batch["text"].tolist(), batch["ids"], lengths, strict=True
            )
        ]
        table = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
        width = self.module.config.num_state_units
        return StatesRead(table[..., :width].float(), table[..., -self._target.hidden_size :])

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        device = self._target.device
        if next(self._target.model.parameters()).dtype is torch.bfloat16:
            return torch.autocast(device.type, torch.bfloat16)
        return contextlib.nullcontext()


def _number_of(token_ids: NDArray[np.int32]) -> int:
    """By which a text's states are known; different texts have different ones."""
    return int.from_bytes(hashlib.blake2b(token_ids.tobytes(), digest_size=7).digest())
