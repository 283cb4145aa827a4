# SPDX-License-Identifier: Apache-2.0
"""Training block drafters end to end on a tiny random Llama, on the CPU."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_language import save_word_tokenizer
from unreadable_files import make_unreadable, said_to_be_unreadable

from vllm_spec_ext.atomic import DiskFullError
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.blockwise.heads import WEIGHTS_NAME as HEADS_WEIGHTS
from vllm_spec_ext.proposers.blockwise.heads import (
    BlockwiseHeads,
    HeadsConfig,
    TokensSeen,
    load_heads,
)
from vllm_spec_ext.proposers.nar.layout import CONFIG_NAME, EXTRAS_NAME, MASK_NAME, WEIGHTS_NAME
from vllm_spec_ext.training.batches import IGNORED
from vllm_spec_ext.training.hidden import live_states
from vllm_spec_ext.training.nar import model, trainer
from vllm_spec_ext.training.nar.blocks import arrange
from vllm_spec_ext.training.nar.checkpoint import finished
from vllm_spec_ext.training.nar.model import NarDrafter
from vllm_spec_ext.training.nar.nar_task import NarTask
from vllm_spec_ext.training.nar.pass_batch import read_states, slot_states
from vllm_spec_ext.training.nar.schema import SHAPE, NarTraining
from vllm_spec_ext.training.nar.trainer import main, train_nar
from vllm_spec_ext.training.shards import (
    TokenSequence,
    open_manifest,
    read_data,
    shard_path,
    write_shard,
)
from vllm_spec_ext.training.target import load_target

Settings = Callable[..., NarTraining]


def quiet(line: str) -> None:
    """No progress lines."""


def task_of(config: NarTraining) -> NarTask:
    """Untrained."""
    target = load_target(config.model, torch.device("cpu"), torch.float32)
    data = read_data(config.data_folder)
    states = live_states(target, config.state_layers(target.num_layers))
    return NarTask(config, target, data, states)


def test_a_drafter_learns(settings: Settings) -> None:
    """The language is determined, so that all slots can be right."""
    config = settings(max_steps=120)
    figures = train_nar(config, quiet)
    assert figures is not None
    assert figures.accuracy[0]["top1"] > 0.9
    assert figures.acceptance_length > 2.5
    assert figures.chain_lengths == sorted(figures.chain_lengths)
    assert figures.chain_lengths[-1] == figures.acceptance_length
    assert figures.tree_acceptance_lengths[0] >= figures.acceptance_length - 1e-6
    told = json.loads((config.out / CONFIG_NAME).read_text())
    assert told["nar"]["training"]["acceptance_length"] == round(figures.acceptance_length, 4)
    assert told["dflash_config"]["target_layer_ids"] == [0, 1, 2]
    assert (
        f"**{figures.acceptance_length:.2f}** with the chain"
        in (config.out / "README.md").read_text()
    )
    again = train_nar(settings(stage="eval"), quiet)
    assert again is not None  # the finished drafter reads the target's states as they are
    assert again.acceptance_length == pytest.approx(figures.acceptance_length, abs=0.02)


@pytest.mark.parametrize("cached", [False, True])
def test_resumed_training_equals_uninterrupted(
    settings: Settings, tmp_path: Path, cached: bool
) -> None:
    """Also with dropout and glancing, which draw random numbers."""
    facts = {"max_steps": 8, "dropout": 0.2, "cache_hidden": cached, "cache_dtype": "fp32"}
    train_nar(settings(out=tmp_path / "whole", **facts), quiet)
    parts = settings(out=tmp_path / "parts", log_every=3, **facts)

    def interrupt(line: str) -> None:
        if line.startswith("step 3/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_nar(parts, interrupt)
    lines: list[str] = []
    train_nar(parts, lines.append)
    assert any("resumed at step 3 of 8" in line for line in lines)
    for name in (WEIGHTS_NAME, EXTRAS_NAME):
        whole, resumed = (load_file(tmp_path / run / name) for run in ("whole", "parts"))
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(whole[key], resumed[key]) for key in whole), name


def test_parts_can_be_left_out(settings: Settings) -> None:
    """Without copies, selector and further kinds of blocks; and all tokens of one pass at once."""
    config = settings(
        max_steps=6, copy_match=0, selector_rank=0, glancing=0.0, visible_prefix=0.0, draft_vocab=20
    )
    figures = train_nar(config, quiet)
    assert figures is not None
    assert figures.acceptance_length == figures.without_selector
    drafter = NarDrafter.load(config.out)
    assert drafter.extras.draft_vocab is not None
    assert len(drafter.extras.draft_vocab) == 20
    assert sorted(load_file(config.out / EXTRAS_NAME)) == ["draft_vocab", "slot_queries"]


def test_passes_do_not_change_the_gradient(settings: Settings) -> None:
    """How many sequences go through together, and how many logits exist, is a matter of memory."""
    gradients = []
    for facts in ({"sequences_per_pass": 8}, {"sequences_per_pass": 3, "logit_chunk": 7}):
        task = task_of(settings(glancing=0.0, **facts))
        task.train_step(20)
        gradients.append([p.grad for p in task.drafter.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 10
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_copies_teach_what_nothing_else_tells(settings: Settings, tmp_path: Path) -> None:
    """Random texts that repeat: only the copy knows what comes."""
    random, folder = np.random.default_rng(1), tmp_path / "repeats"
    sequences = []
    for _ in range(60):
        text = random.integers(2, 48, 8).tolist()
        sequences.append(TokenSequence([*text, *text, *text], 10))
    open_manifest(folder, {"num_shards": 1, "prompts_per_shard": 60, "kind": "synthetic"})
    write_shard(shard_path(folder, 0), sequences)
    figures = train_nar(settings(data=folder, max_steps=60), quiet)
    assert figures is not None
    assert figures.accuracy[2]["top1"] > 0.9
    told = json.loads((tmp_path / "drafter" / CONFIG_NAME).read_text())
    assert told["nar"]["training"]["without_copies"] < figures.acceptance_length - 1.0


def test_a_finished_drafter_is_the_trained_one(settings: Settings) -> None:
    """The scales of the states are folded into its first matrix."""
    task = task_of(settings())
    for step in range(3):
        task.optimizer.zero_grad()
        task.train_step(step)
        task.optimizer.step()
    task.drafter.eval()
    done = finished(task.drafter, task.scales.get_buffer("scales"))
    states = torch.randn(2, 9, done.config.num_state_units) * 5
    anchors, ids = torch.tensor([[4, 9], [5, 7]]), torch.randint(0, 48, (2, 2, 4))
    with torch.no_grad():
        trained = task.drafter(task.scales(states), anchors, ids, task.target.embed)
        assert torch.allclose(done(states, anchors, ids, task.target.embed), trained, atol=1e-5)


def save_random_heads(folder: Path, **changes: Any) -> Path:
    """Heads of the tiny target; returns their folder."""
    facts: dict[str, Any] = {
        "target": "tiny",
        "hidden_size": 32,
        "vocab_size": 48,
        "num_heads": 2,
        "head_width": 8,
        "condition_on_next": True,
        "copy_match": 8,
        **changes,
    }
    torch.manual_seed(2)
    heads = BlockwiseHeads(HeadsConfig(**facts))
    with torch.no_grad():
        for weight in heads.parameters():
            weight.normal_(0, 0.5)
    folder.mkdir()
    save_file(heads.state_dict(), folder / HEADS_WEIGHTS)
    (folder / CONFIG_NAME).write_text(heads.config.model_dump_json())
    return folder


def test_a_drafter_begins_as_its_heads(settings: Settings, tmp_path: Path) -> None:
    """Before the first step, slots with a head predict what the head predicts."""
    folder = save_random_heads(tmp_path / "heads")
    _, heads = load_heads(folder)
    task = task_of(settings(heads=folder, visible_prefix=0.0))
    task.drafter.eval()
    batch = task.plan.batch(0)
    seen = TokensSeen(batch.next_tokens, batch.inputs[0][:, :2], batch.inputs[1])
    with torch.no_grad():
        finals = task.target.hidden(batch.token_ids, batch.mask)[batch.rows, batch.columns]
        expected = heads(finals, seen, task.target.embed)
        everything = np.ones(len(batch.rows), np.bool_)
        blocks = arrange(batch, np.zeros(len(batch.rows), np.int64), everything)
        read = read_states(task.states, batch, task.target, task.scales)
        nothing = torch.zeros_like(blocks.targets, dtype=torch.bool)
        found = slot_states(task.drafter, task.target, read, blocks, nothing)
    real = blocks.targets[..., 0] != IGNORED
    assert real.sum() == len(batch.rows) > 50
    assert torch.allclose(found[real][:, :2], expected, atol=1e-5)
    assert not torch.allclose(found[real][:, 2], found[real][:, 1], atol=0.1)


def test_heads_and_layers_learn_together(settings: Settings, tmp_path: Path) -> None:
    folder = save_random_heads(tmp_path / "heads")
    figures = train_nar(settings(heads=folder, max_steps=200), quiet)
    assert figures is not None
    assert figures.accuracy[0]["top1"] > 0.9
    again = train_nar(settings(heads=folder, stage="eval"), quiet)
    assert again is not None
    assert again.acceptance_length == pytest.approx(figures.acceptance_length, abs=0.02)
    done = NarDrafter.load(tmp_path / "drafter").extras.guesses
    assert done is not None
    assert float(done.correction.detach().abs().min(-1).values.max()) > 0.1  # the layers are heard
    _, before = load_heads(folder)
    assert not torch.equal(done.heads.w_in.weight, before.w_in.weight)


def test_heads_that_do_not_fit_are_refused(settings: Settings, tmp_path: Path) -> None:
    heads = save_random_heads(tmp_path / "heads")
    for changes, message in (
        ({"slots": 1}, r"found 2 heads.*the 1 slots; give --slots 2 or more"),
        ({"copy_match": 3}, r"compare 8 tokens of copies.*give --copy-match 8"),
        ({"read_layers": [0, 1]}, r"--read-layers must end with 2, the last layer"),
        ({"heads": save_random_heads(tmp_path / "wide", hidden_size=48)}, r"hidden size 48"),
        ({"heads": tmp_path / "none"}, r"no such folder"),
    ):
        with pytest.raises(SpecExtError, match=message):
            task_of(settings(**{"heads": heads, **changes}))


def test_heads_that_are_not_there_are_missed_before_the_data_is_made(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "prepare", pytest.fail)
    with pytest.raises(SpecExtError, match=r"no such folder"):
        train_nar(settings(heads=tmp_path / "none"), quiet)


def test_a_warm_start_knows_the_targets_layers(settings: Settings) -> None:
    task = task_of(settings(warm_start=True, layers=2))
    theirs = task.target.layer_list()[-2:]
    for mine, layer in zip(task.drafter.layers, theirs, strict=True):
        name = "self_attn.v_proj.weight"
        assert torch.equal(mine.get_parameter(name), layer.get_parameter(name))
    assert task.drafter.config.intermediate_size == 48
    with pytest.raises(SpecExtError, match=r"has 3 layers, the drafter 4; give --layers 3"):
        task_of(settings(warm_start=True, layers=4))
    with pytest.raises(SpecExtError, match=r"no fitting mlp\.gate_proj"):
        task_of(settings(warm_start=True, ffn=40))


def save_gemma(folder: Path) -> str:
    """Whose norms multiply by one more than their weights, and whose embeddings are scaled."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    shape = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    config = Gemma3TextConfig(
        **shape, **heads, **ids, num_hidden_layers=3, layer_types=["full_attention"] * 3
    )
    torch.manual_seed(0)
    Gemma3ForCausalLM(config).save_pretrained(folder)
    save_word_tokenizer(folder)
    return str(folder)


