# SPDX-License-Identifier: Apache-2.0
"""A draft model as the trainer has it: a Hugging Face causal LM over windows of served text.

It reads text and nothing of the target, so every recorded row teaches, whether a draft started
there or not. Embeddings and vocabulary projection stay as they are: a few hundred requests say
nothing of most tokens.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.online.divergences import divergence, outcomes, overlap
from vllm_spec_ext.online.folder import FolderFacts
from vllm_spec_ext.online.student import Columns, Judged
from vllm_spec_ext.online.teacher import as_drawn
from vllm_spec_ext.online.trace import Trace
from vllm_spec_ext.proposers.growth.checkpoint_files import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    tensor_names,
)
from vllm_spec_ext.training.draft.evaluate import draft_states
from vllm_spec_ext.training.target import Target

_WINDOW = 256  # tokens that are read


class DraftModelStudent:
    """See :class:`.student.Student`."""

    module: nn.Module
    row_positions = 32

    def __init__(self, facts: FolderFacts, device: torch.device) -> None:
        """Nothing is read of the target.

        Args:
            facts: Of the folder.
            device: Where to train.
        """
        self._options = facts.options
        self._vocab_size = facts.vocab_size
        self._device = device

    def load(self, folder: Path) -> None:
        """Take the model of a folder.

        Raises:
            SpecExtError: It holds none that transformers can load.
        """
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        except (OSError, ValueError, RuntimeError) as error:
            raise SpecExtError(
                f"{folder} holds no draft model that can be trained: {error}"
            ) from error
        self.module = model
        foreign = sorted(self._weights().keys() - tensor_names(folder))
        if foreign:  # e.g. the experts of a mixture, which transformers joins
            raise SpecExtError(
                f"{folder}: once loaded it has weights that the checkpoint names otherwise "
                f"({foreign[0]}), and no server could take up what is learned; mixtures of experts "
                "cannot learn this way. Leave online out"
            )
        model.requires_grad_(True)
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            table.requires_grad_(False)
        self.module = model.to(self._device).train()
        self._draft = Target(model, str(folder))
        self._config = (folder / CONFIG_NAME).read_bytes()

    def columns(self, traces: Sequence[Trace]) -> Columns:
        """One row a window: its text, and which of its tokens have a known row behind them."""
        parts: dict[str, list[Tensor]] = {}
        for trace in map(as_drawn, traces):
            for first in range(0, len(trace.rows), self.row_positions):
                some = slice(first, first + self.row_positions)
                for name, value in self._window(trace, some).items():
                    parts.setdefault(name, []).append(value)
        return {name: torch.stack(values) for name, values in parts.items()}

    def judge(self, batch: Columns) -> Judged:
        """All rows of all windows at once."""
        width = int(batch["length"].max())
        ids = batch["ids"][:, :width].long()
        mask = (torch.arange(width) < batch["length"][:, None]).long()
        rows, places = (batch["at"] >= 0).nonzero(as_tuple=True)
        states = draft_states(self._draft, ids, mask, rows, batch["at"][rows, places].long())
        logits = self._draft.project(states)[:, : self._vocab_size]
        teacher = [
            batch[name][rows, places].to(self._device) for name in ("places", "probs", "tails")
        ]
        log_p, log_q, share = outcomes(logits.float().log_softmax(-1), *teacher)
        losses = share * divergence(self._options.loss, log_p, log_q)
        with torch.no_grad():
            accepted = (share * overlap(log_p, log_q)).mean()
        return Judged(losses.mean(), accepted, len(rows))

    def files(self) -> dict[str, bytes]:
        """In float32: a small step must not be lost in rounding."""
        from safetensors.torch import save

        weights = {name: value.cpu().contiguous() for name, value in self._weights().items()}
        return {
            WEIGHTS_NAME: save(weights, metadata={"format": "pt"}),
            CONFIG_NAME: self._config,
        }

    def _weights(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        known: set[int] = set()
        for name, value in self.module.state_dict().items():
            if value.data_ptr() not in known:  # a tied projection is the embedding's
                known.add(value.data_ptr())
                found[name] = value.detach()
        return found

    def _window(self, trace: Trace, some: slice) -> dict[str, Tensor]:
        """The last tokens up to some rows.

        approximation: what is more than a window back is not read, and positions count from the
        window's beginning, which rotary embeddings do not see.
        """
        rows = trace.rows[some].astype(np.int64)
        start = max(0, int(rows[-1]) + 1 - _WINDOW)
        text = trace.token_ids[start : int(rows[-1]) + 1]
        ids = np.zeros(_WINDOW, np.int32)
        ids[: len(text)] = text
        count, likeliest = self.row_positions, trace.top_tokens.shape[1]
        at = np.full(count, -1, np.int32)
        at[: len(rows)] = np.maximum(rows - start, -1)  # -1: a gap reaches back too far
        places = np.full((count, likeliest), -1, np.int64)
        places[: len(rows)] = trace.top_tokens[some]
        places[places >= self._draft.vocab_size] = -1
        probs, tails = np.zeros((count, likeliest), np.float32), np.zeros(count, np.float32)
        probs[: len(rows)], tails[: len(rows)] = trace.top_probs[some], trace.tails[some]
        return {
            "ids": torch.from_numpy(ids),
            "length": torch.tensor(len(text)),
            "at": torch.from_numpy(at),
            "places": torch.from_numpy(places),
            "probs": torch.from_numpy(probs),
            "tails": torch.from_numpy(tails),
        }
