# SPDX-License-Identifier: Apache-2.0
"""Online distillation in the engine: what is recorded is the target's, swaps change no token."""

import errno
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from generation import run, sampling_params, tokens
from learning_engine import (
    UNTIL_LEARNED,
    Asked,
    Serve,
    Served,
    check_same_tokens_across_exchanges,
    learn,
    served_engines,
)
from scenarios import PROMPTS, SCENARIOS
from test_blockwise_engine import save_random_heads
from tiny_engine import start_engine

from vllm_spec_ext.engine.starting.online_checks import check_online, is_on_ray
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.online.folder import (
    SAMPLES,
    Control,
    EngineState,
    read_record,
    write_record,
)
from vllm_spec_ext.online.sample_files import shards
from vllm_spec_ext.online.versions import version_folder
from vllm_spec_ext.options import MethodOptions, OnlineOptions
from vllm_spec_ext.proposers.blockwise import Blockwise
from vllm_spec_ext.proposers.blockwise.heads import CONFIG_NAME, WEIGHTS_NAME

HEADS = 3


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """They draft three tokens; where requests may say only these, some drafts are accepted."""
    folder = tmp_path_factory.mktemp("heads") / "heads"
    return save_random_heads(folder, [40, 42, 44], copy_match=4)


@pytest.fixture
def serve(heads: Path, make_engine: Any, tmp_path: Path) -> Iterator[Serve]:
    """Engines whose heads learn; see :func:`served_engines`."""
    with served_engines(make_engine, tmp_path) as start:

        def start_heads(
            arguments: dict[str, Any] | None = None, heads: Path = heads, **online: Any
        ) -> Served:
            config = {"method": "blockwise", "model": str(heads), "num_speculative_tokens": HEADS}
            return start(config, arguments, **online)

        yield start_heads


