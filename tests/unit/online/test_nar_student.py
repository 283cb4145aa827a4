# SPDX-License-Identifier: Apache-2.0
"""The trainer's twin of a block drafter, against one block at a time of the drafter itself."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.online.folder import SAMPLES, FolderFacts, write_record
from vllm_spec_ext.online.nar_student import NarStudent
from vllm_spec_ext.online.sample_files import write_shard
from vllm_spec_ext.online.text_states import TextStates
from vllm_spec_ext.online.trace import Trace
from vllm_spec_ext.online.trainer import Trainer
from vllm_spec_ext.online.versions import version_folder, version_numbers, write_version
from vllm_spec_ext.options import OnlineOptions
from vllm_spec_ext.proposers.blockwise.heads import HeadsConfig
from vllm_spec_ext.proposers.nar.extras import Copies, conditional_log_probs
from vllm_spec_ext.proposers.nar.layout import NarConfig, makes_context
from vllm_spec_ext.proposers.nar.versions import (
    check_same_drafter,
    drafter_files,
    drafter_folder,
    read_version,
)
from vllm_spec_ext.proposers.text_index.copied_tokens import copied_tokens
from vllm_spec_ext.proposers.text_index.occurrence_index import OccurrenceIndex
from vllm_spec_ext.training.nar.model import DrafterConfig, NarDrafter
from vllm_spec_ext.training.target import Target

VOCAB, HIDDEN, SLOTS, LAYERS = 23, 32, 3, 3
MASK = 22
HEADS = HeadsConfig(
    target="toy",
    hidden_size=HIDDEN,
    vocab_size=VOCAB,
    num_heads=2,
    head_width=16,
    condition_on_next=True,
    copy_match=4,
)
KINDS = {
    "public": NarConfig(),
    "extras": NarConfig(
        slot_queries=True, copy_match=4, heads=HEADS, selector_rank=4, draft_vocab_size=20
    ),
}


@pytest.fixture(scope="module")
def target() -> Target:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    model = LlamaForCausalLM(config).float().eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.normal_(0, 0.3)
    return Target(model, "toy")


def save_drafter(folder: Path, kind: str = "extras", **changes: Any) -> Path:
    torch.manual_seed(1)
    given: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "block_size": SLOTS + 1,
        "mask_token_id": MASK,
        "target_layer_ids": (0, 1),
        "num_target_layers": LAYERS,
        "own_mask_embedding": kind == "extras",
        "nar": KINDS[kind],
        **changes,
    }
    drafter = NarDrafter(DrafterConfig(**given))
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if "norm" not in name:
                weight.normal_(0, 0.3)
    if drafter.extras.draft_vocab is not None:
        drafter.extras.draft_vocab = torch.tensor([*range(19), 21], dtype=torch.int32)
    drafter.save(folder)
    return folder


def facts_of(root: Path, drafting: dict[str, int] | None = None, **options: Any) -> FolderFacts:
    given = {"likeliest": 2, "learning_rate": 3e-3, "passes": 1000, "publish_steps": 20}
    return FolderFacts(
        method="nar",
        target="toy",
        drafter="own",
        vocab_size=VOCAB,
        options=OnlineOptions.model_validate({"folder": str(root), **given, **options}),
        drafting=drafting or {},
    )


def student_of(folder: Path, target: Target, drafting: dict[str, int] | None = None) -> NarStudent:
    student = NarStudent(facts_of(folder, drafting), torch.device("cpu"), target)
    student.load(folder)
    student.module.eval()
    return student


def trace(
    text: Sequence[int],
    rows: Sequence[int],
    starts: Sequence[int],
    chances: Sequence[float] | None = None,
) -> Trace:
    """Of a request without a temperature, which says what the text says."""
    following = np.array([text[row + 1] for row in rows], np.int32)
    return Trace(
        token_ids=np.array(text, np.int32),
        rows=np.array(rows, np.int32),
        top_tokens=np.stack([(following + 1) % VOCAB, following], axis=1),
        top_probs=np.tile(np.array([0.6, 0.3], np.float32), (len(rows), 1)),
        tails=np.full(len(rows), 0.1, np.float32),
        starts=np.array(starts, np.int32),
        failed_at=np.ones(len(starts), np.int32),
        chances=np.array(chances or [1.0] * len(starts), np.float32),
        states=torch.zeros(len(starts), 0, dtype=torch.bfloat16),
        temperature=0.0,
    )


def some_text(seed: int, length: int) -> list[int]:
    """With repetitions, so that there is something to copy."""
    draw = random.Random(seed)
    words = [[draw.randrange(VOCAB - 1) for _ in range(4)] for _ in range(4)]
    return [token for _ in range(-(-length // 4)) for token in draw.choice(words)][:length]


def one_block(
    drafter: NarDrafter, target: Target, text: list[int], slots: int, copies: bool
) -> Tensor:
    """[slots, vocab] log-probabilities behind text[:-slots], each behind the text's own tokens."""
    config = drafter.config
    known = text[: len(text) - slots]
    ids = torch.tensor([known])
    mask = torch.ones_like(ids)
    layers = [layer + 1 for layer in config.target_layer_ids]
    states = target.hidden(ids, mask, layers)[:, :-1]
    finals = target.hidden(ids, mask)[:, -2:-1]
    block = torch.tensor([[[known[-1], *[MASK] * slots]]])
    shown, kinds = torch.zeros(slots, dtype=torch.long), torch.zeros(slots, dtype=torch.long)
    if config.nar.copy_match and copies:
        index = OccurrenceIndex(len(text))
        with np.errstate(over="ignore"):
            index.append(np.array(known, np.int32))
            found = copied_tokens(index, config.nar.copy_match, slots)
        shown, kinds[:] = torch.from_numpy(found.tokens).long(), found.length
    given = Copies(shown[None, None], kinds[None, None]) if config.nar.copy_match else None
    hidden = drafter(states, torch.tensor([[len(known) - 1]]), block, target.embed, given, finals)[
        0, 0
    ]
    logits = target.project(hidden)
    if given is not None:
        bonus = drafter.extras.copy_bonus(hidden, torch.arange(slots), kinds)
        logits[torch.arange(slots), shown] += bonus
    listed = drafter.extras.draft_vocab
    if listed is not None:
        cut = torch.full_like(logits, -torch.inf)
        cut[:, listed.long()] = 0.0
        cut[kinds.nonzero().flatten(), shown[kinds > 0]] = 0.0  # listed or not
        logits = logits + cut
    alone = logits.log_softmax(-1)
    if not config.nar.selector_rank:
        return alone
    base, best = alone.topk(16)
    extras = drafter.extras
    before = extras.table_a(target.embed(torch.tensor(text[-slots - 1 : -1]))).unsqueeze(1)
    edges = extras.edges(hidden, before, extras.table_b(target.embed(best)))
    return alone.scatter(1, best, conditional_log_probs(base, edges)[:, 0])


