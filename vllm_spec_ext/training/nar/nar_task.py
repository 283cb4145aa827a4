# SPDX-License-Identifier: Apache-2.0
"""What is trained: a block drafter, its target and its data, as the shared training loop wants."""

import contextlib
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.nar.guesses import (
    BlockwiseHeads,
    HeadsConfig,
    check_heads,
    load_heads,
)
from vllm_spec_ext.proposers.nar.layout import NarConfig
from vllm_spec_ext.training.batches import IGNORED, BatchPlan, Split, split_data
from vllm_spec_ext.training.chunked_loss import backward_chunks
from vllm_spec_ext.training.draft_vocab import DraftProjection, frequent_tokens
from vllm_spec_ext.training.hidden import HiddenSource
from vllm_spec_ext.training.nar.blocks import (
    Blocks,
    arrange,
    choose_kinds,
    glanced,
    prefix_shown,
)
from vllm_spec_ext.training.nar.evaluate import Drafting, NarFigures, measure_drafter
from vllm_spec_ext.training.nar.further import check_fits, further_config, take_weights
from vllm_spec_ext.training.nar.losses import path_weights, slot_logits, slot_losses
from vllm_spec_ext.training.nar.model import DrafterConfig, NarDrafter
from vllm_spec_ext.training.nar.pass_batch import (
    StatesRead,
    context_states,
    read_states,
    slot_states,
    slot_tokens,
    some_sequences,
)
from vllm_spec_ext.training.nar.schema import NarTraining
from vllm_spec_ext.training.nar.start import copy_last_layers, set_first_weights, state_scales
from vllm_spec_ext.training.shards import TokenData
from vllm_spec_ext.training.target import Target, pick_dtype
from vllm_spec_ext.training.text_copies import TextCopies

_SMOOTHING = 0.9  # of the figures in progress lines
# Copies' gates and trusts are logits, which have some units to go; a step of Adam is as long as the
# learning rate.
_GATE_RATE = 30.0
_HEADS_RATE = 0.1
_SCALE_TEXTS = 8  # on which the sizes of states are measured


class _PassResult(NamedTuple):
    loss: float  # sum of weighted losses
    weight: float  # sum of weights
    correct: int
    num_slots: int  # with a right token that were not shown


class StateScales(nn.Module):
    """What the states are divided by; saved with the state, and part of no gradient."""

    def __init__(self, width: int) -> None:
        """Ones."""
        super().__init__()
        self.register_buffer("scales", torch.ones(width))

    def forward(self, states: Tensor) -> Tensor:
        """[..., width] float32."""
        return states.float() / self.get_buffer("scales")