def reference(tiny_model: Path, text: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and distributions of the target by transformers, [n, ...]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.inference_mode():
        ids = torch.tensor([text])
        states = model.base_model(input_ids=ids).last_hidden_state[0]
        return states, model(input_ids=ids).logits[0].softmax(-1)


def few_tokens(temperature: float = 0.0, **extra: Any) -> Any:
    given = {"max_tokens": 40, "allowed_token_ids": [40, 42, 44], "ignore_eos": True}
    return sampling_params({**given, "temperature": temperature}, extra or None)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_records_are_the_targets_own(tree: bool, tiny_model: Path, serve: Serve) -> None:
    """Rows, tails and states stand where they belong, whatever was accepted.

    Row t holds the distribution of token t + 1, of the model at temperature 1 whatever the request
    samples with; a start's state is that of its own position.
    """
    served = serve()
    if tree:
        options = served.drafter._proposer._options
        changes = {"tree": True, "candidates": 2}
        served.drafter._proposer._options = options.model_copy(update=changes)
    params = [few_tokens(temperature) for temperature in (0.0, 1.0, 0.3)]
    answers = served.engine.generate(PROMPTS[:3], params, use_tqdm=False)
    texts = [list(a.prompt_token_ids) + list(a.outputs[0].token_ids) for a in answers]
    traces = served.traces()
    assert len(traces) == 3
    failures: list[int] = []
    for trace in traces:
        text = trace.token_ids.tolist()
        assert any(text[: len(known)] == known for known in texts)
        states, probs = reference(tiny_model, text)
        best, ids = probs[torch.from_numpy(trace.rows).long()].topk(8, dim=-1)
        np.testing.assert_allclose(trace.top_probs, best.numpy(), atol=2e-4)
        assert (trace.top_tokens == ids.numpy()).mean() > 0.98  # equal ones may change places
        np.testing.assert_allclose(trace.tails, 1 - best.sum(-1).numpy(), atol=1e-3)
        own = states[torch.from_numpy(trace.starts).long()]
        assert (trace.states.float() - own).abs().max() < 0.02 * own.abs().max()
        assert trace.rows.tolist() == list(range(trace.rows[0], trace.rows[0] + len(trace.rows)))
        # A draft that failed at d had d - 1 tokens accepted; the next start is d further.
        steps = np.diff(trace.starts)
        failed = trace.failed_at[:-1]
        if not tree:
            assert steps.tolist() == [int(depth) or HEADS + 1 for depth in failed]
        failures += failed.tolist()
    assert {0, 1, 2} <= set(failures)  # some were accepted in full, whose bonus is no failure


def test_who_is_recorded(serve: Serve) -> None:
    """Only requests without a salt that do not mind; the operator may say otherwise."""
    asked = [
        ({"prompt": PROMPTS[0]}, few_tokens()),
        ({"prompt": PROMPTS[1], "cache_salt": "alice"}, few_tokens()),
        ({"prompt": PROMPTS[2]}, few_tokens(remember=False)),
        ({"prompt": PROMPTS[3], "cache_salt": "bob"}, few_tokens(remember=False)),
    ]
    found = {}
    for record in ("unsalted", "all"):
        served = serve(record=record)
        answers = served.engine.generate(
            [prompt for prompt, _ in asked], [params for _, params in asked], use_tqdm=False
        )
        prompts = [tuple(answer.prompt_token_ids) for answer in answers]
        found[record] = {
            place
            for trace in served.traces()
            for place, prompt in enumerate(prompts)
            if tuple(trace.token_ids[: len(prompt)].tolist()) == prompt
        }
    assert found == {"unsalted": {0}, "all": {0, 1}}


@pytest.mark.parametrize("is_crowded", [False, True], ids=["plenty", "preempted"])
def test_same_tokens_across_many_swaps(
    is_crowded: bool, serve: Serve, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_same_tokens_across_exchanges(serve, make_engine, is_crowded, monkeypatch)


def test_damaged_and_foreign_versions_are_refused(serve: Serve) -> None:
    served = serve()
    session = served.session
    served.publish(1, damaged=WEIGHTS_NAME)
    served.until(lambda: session.state.handled == 1)
    served.publish(2, drafter="another")
    served.until(lambda: session.state.handled == 2)
    files = served.noise(3)
    other_shape = json.dumps({**json.loads(files[CONFIG_NAME]), "copy_match": 2}).encode()
    served.publish(3, {**files, CONFIG_NAME: other_shape})
    served.until(lambda: session.state.handled == 3)
    reasons = [verdict.reason for verdict in session.state.verdicts]
    for reason, expected in zip(
        reasons, ("is damaged", "descends from another drafter", "does not match"), strict=True
    ):
        assert expected in reason
    run(served.engine, SCENARIOS["batch_of_one"])
    assert session.state.serving == 0
    assert session.state.trying is None
    assert served.drafter._proposer._heads is session._weights[0]
    served.publish(4)  # a sound one is still tried
    served.until(lambda: session._ready is not None)
    run(served.engine, SCENARIOS["batch_of_one"])
    assert session.state.trying == 4


def test_frozen_and_ordered(serve: Serve) -> None:
    served = serve()
    session = served.session
    write_record(served.folder, Control(serial=1, frozen=True))
    served.until(lambda: session.state.frozen)
    served.publish(1)
    time.sleep(0.6)  # two looks of the thread
    run(served.engine, SCENARIOS["batch_of_one"])
    assert session.state.handled == 0
    write_record(served.folder, Control(serial=2, frozen=True, serve=1))  # a person's order counts
    served.until(lambda: session._ready is not None)
    run(served.engine, SCENARIOS["batch_of_one"])
    assert session.state.serving == 1
    assert served.drafter._proposer._heads is session._weights[1]


def test_what_is_learned_is_kept_and_noise_is_not(
    serve: Serve, make_engine: Any, tmp_path: Path
) -> None:
    """The whole loop: recorded, trained, published, tried, kept; and noise is refused."""
    options = {"publish_steps": 300, "trial_steps": 100, "guard": 0.2, **UNTIL_LEARNED}
    heads = save_random_heads(tmp_path / "heads", copy_match=4)
    served = serve(heads=heads, **options)
    session, asked = served.session, Asked(served.engine, make_engine, PROMPTS * 2)
    learn(served, asked, 300)
    (verdict,) = session.state.verdicts
    assert verdict.kept
    assert verdict.after > verdict.before
    assert session.state.serving == 1
    served.publish(2)
    served.until(lambda: session._ready is not None)
    asked.until(lambda: len(session.state.verdicts) > 1)
    assert [v.kept for v in session.state.verdicts] == [True, False]
    assert session.state.serving == 1
    # Rolled back when it falls behind the weights of the start, as after a drift.
    noise = session._learner.read_weights(version_folder(served.folder, 2))
    session._weights = {0: session._weights[1], 1: noise}
    session._trial.changed()
    session._using = -1
    asked.until(lambda: session.state.serving == 0)
    # What the session knew is there for the next engine.
    served.drafter.close()
    state = read_record(served.folder, EngineState)
    assert state is not None
    assert state.serving == 0
    assert len(state.verdicts) == 3


def test_a_full_disk_costs_samples_and_nothing_else(
    serve: Serve, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(run(make_engine(), SCENARIOS["mixed_lengths"]))
    served = serve()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("vllm_spec_ext.atomic.os.replace", full)
    writer = served.session._writer
    assert tokens(run(served.engine, SCENARIOS["mixed_lengths"])) == expected
    writer.close()
    assert writer.num_lost > 50
    assert writer.pending_bytes == 0
    assert not shards(served.folder / SAMPLES)


def test_a_trainer_that_is_killed_costs_nothing(serve: Serve, make_engine: Any) -> None:
    expected = tokens(run(make_engine(), SCENARIOS["mixed_lengths"]))
    served = serve(start_trainer=True, budget=1.0)
    trainer = served.session._trainer
    assert tokens(run(served.engine, SCENARIOS["mixed_lengths"])) == expected
    trainer.kill()
    trainer.wait()
    assert tokens(run(served.engine, SCENARIOS["mixed_lengths"])) == expected


def test_reset_begins_with_the_first_weights(serve: Serve) -> None:
    served = serve()
    served.publish(1)
    write_record(served.folder, Control(serial=1, serve=1))
    served.until(lambda: served.session._ready is not None)
    run(served.engine, SCENARIOS["batch_of_one"])
    assert served.session.state.serving == 1
    served.engine.collective_rpc("spec_ext_reset")
    assert served.session.state.serving == 0
    assert served.session.state.handled == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "input_copy", "online": {"folder": "x"}}, "cannot learn while it serves"),
        ({"online": "x"}, "expected an object"),
        ({"online": {"folder": "x", "bugdet": 1}}, "budget"),
        ({"online": {"folder": "x", "loss": "l2"}}, "loss"),
        ({"online": {"folder": "x"}, "share_unsalted": False}, "nothing would be recorded"),
    ],
)
def test_bad_options_are_refused(
    config: dict[str, Any], message: str, heads: Path, tiny_model: Path
) -> None:
    given = dict(config)
    if "method" not in given:
        given |= {"method": "blockwise", "model": str(heads), "num_speculative_tokens": HEADS}
    with pytest.raises(ValueError, match=message):
        start_engine(tiny_model, speculative_config=given)


