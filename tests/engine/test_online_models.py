# SPDX-License-Identifier: Apache-2.0
"""Draft models that learn while they serve: what is recorded, swaps under load, refusals."""

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generation import count_preempted, run, sampling_params, tokens
from save_drafts import save_draft
from scenarios import PROMPTS, SCENARIOS
from test_cache_view_engine import CROWDED
from test_greedy_identity import runner_of
from test_online_engine import ALL, UNTIL_LEARNED
from tiny_engine import start_engine

from vllm_spec_ext.online.folder import FolderFacts, read_record
from vllm_spec_ext.online.sample_files import SAMPLES, read_shard, shards
from vllm_spec_ext.online.session import _Ready
from vllm_spec_ext.online.trainer import run_trainer
from vllm_spec_ext.online.versions import version_folder, write_version
from vllm_spec_ext.proposers.growth.checkpoint_files import CONFIG_NAME, WEIGHTS_NAME
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


class Served:
    """An engine on a folder of its own."""

    def __init__(self, engine: Any, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.drafter = runner_of(engine).drafter

    @property
    def session(self) -> Any:
        return self.drafter.online

    @property
    def model(self) -> Any:
        (model,) = self.drafter.models.models
        return model

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for the thread of the session, which looks four times a second."""
        end = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < end
            time.sleep(0.05)

    def publish(self, number: int, files: dict[str, bytes], drafter: str | None = None) -> None:
        known = read_record(self.folder, FolderFacts)
        assert known is not None
        write_version(self.folder, number, files, drafter or known.drafter)

    def files(self) -> dict[str, bytes]:
        """Of version 0."""
        folder = version_folder(self.folder, 0)
        return {name: (folder / name).read_bytes() for name in (CONFIG_NAME, WEIGHTS_NAME)}


def loads(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """The weights that a model is given from now on."""
    seen: list[dict[str, torch.Tensor]] = []
    reload = model.reload

    def watched(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        seen.append(dict(weights))
        reload(seen[-1].items())

    monkeypatch.setattr(model, "reload", watched)
    return seen


Serve = Callable[..., Served]


def configured(method: str, draft: Path, folder: Path, **online: Any) -> dict[str, Any]:
    named = {"models": [str(draft)]} if method == "token_tree" else {"model": str(draft)}
    options = {"folder": str(folder), **ALL, **online}
    config = {"method": method, **named, **METHODS[method], "adaptive_length": False}
    return {**config, "online": options}


@pytest.fixture
def serve(draft: Path, make_engine: Any, tmp_path: Path) -> Iterator[Serve]:
    """Starts engines that learn; their sessions end with the test, the engines with the module."""
    made: list[Served] = []

    def start(method: str, arguments: dict[str, Any] | None = None, **online: Any) -> Served:
        folder = tmp_path / f"online{len(made)}"
        config = configured(method, draft, folder, **online)
        made.append(Served(make_engine(speculative_config=config, **(arguments or {})), folder))
        return made[-1]

    yield start
    for served in made:
        served.drafter.close()


@pytest.mark.parametrize("method", METHODS)
def test_what_is_recorded_is_the_targets(method: str, serve: Serve, tiny_model: Path) -> None:
    """All verified rows, without hidden states, which the draft model does not read."""
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    served = serve(method)
    run(served.engine, SCENARIOS["mixed_lengths"])
    served.drafter.close()
    traces = [one for path in shards(served.folder / SAMPLES) for one in read_shard(path)]
    assert sum(len(one.rows) for one in traces) > 100
    for one in traces:
        assert one.states.shape == (len(one.starts), 0)
        with torch.inference_mode():
            text = torch.tensor([one.token_ids.tolist()])
            probs = target(input_ids=text).logits[0].softmax(-1).numpy()[one.rows]
        found = np.take_along_axis(probs, one.top_tokens.astype(np.int64), axis=1)
        np.testing.assert_allclose(found, one.top_probs, atol=2e-4)
        np.testing.assert_allclose(one.top_probs.sum(1) + one.tails, 1.0, atol=1e-4)


@pytest.mark.parametrize("blocks", [None, 16], ids=["plenty", "preempted"])
def test_same_tokens_across_many_swaps(
    blocks: int | None, serve: Serve, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other weights in every step, while requests come, go and are preempted."""
    scenario = SCENARIOS["mixed_lengths"] if blocks is None else CROWDED
    expected = tokens(run(make_engine(), scenario))
    served = serve("small_model", {} if blocks is None else {"num_gpu_blocks_override": blocks})
    session, swaps, weights = served.session, 0, {}
    own = served.drafter._proposer.read_weights(version_folder(served.folder, 0))
    for number in (1, 2, 3):
        random = torch.Generator().manual_seed(number)
        weights[number] = {
            name: value + 0.3 * torch.randn(value.shape, generator=random)
            for name, value in own.items()
        }
    begin = session.begin_step

    def swapped() -> None:
        nonlocal swaps
        swaps += 1
        number = 1 + swaps % 3
        session._ready = _Ready(number, weights[number], "a test")
        begin()
        assert session._using == number

    monkeypatch.setattr(session, "begin_step", swapped)
    preempted = count_preempted(served.engine, monkeypatch)
    assert tokens(run(served.engine, scenario)) == expected
    assert swaps > 50
    assert bool(preempted) == (blocks is not None)


def test_versions_take_long_turns(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exchange makes the model forget its KV, so it is not done in every other step."""
    monkeypatch.setattr(OneModelLearns, "steps_a_turn", 5)
    served = serve("small_model", guard=0.0, trial_steps=100000)
    session, used = served.session, loads(served.model, monkeypatch)
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
    session = served.session
    params = sampling_params({"max_tokens": 40})

    def answers(engine: Any) -> list[list[list[int]]]:
        return tokens(engine.generate(PROMPTS, params, use_tqdm=False))

    expected = answers(make_engine())
    for _ in range(3):
        assert answers(served.engine) == expected
    session._writer.close()
    session._writer = None  # what comes later is not recorded
    session.tap = None
    run_trainer(served.folder, budget=8.0, max_steps=150)
    served.until(lambda: session._ready is not None)
    for _ in range(20):
        assert answers(served.engine) == expected
        if session.state.verdicts:
            break
    (verdict,) = session.state.verdicts
    assert verdict.kept
    assert verdict.after > 2 * verdict.before + 0.2
    assert session.state.serving == 1
    # A fresh proposer begins with the weights of the start, though the engine keeps the model.
    loaded = loads(served.model, monkeypatch)
    served.engine.collective_rpc("spec_ext_reset")
    assert served.session.state.serving == 0
    start = served.drafter._proposer.read_weights(version_folder(served.folder, 0))
    assert all(torch.equal(loaded[-1][name], start[name]) for name in start)
    assert answers(served.engine) == expected


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