class NarTask:
    """A drafter, its target and its data, as the training loop wants them."""

    def __init__(
        self,
        config: NarTraining,
        target: Target,
        data: TokenData,
        states: HiddenSource,
        trained: NarDrafter | None = None,
    ) -> None:
        """Build an untrained drafter and its optimizer; deterministic in ``config.seed``.

        Args:
            config: Settings; with ``trained``, of its shape.
            target: Whose text is drafted.
            data: Its texts.
            states: Its hidden states.
            trained: The finished drafter of ``config.start_from``.
        """
        self.config, self.target, self.data, self.states = config, target, data, states
        self.split: Split = split_data(data, config.max_length, config.eval_sequences, config.seed)
        self.copies = TextCopies.if_shown(data, config.copy_match, config.slots)
        self.plan = BatchPlan(
            data,
            self.split.train,
            config.slots,
            config.batch_size,
            config.max_length,
            config.positions_per_sequence,
            config.seed,
            config.prompt_text,
            self.copies,
        )
        torch.manual_seed(config.seed)
        shape = drafter_config(config, target, data, trained)
        self.drafter = NarDrafter(shape).to(target.device).train()
        self.scales = StateScales(shape.num_state_units).to(target.device)
        self._started_from = trained
        if trained is None:
            self._set_draft_vocab(self._start_from_heads())
        self._set_first_weights()
        self.projection = DraftProjection(target, self.drafter.extras.draft_vocab)
        _drop_out(self.drafter, config.dropout)
        self.modules: dict[str, nn.Module] = {"drafter": self.drafter, "scales": self.scales}
        rate = config.learning_rate
        groups: list[dict[str, Any]] = [
            {"params": [], "peak_lr": rate, "weight_decay": config.weight_decay},
            {"params": [], "peak_lr": rate, "weight_decay": 0.0},
            {"params": [], "peak_lr": rate * _GATE_RATE, "weight_decay": 0.0},
            {"params": [], "peak_lr": rate * _HEADS_RATE, "weight_decay": config.weight_decay},
        ]
        for name, parameter in self.drafter.named_parameters():
            groups[_group(name, parameter)]["params"].append(parameter)
        groups = [group for group in groups if group["params"]]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98))
        self._shown: dict[str, float] = {}

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        if self.config.max_steps is not None:
            return self.config.max_steps
        return max(1, round(self.config.epochs * self.plan.batches_per_epoch))

    @property
    def num_parameters(self) -> int:
        """All that is trained."""
        return sum(p.numel() for p in self.drafter.parameters())

    @property
    def shape(self) -> str:
        """The drafter in a line."""
        shape = self.drafter.config
        return (
            f"layers: {shape.num_hidden_layers} with {shape.intermediate_size} units, "
            f"slots: {shape.num_slots}, parameters: {self.num_parameters:,}"
        )

    @property
    def size_line(self) -> str:
        """The drafter's shape and size on disk."""
        size = self.num_parameters * (4 if self.config.save_dtype == "fp32" else 2)
        return f"drafter: {self.shape}; {size / 1e6:.1f} MB"

    def disk_lines(self) -> list[str]:
        """Nothing is written beside the result and the state."""
        return []

    def train_step(self, step: int) -> dict[str, float]:
        """Gradients of one batch, some sequences and one kind of block at a time."""
        config = self.config
        batch = self.plan.batch(step)
        random = np.random.default_rng([config.seed, 4, step])
        kinds = choose_kinds(
            len(batch.rows), config.slots, config.glancing, config.visible_prefix, random
        )
        total = max(1, int((batch.targets != IGNORED).sum()))
        results = []
        for low in range(0, len(batch.sequences), config.sequences_per_pass):
            part, places = some_sequences(batch, low, low + config.sequences_per_pass)
            with self._autocast():
                read = read_states(self.states, part, self.target, self.scales)
            for glancing in (False, True):
                chosen = kinds.glances[places] == glancing
                if not chosen.any():
                    continue
                blocks = arrange(part, kinds.prefix[places], chosen).to(self.target.device)
                seed = int(random.integers(2**62))
                results.append(self._train_pass(read, blocks, glancing, seed, step, total))
        return self._show(results, step)

    def _train_pass(
        self, read: StatesRead, blocks: Blocks, glancing: bool, seed: int, step: int, total: int
    ) -> _PassResult:
        shown = prefix_shown(blocks)
        if glancing:
            shown = self._glance(read, blocks, seed, step)
        # Dropout draws from torch's global state, which no saved state holds; a glance and the
        # pass behind it see the same units.
        torch.manual_seed(seed)
        with self._autocast():
            states = self._slot_states(read, blocks, shown)
        slots = self.config.slots
        tokens = slot_tokens(blocks)
        known = (blocks.targets != IGNORED).flatten()
        can_be_drafted = self.projection.places(tokens.targets, tokens.shown) != IGNORED
        learned = known & can_be_drafted & ~shown.flatten()
        weight = torch.zeros((), device=states.device)
        selected = step / max(1, self.total_steps - 1)
        if self._started_from is not None:
            selected = 1.0  # its selector has learned

        def loss_of(piece: Tensor, place: slice) -> tuple[Tensor, Tensor]:
            rows = learned[place].nonzero().squeeze(1)
            with self._autocast():
                found = slot_losses(
                    piece[rows],
                    tokens.take(place).take(rows),
                    self.projection,
                    self.drafter.extras,
                    self.target.embed,
                    selected,
                )
            chances = shown.flatten()[place].float()  # a token that cannot be drafted: 0
            chances[rows] = found.probabilities
            weights = path_weights(chances.view(-1, slots), known[place].view(-1, slots))
            mine = weights.flatten()[rows]
            weight.add_(mine.sum())
            return (found.losses * mine).sum(), found.correct

        count = int((known & ~shown.flatten()).sum())
        # Weights are about one in the middle of a block, so slots count alike in all passes.
        chunk = max(1, self.config.logit_chunk // slots) * slots
        flat = states.flatten(0, 2)
        loss, correct = backward_chunks(flat, loss_of, chunk, 1.0 / total)
        return _PassResult(loss.item(), weight.item(), int(correct), count)

    def _glance(self, read: StatesRead, blocks: Blocks, seed: int, step: int) -> Tensor:
        """Slots that are shown, after a guess without gradients and with the same dropout."""
        config = self.config
        torch.manual_seed(seed)
        nothing = torch.zeros_like(blocks.targets, dtype=torch.bool)
        with torch.no_grad(), self._autocast():
            states = self._slot_states(read, blocks, nothing).flatten(0, 2)
            tokens, guesses = slot_tokens(blocks), []
            for low in range(0, len(states), config.logit_chunk):
                part = slice(low, low + config.logit_chunk)
                logits = slot_logits(
                    states[part], tokens.take(part), self.projection, self.drafter.extras
                )
                guesses.append(logits.argmax(-1))
            wrong = torch.cat(guesses) != self.projection.places(tokens.targets, tokens.shown)
        progress = step / max(1, self.total_steps - 1)
        amount = config.glancing_start + progress * (config.glancing_end - config.glancing_start)
        # Drawn on the CPU, so that all devices show the same slots.
        draws = torch.rand(blocks.targets.shape, generator=torch.Generator().manual_seed(seed))
        targets = blocks.targets
        return glanced(wrong.view_as(targets), targets, amount, draws.to(targets.device))

    def _slot_states(self, read: StatesRead, blocks: Blocks, shown: Tensor) -> Tensor:
        return slot_states(self.drafter, self.target, read, blocks, shown)

    def _show(self, results: list[_PassResult], step: int) -> dict[str, float]:
        sums = np.array(results, float).sum(0)
        figures = {"loss": sums[0] / max(sums[1], 1e-6), "acc": sums[2] / max(sums[3], 1)}
        for name, value in figures.items():
            former = self._shown.get(name, value)
            self._shown[name] = _SMOOTHING * former + (1 - _SMOOTHING) * float(value)
        return dict(self._shown)

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        device = self.target.device
        if pick_dtype(self.config.dtype, device) is torch.bfloat16:
            return torch.autocast(device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def _set_first_weights(self) -> None:
        chosen = self.split.some_to_train(_SCALE_TEXTS, self.config.seed)
        batch = replace(self.plan, sequences=chosen, batch_size=len(chosen)).batch(0)
        with torch.no_grad():
            states = context_states(self.states, batch, self.target.device)
            mask = batch.mask[:, : states.shape[1]].bool().to(states.device)
            mask[:, 0] = False  # many models have states of another size at the first token
            self.scales.get_buffer("scales").copy_(state_scales(states[mask]))
            if self._started_from is not None:
                take_weights(self.drafter, self._started_from, self.scales.get_buffer("scales"))
                return
            ids, whole = batch.token_ids.to(states.device), batch.mask.to(states.device)
            final = self.target.hidden(ids, whole)[whole.bool()]
            set_first_weights(self.drafter, self.target, final)
            if self.config.warm_start:
                copy_last_layers(self.drafter, self.target, self.scales.get_buffer("scales"))

    def _start_from_heads(self) -> BlockwiseHeads | None:
        """Take the heads of the settings; returns these."""
        guesses = self.drafter.extras.guesses
        if guesses is None or self.config.heads is None:
            return None
        _, trained = load_heads(self.config.heads)
        kept = {n: v for n, v in trained.state_dict().items() if n != "draft_vocab"}
        guesses.heads.load_state_dict(kept)
        return trained

    def _set_draft_vocab(self, heads: BlockwiseHeads | None) -> None:
        """The heads' tokens, if they are as many; else the most frequent ones of the texts."""
        extras = self.drafter.extras
        if extras.draft_vocab is None:
            return
        count = len(extras.draft_vocab)
        listed = None if heads is None else heads.draft_vocab
        if listed is None or len(listed) != count:
            listed = frequent_tokens(
                self.data, self.split.train.tolist(), count, self.target.vocab_size
            )
        extras.draft_vocab = listed.to(self.target.device)

    def evaluate(self) -> dict[str, float]:
        """Held-out figures under short names, chain only."""
        return self.measure().summary()

    def measure(
        self, tree_nodes: tuple[int, ...] = (), *, num_sequences: int | None = None
    ) -> NarFigures:
        """Held-out figures in full, of all held-out sequences or only some."""
        return self.measure_on(
            self.data, self.states, self.split.held_out[:num_sequences], tree_nodes
        )

    def measure_on(
        self,
        data: TokenData,
        states: HiddenSource,
        sequences: NDArray[np.int64],
        tree_nodes: tuple[int, ...] = (),
        *,
        show_copies: bool = True,
    ) -> NarFigures:
        """Figures of any texts.

        Args:
            data: The texts.
            states: Source of their states.
            sequences: [n] which of them.
            tree_nodes: Budgets of the draft trees.
            show_copies: Whether slots are shown what they are shown in drafting.
        """
        drafting = Drafting(
            self.drafter, self.scales, self.target, self.projection, data, states, self.config
        )
        with self._autocast():
            return measure_drafter(drafting, sequences, tree_nodes, show_copies=show_copies)


def _group(name: str, parameter: nn.Parameter) -> int:
    """0: matrices, which decay; 1: queries and norms, which have their size; 2: gates; 3: heads
    that were trained before."""
    if ".heads." in name:
        return 3
    if name.endswith(("copy_gate", "copy_trust", "guesses.correction")):
        return 2
    sizes = ("slot_queries", "guesses.shown")
    return 0 if parameter.dim() > 1 and not name.endswith(sizes) else 1


def _drop_out(drafter: NarDrafter, part: float) -> None:
    """Leave out units of what attention and feed-forward networks add, while training."""
    if not part:
        return

    def hook(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        return functional.dropout(output, part, training=module.training)

    for layer in drafter.layers:
        for name in ("self_attn", "mlp"):
            layer.get_submodule(name).register_forward_hook(hook)


def mask_token(data: TokenData, vocab_size: int) -> int:
    """A token that stands for the mask: the first that never occurs, else the rarest."""
    counts = np.bincount(data.token_ids, minlength=vocab_size)[:vocab_size]
    return int(counts.argmin())


def heads_config(config: NarTraining, target: Target, data: TokenData) -> HeadsConfig:
    """Of the heads to start from, without what belongs to a folder of their own.

    Raises:
        SpecExtError: They are of another target, or do not fit the other settings.
    """
    assert config.heads is not None
    _, found = check_heads(
        config.heads,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        fingerprint=data.manifest.get("tokenizer_fingerprint"),
    )
    if found.num_heads > config.slots:
        raise SpecExtError(
            f"--heads {config.heads}: found {found.num_heads} heads, expected at most one for each "
            f"of the {config.slots} slots; give --slots {found.num_heads} or more"
        )
    if found.copy_match not in (0, config.copy_match):
        raise SpecExtError(
            f"--heads {config.heads}: found heads that compare {found.copy_match} tokens of "
            f"copies, expected --copy-match {config.copy_match}; give --copy-match "
            f"{found.copy_match}"
        )
    if config.layer_ids(target.num_layers)[-1] != target.num_layers - 1:
        raise SpecExtError(
            "--heads: they read the target's final states, so --read-layers must end with "
            f"{target.num_layers - 1}, the last layer"
        )
    return found.model_copy(update={"draft_vocab_size": None, "training": {}})


def drafter_config(
    config: NarTraining, target: Target, data: TokenData, trained: NarDrafter | None = None
) -> DrafterConfig:
    """Shape of the drafter, and what it will say about its origin.

    Raises:
        SpecExtError: Layers that the target does not have, or a drafter of another target.
    """
    kept = ("kind", "prompt_files", "num_prompts", "max_new_tokens", "temperature")
    facts = {
        "target": config.shown_target,
        "glancing": config.glancing,
        "visible_prefix": config.visible_prefix,
        "warm_start": config.warm_start,
        "data": {
            **{name: data.manifest[name] for name in kept if name in data.manifest},
            "num_tokens": len(data.token_ids),
            "num_sequences": len(data),
        },
    }
    fingerprint = data.manifest.get("tokenizer_fingerprint")
    if trained is not None:
        check_fits(trained.config, config, target, fingerprint)
        return further_config(trained.config, facts)
    text = target.model.config.get_text_config()
    layers = config.layer_ids(target.num_layers)
    if layers[-1] >= target.num_layers:
        raise SpecExtError(
            f"--read-layers {' '.join(map(str, layers))}: the target's layers are 0 to "
            f"{target.num_layers - 1}"
        )
    hidden, heads = target.hidden_size, int(text.num_attention_heads)
    units = config.ffn or (
        int(text.intermediate_size) if config.warm_start else -(-hidden * 16 // 9 // 64) * 64
    )
    rope = getattr(text, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or getattr(text, "rope_theta", None)
    return DrafterConfig(
        hidden_size=hidden,
        intermediate_size=units,
        num_hidden_layers=config.layers,
        num_attention_heads=heads,
        num_key_value_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text, "head_dim", None) or hidden // heads),
        vocab_size=target.vocab_size,
        block_size=config.slots + 1,
        mask_token_id=mask_token(data, target.vocab_size),
        target_layer_ids=layers,
        num_target_layers=target.num_layers,
        max_position_embeddings=target.context or 32768,
        rope_theta=float(theta or 10000.0),
        rms_norm_eps=float(getattr(text, "rms_norm_eps", None) or 1e-6),
        causal=config.causal,
        own_mask_embedding=True,
        nar=NarConfig(
            slot_queries=True,
            copy_match=config.copy_match,
            heads=None if config.heads is None else heads_config(config, target, data),
            selector_rank=config.selector_rank,
            draft_vocab_size=config.draft_vocab and min(config.draft_vocab, target.vocab_size),
            tokenizer_fingerprint=fingerprint,
            training=facts,
        ),
    )