def test_a_warm_start_knows_the_targets_norms(settings: Settings, tmp_path: Path) -> None:
    gemma = save_gemma(tmp_path / "gemma")
    with pytest.raises(SpecExtError, match=r"norms of .* scale in another way .*drop the flag"):
        task_of(settings(model=gemma, warm_start=True))


def test_blocks_read_embeddings_as_engines_share_them(settings: Settings, tmp_path: Path) -> None:
    target = task_of(settings(model=save_gemma(tmp_path / "gemma"))).target
    ids = torch.arange(5)
    assert torch.equal(target.embed(ids), target.model.get_input_embeddings().weight[ids])


def test_a_full_disk_leaves_the_former_drafter(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(max_steps=1)
    train_nar(config, quiet)
    before = {path: path.read_bytes() for path in config.out.rglob("*") if path.is_file()}

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(model, "save_file", full)
    with pytest.raises(DiskFullError, match="everything written before is intact"):
        train_nar(settings(max_steps=2, resume="restart"), quiet)
    assert {path: path.read_bytes() for path in config.out.rglob("*") if path.is_file()} == before


def test_the_result_takes_the_place_of_no_folder_that_is_read(
    settings: Settings, tmp_path: Path
) -> None:
    start = settings(max_steps=1)
    train_nar(start, quiet)
    with pytest.raises(SpecExtError, match=r"--start-from: .* lies in --out"):
        train_nar(further(settings, start_from=start.out), quiet)


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME, "README.md", EXTRAS_NAME, MASK_NAME])
def test_files_of_others_are_not_replaced(settings: Settings, name: str) -> None:
    """Another model's folder, or one of a project; said before hours of training."""
    config = settings(max_steps=1)
    path = config.out / name
    path.parent.mkdir(parents=True)
    path.write_text('{"model_type": "llama"}')
    with pytest.raises(SpecExtError, match=rf"holds {name}, .*no block drafter of an .*--out"):
        train_nar(config, quiet)
    assert path.read_text() == '{"model_type": "llama"}'
    assert not config.run_folder.exists()


