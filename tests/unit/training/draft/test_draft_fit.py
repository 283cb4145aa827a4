# SPDX-License-Identifier: Apache-2.0
"""The closed-form fit of a draft's last layer."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch

from vllm_spec_ext.training.draft.cut import Cut, cut_model
from vllm_spec_ext.training.draft.draft_task import DraftModelTask
from vllm_spec_ext.training.draft.fit import FitBatch, fit_last_layer
from vllm_spec_ext.training.draft.schema import DraftTraining
from vllm_spec_ext.training.hidden import live_states
from vllm_spec_ext.training.shards import read_data
from vllm_spec_ext.training.target import Target, load_target


def texts(draft: Target, target: Target, seed: int, unimportant: int = 0) -> FitBatch:
    """Random texts; the last ones have no weight, and states that nothing could give."""
    ids = torch.randint(0, 320, (24, 16), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    rows = torch.arange(24).repeat_interleave(16)
    columns = torch.arange(16).repeat(24)
    with torch.no_grad():
        wanted = target.hidden(ids, mask)[rows, columns]
    weights = torch.ones(len(rows))
    if unimportant:
        weights[-unimportant:] = 0.0
        wanted[-unimportant:] = 100.0
    return FitBatch(ids, mask, rows, columns, wanted, weights)


def loaded(path: Path) -> Target:
    return load_target(str(path), torch.device("cpu"), torch.float32)


def test_a_lost_matrix_is_found_again(target: Path) -> None:
    """With all else as in the target, the solution is the target's own matrix, up to a length."""
    whole = loaded(target)
    spoiled = Target(copy.deepcopy(whole.model), "spoiled")
    back = spoiled.model.model.layers[-1].mlp.down_proj
    torch.nn.init.normal_(back.weight)
    batches = [texts(spoiled, whole, seed) for seed in range(8)]
    found = fit_last_layer(spoiled, batches, texts(spoiled, whole, 99))
    assert found is not None
    before, after = found
    assert before > 0.5
    # A norm forgets lengths and they vary from position to position, so the fit is not exact.
    assert after < 0.15 * before
    ids = texts(spoiled, whole, 100).token_ids
    with torch.no_grad():
        mine, theirs = (m.model(input_ids=ids).logits.argmax(-1) for m in (spoiled, whole))
    assert (mine == theirs).float().mean() > 0.75


def test_nothing_is_made_worse(target: Path) -> None:
    whole = loaded(target)
    same = Target(copy.deepcopy(whole.model), "same")
    found = fit_last_layer(same, [texts(same, whole, 0)], texts(same, whole, 1))
    assert found is not None
    assert found[0] < 1e-9
    name = "model.layers.3.mlp.down_proj.weight"
    assert torch.equal(same.model.state_dict()[name], whole.model.state_dict()[name])


def test_positions_without_weight_do_not_count(target: Path) -> None:
    whole = loaded(target)
    results = []
    for unimportant in (0, 100):
        draft = Target(cut_model(whole.model, Cut((0, 1))), "cut")
        batches = [texts(draft, whole, seed, unimportant) for seed in range(6)]
        found = fit_last_layer(draft, batches, texts(draft, whole, 99))
        assert found is not None
        assert found[1] < 0.9 * found[0]
        results.append(found[1])
    assert abs(results[0] - results[1]) < 0.05


def test_a_run_fits_before_its_first_step_only(settings: Callable[..., DraftTraining]) -> None:
    config = settings(layers=1)
    target = loaded(Path(config.model))
    data = read_data(config.data_folder)
    task = DraftModelTask(config, target, data, live_states(target))
    name = "model.layers.0.mlp.down_proj.weight"
    start = task.draft.model.state_dict()[name].clone()
    task.train_step(3)
    assert torch.equal(task.draft.model.state_dict()[name], start)
    before = task.measure().overlap
    task.train_step(0)
    assert not torch.equal(task.draft.model.state_dict()[name], start)
    assert task.measure().overlap > before
    plain = DraftModelTask(settings(layers=1, fit=0), target, data, live_states(target))
    plain.train_step(0)
    assert torch.equal(plain.draft.model.state_dict()[name], start)


def test_other_layouts_are_left_alone() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=32, n_layer=3, n_head=4)).eval()
    whole = Target(model, "gpt2")
    draft = Target(cut_model(model, Cut((0, 2))), "cut")
    batch = texts(draft, whole, 0)
    assert fit_last_layer(draft, [batch], batch) is None


def test_layers_that_norm_what_they_add_are_not_made_worse() -> None:
    """What is solved for is not what such a layer does, so the solution may be a bad one."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "num_attention_heads": 4}
    config = Gemma3TextConfig(
        vocab_size=320, num_hidden_layers=4, num_key_value_heads=2, pad_token_id=0, **sizes
    )
    whole = Target(Gemma3ForCausalLM(config).eval(), "gemma")
    draft = Target(cut_model(whole.model, Cut((0, 3))), "cut")
    apart = texts(draft, whole, 99)

    def error() -> float:
        with torch.no_grad():
            found = draft.hidden(apart.token_ids, apart.mask)[apart.rows, apart.columns]
        return float((found - apart.wanted).square().sum() / apart.wanted.square().sum())

    before = error()
    told = fit_last_layer(draft, [texts(draft, whole, seed) for seed in range(6)], apart)
    assert told is not None
    assert error() <= before * (1 + 1e-5)
    assert abs(told[0] - before) < 1e-4 * before
    assert abs(told[1] - error()) < 1e-4 * before
