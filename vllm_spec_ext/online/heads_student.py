# SPDX-License-Identifier: Apache-2.0
"""The heads of ``blockwise`` as the trainer has them; they need no forward pass of the target."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vllm_spec_ext.online.divergences import divergence, outcomes, overlap
from vllm_spec_ext.online.folder import FolderFacts
from vllm_spec_ext.online.starts import copies_at, recorded_rows
from vllm_spec_ext.online.student import MOST_WEIGHT, Columns, Judged
from vllm_spec_ext.online.target_ends import TargetEnds, read_ends
from vllm_spec_ext.online.teacher import as_drawn
from vllm_spec_ext.online.trace import Trace
from vllm_spec_ext.proposers.blockwise.heads import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    BlockwiseHeads,
    TokensSeen,
    load_heads,
)


class HeadsStudent:
    """See :class:`.student.Student`."""

    module: BlockwiseHeads
    row_positions = 1

    def __init__(
        self, facts: FolderFacts, device: torch.device, ends: TargetEnds | None = None
    ) -> None:
        """Read the target's two matrices.

        Args:
            facts: Of the folder.
            device: Where to train.
            ends: Those matrices, if they are here already.
        """
        self._options = facts.options
        self._vocab_size = facts.vocab_size
        self._device = device
        self._ends = ends or read_ends(facts.target, device)

    def load(self, folder: Path) -> None:
        """Take the heads of a folder; raises SpecExtError if it has none."""
        _, heads = load_heads(folder)
        self.module = heads.to(self._device, torch.float32).requires_grad_(True).train()
        vocab = self.module.draft_vocab
        self._rows, self._bias = self._ends.rows(vocab)
        self._places = torch.arange(self._vocab_size)  # of each token; -1 = not drafted
        if vocab is not None:
            self._places = torch.full((self._vocab_size,), -1)
            self._places[vocab.long().cpu()] = torch.arange(len(vocab))

    def columns(self, traces: Sequence[Trace]) -> Columns:
        """Head d's teacher is row t + d of the text that the target went on to say."""
        parts = [self._of_trace(trace) for trace in traces if len(trace.starts)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def judge(self, batch: Columns) -> Judged:
        """All heads of all positions at once.

        Places where a draft failed are recorded more often than others. Were they not weighted
        down, the heads would unlearn what they get right for the sake of what they do not.
        """
        at = {name: values.to(self._device) for name, values in batch.items()}
        config = self.module.config
        copied = (at["copied"], at["copied_length"]) if config.copy_match else (None, None)
        seen = TokensSeen(at["following"], *copied)
        states = self.module(at["states"].float(), seen, self._ends.embed)
        known = at["known"].flatten().nonzero().squeeze(1)
        if not len(known):
            nothing = states.sum() * 0.0
            return Judged(nothing, nothing.detach(), 0)
        states = states.flatten(0, 1)[known]
        log_q = functional.linear(states, self._rows, self._bias).log_softmax(-1)
        teacher = [at[name].flatten(0, 1)[known] for name in ("places", "probs", "tails")]
        log_p, log_q, share = outcomes(log_q, *teacher)
        weights = at["weights"].unsqueeze(1).expand_as(at["known"]).flatten()[known]
        weights = weights / weights.sum()
        losses = share * divergence(self._options.loss, log_p, log_q)
        with torch.no_grad():
            accepted = (weights * share * overlap(log_p, log_q)).sum()
        return Judged((weights * losses).sum(), accepted, len(known))

    def files(self) -> dict[str, bytes]:
        """In float32: a small step must not be lost in rounding."""
        from safetensors.torch import save

        weights = {
            name: value.detach().cpu().contiguous()
            for name, value in self.module.state_dict().items()
        }
        config = self.module.config.model_dump_json(indent=2)
        return {
            WEIGHTS_NAME: save(weights, metadata={"format": "pt"}),
            CONFIG_NAME: config.encode(),
        }

    def _of_trace(self, trace: Trace) -> dict[str, Tensor]:
        trace = as_drawn(trace)
        config = self.module.config
        heads, likeliest = config.num_heads, trace.top_tokens.shape[1]
        count = len(trace.starts)
        rows = trace.starts[:, None] + np.arange(1, heads + 1)  # [count, heads]
        places, known = recorded_rows(trace, rows)
        found = {
            "states": trace.states,
            "weights": torch.from_numpy(1.0 / trace.chances.clip(min=1.0 / MOST_WEIGHT)),
            "following": torch.from_numpy(trace.token_ids[trace.starts + 1].astype(np.int64)),
            "known": torch.from_numpy(known),
            "places": self._places[torch.from_numpy(trace.top_tokens[places].astype(np.int64))],
            "probs": torch.from_numpy(trace.top_probs[places]),
            "tails": torch.from_numpy(trace.tails[places]),
        }
        assert found["probs"].shape == (count, heads, likeliest)
        if config.copy_match:
            tokens, lengths = copies_at(trace.token_ids, trace.starts, config.copy_match, heads)
            found |= {
                "copied": torch.from_numpy(tokens),
                "copied_length": torch.from_numpy(lengths),
            }
        return found
