# SPDX-License-Identifier: Apache-2.0
"""Draft models that learn while they serve: what is recorded, swaps under load, refusals."""

import itertools
import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generation import run
from learning_engine import (
    ALL,
    UNTIL_LEARNED,
    Asked,
    Serve,
    Served,
    check_same_tokens_across_exchanges,
    learn,
    served_engines,
)
from save_drafts import save_draft
from scenarios import SCENARIOS
from tiny_engine import start_engine

from vllm_spec_ext.online.versions import version_folder
from vllm_spec_ext.proposers.growth.checkpoint_files import WEIGHTS_NAME
from vllm_spec_ext.proposers.growth.learning_model import OneModelLearns

METHODS: dict[str, dict[str, Any]] = {
    "small_model": {"num_speculative_tokens": 3},
    "token_tree": {"num_speculative_tokens": 6},
}


@pytest.fixture(scope="module")
def draft(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of noise: the target accepts next to nothing of it."""
    folder = tmp_path_factory.mktemp("online_models") / "draft"
    return Path(save_draft(tiny_model, folder, num_hidden_layers=1))


def loads(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """The weights that its draft model is given from now on."""
    (model,) = served.drafter.models.models
    seen: list[dict[str, torch.Tensor]] = []
    reload = model.reload

    def watched(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        seen.append(dict(weights))
        reload(seen[-1].items())

    monkeypatch.setattr(model, "reload", watched)
    return seen


@pytest.fixture
def serve(draft: Path, make_engine: Any, tmp_path: Path) -> Iterator[Serve]:
    """Engines whose draft model learns; see :func:`served_engines`."""
    with served_engines(make_engine, tmp_path) as start:

        def start_draft(
            method: str, arguments: dict[str, Any] | None = None, **online: Any
        ) -> Served:
            named = {"models": [str(draft)]} if method == "token_tree" else {"model": str(draft)}
            return start({"method": method, **named, **METHODS[method]}, arguments, **online)

        yield start_draft


@pytest.mark.parametrize("method", METHODS)
def test_what_is_recorded_is_the_targets(method: str, serve: Serve, tiny_model: Path) -> None:
    """All verified rows, without hidden states, which the draft model does not read."""
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    served = serve(method)
    run(served.engine, SCENARIOS["mixed_lengths"])
    traces = served.traces()
    assert sum(len(one.rows) for one in traces) > 100
    for one in traces:
        assert one.states.shape == (len(one.starts), 0)
        with torch.inference_mode():
            text = torch.tensor([one.token_ids.tolist()])
            probs = target(input_ids=text).logits[0].softmax(-1).numpy()[one.rows]
        found = np.take_along_axis(probs, one.top_tokens.astype(np.int64), axis=1)
        np.testing.assert_allclose(found, one.top_probs, atol=2e-4)
        np.testing.assert_allclose(one.top_probs.sum(1) + one.tails, 1.0, atol=1e-4)


@pytest.mark.parametrize("is_crowded", [False, True], ids=["plenty", "preempted"])
def test_same_tokens_across_many_swaps(
    is_crowded: bool, serve: Serve, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_same_tokens_across_exchanges(
        partial(serve, "small_model"), make_engine, is_crowded, monkeypatch
    )


def test_float32_versions_of_a_bfloat16_model(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are rounded without a word; vLLM would warn of every weight in every turn."""
    from vllm.model_executor.models import utils

    served = serve("small_model", {"dtype": "bfloat16"})
    (model,) = served.drafter.models.models
    said: list[tuple[Any, ...]] = []
    monkeypatch.setattr(utils.logger, "warning", lambda *told: said.append(told))
    weights = served.weights(served.noise(1))
    assert weights["model.norm.weight"].dtype is torch.float32
    served.drafter._proposer.use_weights(weights)
    assert not said
    norm = model._runner.module.model.norm.weight
    assert torch.equal(norm, weights["model.norm.weight"].bfloat16())
    run(served.engine, SCENARIOS["batch_of_one"])


def test_versions_take_long_turns(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange makes the model forget its KV, so it is not done in every other step."""
    monkeypatch.setattr(OneModelLearns, "steps_a_turn", 5)
    served = serve("small_model", guard=0.0, trial_steps=100000)
    session, used = served.session, loads(served, monkeypatch)
    served.publish(1, served.files())
    served.until(lambda: session._ready is not None)
    roles: list[str] = []
    begin = session.begin_step

    def begun() -> None:
        begin()
        roles.append(session._role)

    monkeypatch.setattr(session, "begin_step", begun)
    for _ in range(2):
        run(served.engine, SCENARIOS["mixed_lengths"])
    changes = sum(a != b for a, b in itertools.pairwise(roles))
    assert {"serving", "trial"} <= set(roles)
    assert 0 < changes <= len(roles) / 5
    assert len(used) <= changes + 1


def test_damaged_and_foreign_versions_are_refused(serve: Serve) -> None:
    served = serve("small_model")
    session = served.session
    files = served.files()
    served.publish(1, files, drafter="another")
    served.until(lambda: session.state.handled == 1)
    served.publish(2, {**files, WEIGHTS_NAME: b"noise"})
    served.until(lambda: session.state.handled == 2)
    from safetensors.torch import load, save

    weights = load(files[WEIGHTS_NAME])
    served.publish(3, {**files, WEIGHTS_NAME: save({n: v[:1] for n, v in weights.items()})})
    served.until(lambda: session.state.handled == 3)
    not_finite = {name: value * float("nan") for name, value in weights.items()}
    served.publish(4, {**files, WEIGHTS_NAME: save(not_finite)})
    served.until(lambda: session.state.handled == 4)
    reasons = [verdict.reason for verdict in session.state.verdicts]
    for reason, expected in zip(
        reasons, ("another drafter", "is damaged", "do not match", "not finite"), strict=True
    ):
        assert expected in reason
    run(served.engine, SCENARIOS["batch_of_one"])
    assert session.state.serving == 0
    assert session.state.trying is None


def test_what_is_learned_is_kept(
    serve: Serve, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole loop: recorded, trained, published, tried and kept; the same tokens throughout."""
    monkeypatch.setattr(OneModelLearns, "steps_a_turn", 8)
    options = {"publish_steps": 150, "trial_steps": 60, **UNTIL_LEARNED}
    served = serve("small_model", **options)
    session, asked = served.session, Asked(served.engine, make_engine)
    learn(served, asked, 150)
    (verdict,) = session.state.verdicts
    assert verdict.kept
    assert verdict.after > 2 * verdict.before + 0.2
    assert session.state.serving == 1
    # A fresh proposer begins with the weights of the start, though the engine keeps the model.
    loaded = loads(served, monkeypatch)
    served.engine.collective_rpc("spec_ext_reset")
    assert served.session.state.serving == 0
    start = served.drafter._proposer.read_weights(version_folder(served.folder, 0))
    assert all(torch.equal(loaded[-1][name], start[name]) for name in start)
    asked.once()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "token_tree", "models": ["draft", "draft"]}, "has 2 draft models, expected"),
        ({"method": "small_model", "model": "draft", "quantization": "fp8"}, "quantization is"),
        ({"method": "small_model", "model": "eagle"}, "heads on a target's states"),
        ({"method": "small_model", "model": "packed"}, "are quantized"),
    ],
)
def test_what_cannot_learn_is_refused(
    config: dict[str, Any], message: str, draft: Path, tiny_model: Path, tmp_path: Path
) -> None:
    own = json.loads((draft / "config.json").read_text())
    for name, changes in (
        ("eagle", {"architectures": ["LlamaForCausalLMEagle3"]}),
        ("packed", {"quantization_config": {"quant_method": "fp8"}}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**own, **changes}))
    folders = {"draft": str(draft), "eagle": str(tmp_path / "eagle")}
    folders["packed"] = str(tmp_path / "packed")
    given = dict(config)
    if "model" in given:
        given["model"] = folders[given["model"]]
    else:
        given["models"] = [folders[name] for name in given["models"]]
    given |= {"num_speculative_tokens": 6, "online": {"folder": str(tmp_path / "x"), **ALL}}
    with pytest.raises(ValueError, match=message):
        start_engine(tiny_model, speculative_config=given)