def test_a_relative_folder_is_refused_where_rays_workers_run() -> None:
    online, nothing = OnlineOptions(folder="learned"), MethodOptions()
    target: Any = None
    with pytest.raises(SpecExtError, match="folder 'learned', expected an absolute path"):
        check_online(online, "blockwise", Blockwise, nothing, True, target, on_ray=True)


def test_what_runs_on_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replicas and workers choose other executors than Ray's, too."""
    ids = SimpleNamespace(get_actor_id=lambda: None, get_task_id=lambda: "a task")
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: ids)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert is_on_ray("mp")
    ids.get_task_id = lambda: None  # a driver
    assert not is_on_ray("mp")
    ids.get_actor_id = lambda: "an actor"
    assert is_on_ray("mp")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    assert not is_on_ray("mp")
    assert is_on_ray("ray")
    monkeypatch.delitem(sys.modules, "ray")
    assert not is_on_ray("uni")


@pytest.mark.parametrize(
    ("method", "config", "message"),
    [
        ("blockwise", {"model_type": "qwen2_vl"}, "type 'qwen2_vl', expected one that transf"),
        ("nar", {"model_type": "qwen2_vl"}, "type 'qwen2_vl', expected one that transf"),
        ("blockwise", {"model_type": "gemma2", "final_logit_softcapping": 30.0}, "capping=30.0"),
    ],
)
def test_targets_that_no_trainer_could_read_are_refused(
    method: str, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Else all would be recorded, and nothing ever trained."""
    text = SimpleNamespace(**config)
    target: Any = SimpleNamespace(
        model="seer", hf_config=SimpleNamespace(**config, get_text_config=lambda: text)
    )
    online, nothing = OnlineOptions(folder=str(tmp_path)), MethodOptions()
    with pytest.raises(SpecExtError, match=f"target 'seer' .*{message}"):
        check_online(online, method, Blockwise, nothing, True, target, on_ray=False)


def test_a_folder_of_something_else_is_refused(
    heads: Path, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "report.txt").touch()
    config = {"method": "blockwise", "model": str(heads), "num_speculative_tokens": HEADS}
    with pytest.raises(ValueError, match=r"holds something else: found report\.txt"):
        start_engine(tiny_model, speculative_config={**config, "online": {"folder": str(tmp_path)}})
    assert [path.name for path in tmp_path.iterdir()] == ["report.txt"]


def test_a_folder_of_other_heads_is_refused(
    heads: Path, serve: Serve, tiny_model: Path, tmp_path: Path
) -> None:
    served = serve()
    other = save_random_heads(tmp_path / "other", [40, 42, 46], copy_match=4)
    config = {"method": "blockwise", "model": str(other), "num_speculative_tokens": HEADS}
    with pytest.raises(ValueError, match="belongs to another drafter"):
        start_engine(
            tiny_model,
            speculative_config={**config, "online": {"folder": str(served.folder)}},
        )
