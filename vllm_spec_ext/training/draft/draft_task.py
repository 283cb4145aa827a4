# SPDX-License-Identifier: Apache-2.0
"""What is trained: a draft model cut from its target, as the shared training loop wants it."""

import contextlib
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.training.batches import Batch, BatchPlan, Split, make_batch, split_data
from vllm_spec_ext.training.chunked_loss import backward_chunks
from vllm_spec_ext.training.draft.boosting import MissedPositions, known_ids, load_earlier
from vllm_spec_ext.training.draft.cut import Cut, cut_model, first_layers
from vllm_spec_ext.training.draft.evaluate import (
    DraftFigures,
    Guesses,
    coverage,
    draft_states,
    figures_of,
    guess,
)
from vllm_spec_ext.training.draft.fit import FitBatch, fit_last_layer
from vllm_spec_ext.training.draft.importance import pick_kv_heads, pick_units
from vllm_spec_ext.training.draft.losses import answer_loss, forward_kl
from vllm_spec_ext.training.draft.schema import DraftTraining
from vllm_spec_ext.training.hidden import HiddenSource
from vllm_spec_ext.training.shards import TokenData
from vllm_spec_ext.training.target import Target, pick_dtype

_SMOOTHING = 0.9  # of the figures in progress lines
_DEFAULT_LAYERS = 2
_CALIBRATION_TEXTS = 32  # on which heads and units are compared


class TrainedWeights(nn.ParameterDict):
    """The weights that change, for the saved state: the others are the target's."""

    def __init__(self, model: nn.Module) -> None:
        # A module's parameters may have no dot in their names.
        named = {n.replace(".", "/"): p for n, p in model.named_parameters() if p.requires_grad}
        super().__init__(named)


