# SPDX-License-Identifier: Apache-2.0
"""The trainer's twin of a draft model, against the model itself; each known mistake breaks a test.

Rows taken one position too late (the reference code's mask with unshifted logits), and losses that
depend on what stands behind a text in its batch (an attention mask of ones over padding).
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from unreadable_files import make_unreadable, said_to_be_unreadable

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.online.draft_student import DraftModelStudent
from vllm_spec_ext.online.folder import SAMPLES, FolderFacts, write_record
from vllm_spec_ext.online.sample_files import write_shard
from vllm_spec_ext.online.trace import Trace
from vllm_spec_ext.online.trainer import Trainer
from vllm_spec_ext.online.versions import version_numbers, write_version
from vllm_spec_ext.options import OnlineOptions
from vllm_spec_ext.proposers.growth.checkpoint_files import (
    checkpoint_files,
    checkpoint_folder,
    read_tensors,
    tensor_names,
)

VOCAB = 23


def save_model(folder: Path, *, tied: bool = True, vocab: int = VOCAB) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


def facts_of(root: Path, **options: Any) -> FolderFacts:
    given = {"learning_rate": 3e-3, "passes": 1000, "publish_steps": 20}
    return FolderFacts(
        method="small_model",
        target="toy",
        drafter="own",
        vocab_size=VOCAB,
        options=OnlineOptions.model_validate({"folder": str(root), **given, **options}),
    )


def student_of(folder: Path) -> DraftModelStudent:
    student = DraftModelStudent(facts_of(folder), torch.device("cpu"))
    student.load(folder)
    return student


def trace(
    text: Sequence[int],
    rows: Sequence[int],
    probs: np.ndarray[Any, Any],
    temperature: float = 1.0,
) -> Trace:
    """With all tokens' probabilities, [len(rows), VOCAB]."""
    order = np.argsort(-probs, axis=1).astype(np.int32)
    return Trace(
        token_ids=np.array(text, np.int32),
        rows=np.array(rows, np.int32),
        top_tokens=order,
        top_probs=np.take_along_axis(probs, order, axis=1).astype(np.float32),
        tails=np.zeros(len(rows), np.float32),
        starts=np.array(rows[:1], np.int32),
        failed_at=np.ones(1, np.int32),
        chances=np.ones(1, np.float32),
        states=torch.zeros(1, 0, dtype=torch.bfloat16),
        temperature=temperature,
    )


def own_trace(student: DraftModelStudent, seed: int, length: int, shift: int = 0) -> Trace:
    """Taught by the draft model itself; with a shift by what it says that many tokens later."""
    draw = random.Random(seed)
    text = [draw.randrange(VOCAB) for _ in range(length)]
    with torch.no_grad():
        model: Any = student.module
        probs = model(input_ids=torch.tensor([text])).logits[0].softmax(-1).numpy()
    rows = list(range(4, length - 1 - shift))
    return trace(text, rows, probs[[row + shift for row in rows]])


def test_its_own_words_teach_nothing(tmp_path: Path) -> None:
    """Row t is what the model says behind token t; one position off would be far away."""
    student = student_of(save_model(tmp_path / "draft"))
    student.module.eval()
    batch = student.columns([own_trace(student, 1, 90), own_trace(student, 2, 41)])
    assert batch["ids"].shape[0] == 5  # windows of 32 rows
    judged = student.judge(batch)
    assert judged.num_drafted == 85 + 36
    assert float(judged.loss.detach()) == pytest.approx(0.0, abs=1e-4)
    assert float(judged.overlap) == pytest.approx(1.0, abs=1e-4)
    late = student.judge(student.columns([own_trace(student, 1, 90, shift=1)]))
    assert float(late.loss.detach()) > 0.3


def test_what_stands_beside_and_behind_a_text_does_not_matter(tmp_path: Path) -> None:
    student = student_of(save_model(tmp_path / "draft"))
    student.module.eval()
    some = [own_trace(student, seed, length, shift=1) for seed, length in ((1, 20), (2, 36))]
    alone = [student.judge(student.columns([one])) for one in some]
    together = student.judge(student.columns(some))
    total = sum(float(one.loss.detach()) * one.num_drafted for one in alone)
    assert together.num_drafted == sum(one.num_drafted for one in alone)
    assert float(together.loss.detach()) == pytest.approx(total / together.num_drafted, rel=1e-5)


def test_long_texts_are_read_from_a_window_on(tmp_path: Path) -> None:
    student = student_of(save_model(tmp_path / "draft"))
    text = [random.Random(0).randrange(VOCAB) for _ in range(400)]
    probs = np.full((3, VOCAB), 1.0 / VOCAB)
    batch = student.columns([trace(text, [50, 390, 398], probs)])
    (at,) = batch["at"]
    assert at[:3].tolist() == [-1, 247, 255]  # the first is more than a window back
    assert batch["ids"][0].tolist() == text[143:399]
    assert student.judge(batch).num_drafted == 2