def test_a_drafter_of_an_earlier_run_is_replaced(settings: Settings) -> None:
    config = settings(max_steps=1)
    config.out.mkdir()
    (config.out / "notes").write_text("mine")
    train_nar(config, quiet)
    assert train_nar(config, quiet) is not None
    assert (config.out / "notes").read_text() == "mine"


def test_dry_run_predicts_and_writes_nothing(settings: Settings, tmp_path: Path) -> None:
    lines: list[str] = []
    assert train_nar(settings(dry_run=True, cache_hidden=True), lines.append) is None
    text = "\n".join(lines)
    assert "drafter: layers: 1 with 64 units, slots: 3" in text
    assert "s a step" in text
    assert "for the hidden states, which are kept" in text
    # 60 texts of 24 tokens, three layers of 32 units, two bytes each.
    assert f"disk: {60 * 24 * 3 * 32 * 2 / 1e9:.2f} GB for cached hidden states" in text
    assert not (tmp_path / "drafter").exists()
    assert not (tmp_path / "drafter.run").exists()


def test_states_of_other_layers_are_refused(settings: Settings) -> None:
    train_nar(settings(max_steps=1, cache_hidden=True), quiet)
    other = settings(max_steps=1, cache_hidden=True, read_layers=[0, 2], resume="restart")
    with pytest.raises(SpecExtError, match=r"made with other settings \(layers: \[1, 2, 3\]"):
        train_nar(other, quiet)