@pytest.mark.parametrize(
    ("kind", "drafting"),
    [
        ("public", {}),
        ("extras", {}),
        ("extras", {"slots": 2, "candidates": 16, "copies": 0}),
    ],
    ids=["public", "extras", "fewer_slots_without_copies"],
)
@torch.no_grad()
def test_its_loss_is_that_of_each_block_by_itself(
    kind: str, drafting: dict[str, int], tmp_path: Path, target: Target
) -> None:
    """A block at each start, behind what the text says, and nothing of what comes later."""
    student = student_of(save_drafter(tmp_path / "drafter", kind), target, drafting)
    slots, copies = drafting.get("slots", SLOTS), bool(drafting.get("copies", 1))
    told, losses, hits, unlisted = [], [], [], 0
    listed = student.module.extras.draft_vocab
    for seed, length in ((1, 60), (2, 37)):
        text = some_text(seed, length)
        starts, chances = [5, 6, 11, *range(15, 33)], [1.0, 0.2] + [0.5] * 19
        told.append(trace(text, range(4, length - 1), starts, chances))
        for start, chance in zip(starts, chances, strict=True):
            weight = 1.0
            found = one_block(student.module, target, text[: start + 2 + slots], slots, copies)
            for slot in range(slots):
                # Nothing is known of a draft's success but that each slot has one chance in two.
                ahead = sum(0.75 ** (m + 1) for m in range(slot, slots))
                weight = ahead / chance
                token = text[start + 2 + slot]
                is_drafted = bool(found[slot, token] > -torch.inf)
                unlisted += is_drafted and listed is not None and token not in listed.tolist()
                losses.append((weight, -float(found[slot, token]) if is_drafted else 0.0))
                hits.append((weight, float(found[slot, token].exp())))
    judged = student.judge(student.columns(told))
    assert judged.num_drafted == len(losses)
    assert unlisted > 0 or kind == "public" or not copies  # of copies that are not listed, some
    whole = sum(weight for weight, _ in losses)
    mean = sum(weight * loss for weight, loss in losses) / whole
    assert float(judged.loss) == pytest.approx(mean, rel=1e-4)
    chance = sum(weight * hit for weight, hit in hits) / whole
    assert float(judged.overlap) == pytest.approx(chance, rel=1e-3)