def test_a_draft_with_fewer_tokens(tmp_path: Path) -> None:
    """It cannot draft the others, and reads them as its last one, as the engine does."""
    student = student_of(save_model(tmp_path / "draft", vocab=VOCAB - 3))
    probs = np.zeros((2, VOCAB))
    probs[0, 5], probs[1, VOCAB - 1] = 1.0, 1.0
    judged = student.judge(student.columns([trace([1, VOCAB - 1, 5, VOCAB - 1], [1, 2], probs)]))
    assert judged.num_drafted == 2
    judged.loss.backward()
    assert float(judged.overlap) < 0.5  # nothing of the second


def test_embeddings_stay(tmp_path: Path) -> None:
    for tied in (True, False):
        student = student_of(save_model(tmp_path / f"draft{tied}", tied=tied))
        frozen = {n for n, p in student.module.named_parameters() if not p.requires_grad}
        assert frozen == {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})


@pytest.mark.parametrize("tied", [True, False])
def test_files_are_what_the_method_serves(tmp_path: Path, tied: bool) -> None:
    folder = save_model(tmp_path / "draft", tied=tied)
    student = student_of(folder)
    served = tmp_path / "served"
    served.mkdir()
    for name, data in student.files().items():
        (served / name).write_bytes(data)
    before, after = read_tensors(folder), read_tensors(served)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    student.load(served)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SpecExtError, match="holds no draft model"):
        student_of(tmp_path)


def test_weights_that_cannot_be_read_are_not_called_damaged(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "draft")
    make_unreadable(folder / "model.safetensors")
    with said_to_be_unreadable(folder / "model.safetensors"):
        read_tensors(folder)


def test_weights_that_lie_there_twice_are_one_version(tmp_path: Path) -> None:
    """Folders of some models have them by other names, too, or adapters."""
    folder = save_model(tmp_path / "draft")
    expected = {name: value.clone() for name, value in read_tensors(folder).items()}
    other = {f"layers.{name}": value for name, value in expected.items()}
    save_file(other, folder / "consolidated.safetensors")
    save_file(other, folder / "adapter_model.safetensors")
    assert checkpoint_files(folder).keys() == {"config.json", "model.safetensors"}
    assert read_tensors(folder).keys() == expected.keys() == tensor_names(folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(expected, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_tensors(folder).keys() == expected.keys()
    assert checkpoint_folder(str(folder)) == folder
    (folder / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(SpecExtError, match=r"no model-00001-of-00001.safetensors in"):
        checkpoint_folder(str(folder))


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Eagle3LlamaForCausalLM"]},
        {"architectures": ["LlamaForCausalLMEagle3"]},
        {"architectures": ["DFlashQwen3ForCausalLM"]},
        {"draft_vocab_size": 5},
    ],
)
def test_heads_are_no_models_that_learn(changes: dict[str, object], tmp_path: Path) -> None:
    folder = save_model(tmp_path / "draft")
    assert checkpoint_folder(str(folder)) == folder
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(SpecExtError, match="heads on a target's states cannot learn"):
        checkpoint_folder(str(folder))
    (folder / "config.json").write_text("[]")
    with pytest.raises(SpecExtError, match="holds no object"):
        checkpoint_folder(str(folder))


def test_it_learns_and_publishes_what_is_better(tmp_path: Path) -> None:
    """A text in which each token decides the next one, told without a temperature."""
    folder = save_model(tmp_path / "draft")
    root = tmp_path / "online"
    root.mkdir()
    write_version(root, 0, checkpoint_files(folder), "own")
    facts = facts_of(root, batch_size=64)
    write_record(root, facts)
    traces = []
    for seed in range(60):
        text = [seed % VOCAB, seed // VOCAB]
        while len(text) < 40:
            text.append((5 * text[-1] + 3) % VOCAB)
        rows = list(range(3, 39))
        flat = np.full((len(rows), VOCAB), 1.0 / VOCAB)  # the model is unsure; its choice is not
        traces.append(trace(text, rows, flat, temperature=0.0))
    write_shard(root / SAMPLES, 1, traces)
    trainer = Trainer(root, DraftModelStudent(facts, torch.device("cpu")), facts)
    apart = trainer.pool.held_out()
    before = trainer.student.judge(apart)
    for _ in range(120):
        if trainer.advance():
            break
    assert float(before.overlap) < 0.3
    assert trainer.figures["overlap"] > 0.8
    assert trainer.figures["held_out"] < 0.5 * float(before.loss)
    assert version_numbers(root)[-1] == trainer.published > 0


def test_a_mixture_of_experts_is_refused_before_it_learns(tmp_path: Path) -> None:
    """transformers joins the experts' weights, and a version of these no server could read."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3MoeConfig(**shape, **experts, **heads, num_hidden_layers=2)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "moe")
    student = DraftModelStudent(facts_of(tmp_path), torch.device("cpu"))
    with pytest.raises(SpecExtError, match=r"experts\.\w+\), .*Leave online out"):
        student.load(tmp_path / "moe")