def test_refusals(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SpecExtError, match=r"--read-layers 1 3: the target's layers are 0 to 2"):
        task_of(settings(read_layers=[1, 3]))
    with pytest.raises(SpecExtError, match="measures a finished drafter"):
        train_nar(settings(stage="eval"), quiet)
    for wrong in ({"glancing": 0.7, "visible_prefix": 0.4}, {"read_layers": [2, 1]}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            settings(**wrong)
    words = ["--model", "m", "--out", "o", "--slots", "0"]
    assert main(words) == 2
    assert "slots" in capsys.readouterr().err


def test_evaluation_refuses_another_shape(settings: Settings) -> None:
    config = settings(max_steps=1)
    train_nar(config, quiet)
    with pytest.raises(SpecExtError, match=r"target_layer_ids \(0, 1, 2\).*--read-layers"):
        train_nar(settings(stage="eval", read_layers=[0, 1]), quiet)
    weights = config.out / WEIGHTS_NAME
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(SpecExtError, match="is damaged"):
        train_nar(settings(stage="eval"), quiet)
    make_unreadable(weights)
    with said_to_be_unreadable(weights):
        train_nar(settings(stage="eval"), quiet)


def further(settings: Settings, **changes: Any) -> NarTraining:
    """Settings without those of a shape."""
    given = settings().model_dump(mode="json", exclude_unset=True)
    kept = {name: value for name, value in given.items() if name not in SHAPE}
    return NarTraining.model_validate({**kept, **changes})


def test_a_finished_drafter_is_trained_further(settings: Settings, tmp_path: Path) -> None:
    first = settings(max_steps=40, heads=save_random_heads(tmp_path / "heads"))
    before = train_nar(first, quiet)
    assert before is not None
    begun = further(settings, start_from=first.out, out=tmp_path / "none", max_steps=1)
    unchanged = train_nar(begun.model_copy(update={"learning_rate": 1e-12}), quiet)
    assert unchanged is not None
    assert unchanged.accuracy == before.accuracy  # it starts where the other one ended
    config = further(settings, start_from=first.out, out=tmp_path / "further", max_steps=80)
    after = train_nar(config, quiet)
    assert after is not None
    assert after.acceptance_length > before.acceptance_length + 0.1
    one, other = (NarDrafter.load(folder).config for folder in (first.out, config.out))
    facts = other.nar.training
    assert replace(one, nar=one.nar.model_copy(update={"training": facts})) == other
    assert facts["before"] == [one.nar.training["data"]]
    assert "Before that:" in (config.out / "README.md").read_text()
    twice = further(settings, start_from=config.out, out=tmp_path / "twice", max_steps=1)
    train_nar(twice, quiet)
    assert len(NarDrafter.load(twice.out).config.nar.training["before"]) == 2


def test_a_resumed_further_training_equals_an_uninterrupted_one(
    settings: Settings, tmp_path: Path
) -> None:
    train_nar(settings(max_steps=3), quiet)
    start = settings().out
    train_nar(further(settings, start_from=start, out=tmp_path / "whole", max_steps=6), quiet)
    parts = further(settings, start_from=start, out=tmp_path / "parts", max_steps=6, log_every=2)

    def interrupt(line: str) -> None:
        if line.startswith("step 2/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_nar(parts, interrupt)
    train_nar(parts, quiet)
    whole, resumed = (load_file(tmp_path / run / WEIGHTS_NAME) for run in ("whole", "parts"))
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_what_cannot_be_trained_further_is_refused(settings: Settings, tmp_path: Path) -> None:
    train_nar(settings(max_steps=1), quiet)
    start = settings().out
    with pytest.raises(ValueError, match="draft_vocab, slots: a drafter that is trained further"):
        further(settings, start_from=start, slots=3, draft_vocab=None)
    with pytest.raises(SpecExtError, match=r"holds no config.json; expected the folder of a"):
        train_nar(further(settings, start_from=tmp_path / "nothing"), quiet)
    config = json.loads((start / CONFIG_NAME).read_text())
    for name, value in (("vocab_size", 47), ("num_target_layers", 9)):
        (start / CONFIG_NAME).write_text(json.dumps({**config, name: value}))
        with pytest.raises(SpecExtError, match=rf"has {name} {value}, and .* the target that"):
            train_nar(further(settings, start_from=start, out=tmp_path / "none"), quiet)


def test_uploads_the_finished_folder(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def push(*given: object) -> str:
        seen.append(given)
        return "address"

    monkeypatch.setattr(trainer, "push_to_hub", push)
    config = settings(max_steps=1, push_to_hub="user/drafter")
    lines: list[str] = []
    train_nar(config, lines.append)
    assert seen == [(config.out, "user/drafter")]
    assert lines[-1] == "uploaded: address"
    shutil.rmtree(config.out)


def test_slots_of_a_causal_block_see_those_before(settings: Settings) -> None:
    drafters = [task_of(settings(causal=causal)).drafter.eval() for causal in (False, True)]
    states, anchors = torch.randn(1, 6, 96), torch.tensor([[4]])
    for drafter in drafters:
        plain, last_changed = torch.tensor([[[5, 0, 0, 0]]]), torch.tensor([[[5, 0, 0, 9]]])
        embed = torch.nn.Embedding(48, 32)
        with torch.no_grad():
            before, after = (
                drafter(states, anchors, ids, embed)[0, 0] for ids in (plain, last_changed)
            )
        same = (before == after).all(-1).tolist()
        assert same == ([True, True, False] if drafter.config.causal else [False] * 3)