@torch.no_grad()
def test_what_stands_beside_and_behind_a_text_does_not_matter(
    tmp_path: Path, target: Target
) -> None:
    student = student_of(save_drafter(tmp_path / "drafter"), target)
    rows, starts = range(4, 30), range(6, 26)
    one, other = some_text(1, 31), some_text(2, 70)
    alone = student.judge(student.columns([trace(one, rows, starts)]))
    longer = student.judge(student.columns([trace(one + other, rows, starts)]))
    assert float(alone.loss) == pytest.approx(float(longer.loss), rel=1e-5)
    both = student.judge(student.columns([trace(one, rows, starts), trace(other, rows, starts)]))
    own = student.judge(student.columns([trace(other, rows, starts)]))
    mean = (float(alone.loss) + float(own.loss)) / 2
    assert float(both.loss) == pytest.approx(mean, rel=1e-5)


@torch.no_grad()
def test_where_nothing_was_said(tmp_path: Path, target: Target) -> None:
    """Slots past the text's end or in a gap of the rows teach nothing, nor do rows without a
    start."""
    student = student_of(save_drafter(tmp_path / "drafter"), target)
    text = some_text(1, 31)
    gaps = [*range(4, 12), *range(20, 30)]
    # 10 knows one slot (row 11), 18 two (rows 20 and 21), 27 and 28 the last rows.
    judged = student.judge(student.columns([trace(text, gaps, [10, 18, 27, 28, 29])]))
    assert judged.num_drafted == 1 + 2 + 2 + 1 + 0
    nothing = student.judge(student.columns([trace(text, gaps, [29])]))
    assert nothing.num_drafted == 0
    assert student.columns([trace(text, gaps, [])]) == {}


@torch.no_grad()
def test_of_a_long_text_the_end_is_read(tmp_path: Path, target: Target) -> None:
    """Copies are still found in all of it."""
    student = student_of(save_drafter(tmp_path / "drafter"), target)
    text = [*range(10, 20), *some_text(3, 1200), *range(10, 16)]
    last = len(text) - 5
    columns = student.columns([trace(text, range(last, len(text) - 1), [5, last])])
    assert int(columns["length"][0]) == 1024
    assert columns["ids"][0].tolist() == text[-1024:]
    assert columns["anchors"][0].tolist() == [1024 - 4] + [1] * 15  # the first is too far back
    assert columns["copies"][0, 0].tolist() == [13, 14, 15]
    assert student.judge(columns).num_drafted == SLOTS