class DraftModelTask:
    """A draft model, its target and its data, as the training loop wants them."""

    def __init__(
        self, config: DraftTraining, target: Target, data: TokenData, states: HiddenSource
    ) -> None:
        """Cut the target and build the optimizer; deterministic in ``config.seed``."""
        self.config, self.target, self.data, self.states = config, target, data, states
        self.split: Split = split_data(data, config.max_length, config.eval_sequences, config.seed)
        self.earlier = load_earlier(config.boost_on, target)
        self.plan = BatchPlan(
            data,
            self.split.train,
            0,
            config.batch_size,
            config.max_length,
            config.positions_per_sequence,
            config.seed,
            config.prompt_text,
            MissedPositions(self.earlier, data, config.max_length) if self.earlier else None,
        )
        self.cut = self._choose_cut()
        self.draft = Target(cut_model(target.model, self.cut).to(target.device), str(config.out))
        self.draft.model.requires_grad_(True)
        if not config.train_embeddings:
            for table in (
                self.draft.model.get_input_embeddings(),
                self.draft.model.get_output_embeddings(),
            ):
                table.requires_grad_(False)
        self.modules: dict[str, nn.Module] = {"draft": TrainedWeights(self.draft.model)}
        weights = [p for p in self.draft.model.parameters() if p.requires_grad]
        rate = config.learning_rate
        groups: list[dict[str, Any]] = [
            {
                "params": [p for p in weights if p.dim() > 1],
                "peak_lr": rate,
                "weight_decay": config.weight_decay,
            },
            {"params": [p for p in weights if p.dim() <= 1], "peak_lr": rate, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98))
        self._shown: dict[str, float] = {}
        self._earlier_guesses: dict[int | None, list[Guesses]] = {}

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        if self.config.max_steps is not None:
            return self.config.max_steps
        return max(1, round(self.config.epochs * self.plan.batches_per_epoch))

    @property
    def num_parameters(self) -> int:
        """Of the draft, a shared embedding once."""
        return sum(p.numel() for p in self.draft.model.parameters())

    @property
    def shape(self) -> str:
        """The draft in a line."""
        config = self.draft.model.config
        changed = sum(p.numel() for p in self.modules["draft"].parameters())
        return (
            f"draft of {config.num_hidden_layers} layers (the target's "
            f"{', '.join(map(str, self.cut.layers))}), {config.num_attention_heads} heads, "
            f"{config.intermediate_size} units, {config.vocab_size:,} tokens: "
            f"{self.num_parameters:,} parameters, {changed:,} of them trained"
        )

    @property
    def size_line(self) -> str:
        """The draft's shape, size on disk and coverage."""
        size = self.num_parameters * (4 if self.config.save_dtype == "fp32" else 2)
        return f"{self.shape}; {size / 1e6:.1f} MB; {self.coverage_line}"

    @property
    def coverage_line(self) -> str:
        """How much of the target's text the draft could draft at all."""
        share = self._coverage()
        return f"its vocabulary covers {share:.1%} of the held-out answers' tokens"

    def disk_lines(self) -> list[str]:
        """Nothing is written beside the result and the state."""
        return []

    def train_step(self, step: int) -> dict[str, float]:
        """Gradients of one batch."""
        config = self.config
        if step == 0:  # a resumed run has its weights from the saved state
            self._fit()
        self.draft.model.train()
        # Dropout draws from torch's global state, which no saved state holds.
        torch.manual_seed(int(np.random.default_rng([config.seed, 4, step]).integers(2**62)))
        batch = self.plan.batch(step)
        device = self.target.device
        tokens = batch.next_tokens.to(device)
        weights = self._weights(batch)
        wanted: Tensor | None = None
        with torch.no_grad(), self._autocast():
            if config.loss == "kl":
                wanted = self.states(batch)
        with self._autocast():
            mine = draft_states(self.draft, batch.token_ids, batch.mask, batch.rows, batch.columns)
        total = max(float(weights.sum()), 1e-6)

        def loss_of(piece: Tensor, place: slice) -> tuple[Tensor, Tensor]:
            with self._autocast():
                logits = self.draft.project(piece).float()
                if wanted is None:
                    losses = answer_loss(logits, tokens[place])
                else:
                    with torch.no_grad():
                        own = self.target.project(wanted[place]).float()
                    losses = forward_kl(logits, own, config.top)
            right = (logits.detach().argmax(-1) == tokens[place]).sum()
            return (losses * weights[place]).sum(), right

        loss, correct = backward_chunks(mine, loss_of, config.logit_chunk, 1.0 / total)
        return self._show({"loss": loss.item() / total, "acc": correct.item() / len(tokens)})

    def _weights(self, batch: Batch) -> Tensor:
        """[n] float32 of each position."""
        if not self.earlier:
            return torch.ones(len(batch.rows), device=self.target.device)
        missed = batch.inputs[0].to(self.target.device)
        return torch.where(missed > 0, 1.0, self.config.boost_keep)

    def _fit(self) -> None:
        """Fit the last layer; where nothing is cut there is nothing to gain."""
        size = self.config.batch_size
        some = self.split.some_to_train(self.config.fit, self.config.seed)
        parts = [some[start : start + size] for start in range(0, len(some), size)]
        if len(parts) < 2:
            return
        with torch.no_grad():
            apart = self._fit_batch(parts[0])
            fit_last_layer(self.draft, map(self._fit_batch, parts[1:]), apart)

    def _fit_batch(self, sequences: NDArray[np.int64]) -> FitBatch:
        batch = make_batch(self.data, sequences, 0, self.config.max_length, inputs=self.plan.inputs)
        device = self.target.device
        with torch.no_grad():
            return FitBatch(
                known_ids(batch.token_ids.to(device), self.draft.vocab_size),
                batch.mask.to(device),
                batch.rows.to(device),
                batch.columns.to(device),
                self.states(batch),
                self._weights(batch),
            )

    def _show(self, figures: dict[str, float]) -> dict[str, float]:
        for name, value in figures.items():
            former = self._shown.get(name, value)
            self._shown[name] = _SMOOTHING * former + (1 - _SMOOTHING) * value
        return dict(self._shown)

    def evaluate(self) -> dict[str, float]:
        """Held-out figures under short names."""
        return self.measure().summary()

    def measure(self, *, num_sequences: int | None = None) -> DraftFigures:
        """Held-out figures in full, of all held-out sequences or only some."""
        earlier = self._guesses_of_earlier(num_sequences)
        found, agreement, overlap = self._guess(self.draft, num_sequences, compare=True)
        return figures_of(
            found,
            agreement=agreement,
            overlap=overlap,
            chain=self.config.chain,
            vocab_coverage=self._coverage(),
            earlier=earlier,
        )

    def _guess(
        self, draft: Target, num_sequences: int | None, *, compare: bool
    ) -> tuple[Guesses, float, float]:
        with self._autocast():
            return guess(
                draft,
                self.data,
                self.split.held_out[:num_sequences],
                max_length=self.config.max_length,
                batch_size=self.config.batch_size,
                logit_chunk=self.config.logit_chunk,
                target=self.target if compare else None,
                states=self.states if compare else None,
            )

    def _guesses_of_earlier(self, num_sequences: int | None) -> list[Guesses]:
        if num_sequences not in self._earlier_guesses:
            self._earlier_guesses[num_sequences] = [
                self._guess(draft, num_sequences, compare=False)[0] for draft in self.earlier
            ]
        return self._earlier_guesses[num_sequences]

    def _coverage(self) -> float:
        return coverage(
            self.data, self.split.held_out, self.config.max_length, self.draft.vocab_size
        )

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        device = self.target.device
        if pick_dtype(self.config.dtype, device) is torch.bfloat16:
            return torch.autocast(device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def _choose_cut(self) -> Cut:
        config, model = self.config, self.target.model
        num_layers = int(model.config.get_text_config().num_hidden_layers)
        if config.keep_layers is not None:
            layers = tuple(sorted(set(config.keep_layers)))
            if layers[0] < 0 or layers[-1] >= num_layers:
                raise SpecExtError(
                    f"--keep-layers {' '.join(map(str, config.keep_layers))}: the target's layers "
                    f"are 0 to {num_layers - 1}"
                )
        else:
            count = config.layers or min(_DEFAULT_LAYERS, num_layers)
            layers = first_layers(count, num_layers)
        if config.vocab is not None and config.vocab > self.target.vocab_size:
            raise SpecExtError(
                f"--vocab {config.vocab}: the target has {self.target.vocab_size} tokens; "
                "give fewer, or drop the flag"
            )
        heads, units = config.attention_heads, config.ffn
        return Cut(
            layers,
            None if heads is None else pick_kv_heads(model, layers, heads, self._calibrate),
            None if units is None else pick_units(model, layers, units, self._calibrate),
            config.vocab,
        )

    def _calibrate(self) -> None:
        """Pass some training texts through the target, one by one: padding would count as text."""
        for number in self.split.some_to_train(_CALIBRATION_TEXTS, self.config.seed):
            batch = make_batch(self.data, np.array([number]), 0, self.config.max_length)
            device = self.target.device
            self.target.hidden(batch.token_ids.to(device), batch.mask.to(device))

    def facts(self) -> dict[str, Any]:
        """What made the draft, for its folder."""
        kept = ("kind", "prompt_files", "num_prompts", "max_new_tokens", "temperature")
        manifest = self.data.manifest
        facts = {name: manifest[name] for name in kept if name in manifest}
        return {
            "target": self.config.shown_target,
            "tokenizer_fingerprint": manifest.get("tokenizer_fingerprint"),
            "num_parameters": self.num_parameters,
            "cut": {n: v for n, v in asdict(self.cut).items() if v is not None},
            "loss": self.config.loss,
            "boost_on": [str(path) for path in self.config.boost_on],
            "data": {
                **facts,
                "num_tokens": len(self.data.token_ids),
                "num_sequences": len(self.data),
            },
        }