def test_what_makes_the_context_stays(tmp_path: Path, target: Target) -> None:
    """All else moves, and the engine takes the result."""
    folder = save_drafter(tmp_path / "drafter")
    trainer, root = trainer_of(folder, target, tmp_path, publish_steps=5)
    before = {n: v.detach().clone() for n, v in trainer.student.module.named_parameters()}
    for _ in range(5):
        assert trainer.advance() == ""
    moved = {
        name
        for name, value in trainer.student.module.named_parameters()
        if not torch.equal(value, before[name])
    }
    fixed = {name for name in before if makes_context(name)}
    attention = "layers.0.self_attn"
    assert fixed == {
        *("fc.weight", "hidden_norm.weight", f"{attention}.k_proj.weight"),
        *(f"{attention}.v_proj.weight", f"{attention}.k_norm.weight"),
    }
    assert moved == before.keys() - fixed
    own = read_version(folder)
    other = read_version(version_folder(root, trainer.published))
    assert trainer.published == 1
    check_same_drafter(own, other, root)
    assert not torch.equal(own.weights.layers["norm.weight"], other.weights.layers["norm.weight"])


def trainer_of(
    folder: Path, target: Target, tmp_path: Path, **options: Any
) -> tuple[Trainer, Path]:
    """On texts in which each token decides the next one."""
    root = tmp_path / "online"
    root.mkdir()
    write_version(root, 0, drafter_files(folder), "own")
    facts = facts_of(root, batch_size=128, **options)
    write_record(root, facts)
    traces = []
    for seed in range(40):
        text = [seed % (VOCAB - 1)]
        while len(text) < 40:
            text.append((5 * text[-1] + 3) % (VOCAB - 1))
        traces.append(trace(text, range(3, 39), range(4, 35)))
    write_shard(root / SAMPLES, 1, traces)
    return Trainer(root, NarStudent(facts, torch.device("cpu"), target), facts), root


def test_it_learns_and_publishes_what_is_better(tmp_path: Path, target: Target) -> None:
    folder = save_drafter(tmp_path / "drafter")
    trainer, root = trainer_of(folder, target, tmp_path, learning_rate=1e-2)
    apart = trainer.pool.held_out()
    before = trainer.student.judge(apart)
    for _ in range(100):
        assert trainer.advance() == ""
    assert float(before.overlap) < 0.2
    assert trainer.figures["overlap"] > 0.9
    assert version_numbers(root)[-1] == trainer.published > 1
    trainer.student.load(version_folder(root, trainer.published))
    assert float(trainer.student.judge(apart).overlap) > 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_what_the_method_serves(tmp_path: Path, target: Target, kind: str) -> None:
    folder = save_drafter(tmp_path / "drafter", kind)
    config = json.loads((folder / "config.json").read_text())
    own = {**config, "known_to_others": 7, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(own))
    student = student_of(folder, target)
    write_version(tmp_path, 1, student.files(), "own")
    served = drafter_folder(str(version_folder(tmp_path, 1)))
    check_same_drafter(read_version(folder), read_version(served), served)
    told = json.loads((served / "config.json").read_text())
    assert told == {**own, "torch_dtype": "float32"}
    before, after = NarDrafter.load(folder).state_dict(), NarDrafter.load(served).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before | after)


def test_what_is_no_drafter_of_the_target_is_refused(tmp_path: Path, target: Target) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SpecExtError, match="holds no block drafter"):
        student_of(tmp_path, target)
    folder = save_drafter(tmp_path / "drafter", num_target_layers=5)
    with pytest.raises(SpecExtError, match="for a target of 23 tokens and 5 layers"):
        student_of(folder, target)


def test_states_are_made_once_and_the_oldest_go(target: Target) -> None:
    texts = [torch.tensor(some_text(seed, 20)) for seed in range(3)]
    size = 20 * 2 * HIDDEN * 4
    states = TextStates(target, (1, 3), most_bytes=2 * size)
    for number in (0, 1, 0, 1):
        found = states.of(number, texts[number])
        mask = torch.ones(1, 20, dtype=torch.long)
        assert torch.equal(found, target.hidden(texts[number][None], mask, (1, 3))[0])
    assert states.num_read == 2
    states.of(0, texts[0])
    states.of(2, texts[2])  # in the place of 1, which was asked for longer ago
    states.of(0, texts[0])
    assert states.num_read == 3
    states.of(1, texts[1])
    assert states.num_read == 4
