# SPDX-License-Identifier: Apache-2.0
"""A block drafter that learns while it serves: samples, exchanges that keep the KV, refusals."""

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generation import run, sampling_params
from learning_engine import (
    ALL,
    UNTIL_LEARNED,
    Asked,
    Serve,
    Served,
    check_same_tokens_across_exchanges,
    learn,
    served_engines,
    write_files,
)
from safetensors.torch import load, save
from save_dflash import ALL_EXTRAS, save_dflash
from scenarios import PROMPTS, SCENARIOS, Scenario
from test_nar_engine import Record, predictions, records  # noqa: F401  (a fixture)
from tiny_engine import start_engine

from vllm_spec_ext.cli.main import main
from vllm_spec_ext.online.folder import FolderFacts, read_record
from vllm_spec_ext.online.nar_student import NarStudent
from vllm_spec_ext.online.versions import version_folder
from vllm_spec_ext.proposers.nar.layout import (
    CONFIG_NAME,
    EXTRAS_NAME,
    WEIGHTS_NAME,
    makes_context,
)
from vllm_spec_ext.proposers.nar.tree import best_chain

SLOTS = 4


@pytest.fixture(scope="module")
def drafter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With all extras but the rest of rejected drafts, which a student does not know."""
    folder = tmp_path_factory.mktemp("online_nar") / "drafter"
    nar = ALL_EXTRAS.model_copy(update={"reuse_tail": False})
    return Path(save_dflash(tiny_model, folder, seed=6, nar=nar, own_mask_embedding=True))


@pytest.fixture
def serve(drafter: Path, make_engine: Any, tmp_path: Path) -> Iterator[Serve]:
    """Engines whose block drafter learns; see :func:`served_engines`."""
    with served_engines(make_engine, tmp_path, makes_context) as start:

        def start_block(
            arguments: dict[str, Any] | None = None, tree: bool = False, **online: Any
        ) -> Served:
            size = {"num_speculative_tokens": 10, "tree": True} if tree else {}
            config = {"method": "nar", "model": str(drafter), "num_speculative_tokens": SLOTS}
            return start({**config, **size}, arguments, **online)

        yield start_block


@pytest.mark.parametrize(
    ("tree", "exchanged", "dtype"),
    [
        (False, False, "float32"),
        (True, False, "float32"),
        (False, True, "float32"),
        (False, True, "bfloat16"),
    ],
    ids=["chain", "tree", "exchanged", "exchanged_bfloat16"],
)
def test_the_student_drafts_as_the_engine_did(
    tree: bool,
    exchanged: bool,
    dtype: str,
    serve: Serve,
    tiny_model: Path,
    tmp_path: Path,
    records: list[Record],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the recorded text alone it has the probabilities that the engine's slots had, with the
    weights of the start or with all others that a version may have."""
    served = serve({"dtype": dtype}, tree=tree)
    version = version_folder(served.folder, 0)
    if exchanged:
        files, version = served.noise(2), tmp_path / "noise"
        write_files(version, files)
        served.drafter._proposer.use_weights(served.weights(files))
        monkeypatch.setattr(served.session, "begin_step", lambda: None)
    run(served.engine, SCENARIOS["mixed_lengths"])
    traces = served.traces()
    facts = read_record(served.folder, FolderFacts)
    assert facts is not None
    slots = 6 if tree else SLOTS
    assert facts.drafting == {"slots": slots, "candidates": 16, "copies": 1}
    assert all(one.states.shape == (len(one.starts), 0) for one in traces)
    known = predictions(records)
    student = NarStudent(facts.model_copy(update={"target": str(tiny_model)}), torch.device("cpu"))
    student.load(version)
    student.module.eval()
    errors: list[float] = []
    for one in traces:
        for start in one.starts.tolist()[::3]:
            text = one.token_ids[: start + 2]
            found = known.get(tuple(text.tolist()))
            if found is None or len(found.tokens) < slots:  # near the greatest length
                continue
            # As if the target had said what was drafted.
            places, paths = best_chain(found.log_probs)
            said = found.tokens[np.arange(slots), places]
            expected = np.diff(paths, prepend=0.0)
            rows = np.arange(start + 1, start + 1 + slots, dtype=np.int32)
            alone = replace(
                one,
                token_ids=np.concatenate([text, said]),
                rows=rows,
                top_tokens=said[:, None],
                top_probs=np.ones((slots, 1), np.float32),
                tails=np.zeros(slots, np.float32),
                starts=np.array([start], np.int32),
                chances=np.ones(1, np.float32),
                temperature=0.0,
            )
            with torch.no_grad():
                judged = student.judge(student.columns([alone]))
            weights = [sum(0.75 ** (m + 1) for m in range(slot, slots)) for slot in range(slots)]
            assert judged.num_drafted == slots
            mean = np.average(-expected, weights=weights)
            errors.append(float(judged.loss) - float(mean))
    assert len(errors) > 20
    if dtype == "float32":
        assert max(map(abs, errors)) < 5e-4
    else:
        # Rounding differs between processors and changes a part of the drafts, of the target and of
        # the drafter; noise is so large that these are others then. In the place of the exchanged
        # weights, those of the start err by 4 to 11.
        assert statistics.median(map(abs, errors)) < 1e-3


@pytest.mark.parametrize("is_crowded", [False, True], ids=["plenty", "preempted"])
def test_same_tokens_across_many_swaps(
    is_crowded: bool, serve: Serve, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One more than are laid out at a time.
    check_same_tokens_across_exchanges(serve, make_engine, is_crowded, monkeypatch, num_versions=4)


def test_kv_outlives_an_exchange(
    serve: Serve,
    records: list[Record],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Noise writes the context of a prompt and of half of an answer, in the place of the weights
    of the start; back with these, drafts are what they would have been, in the same request and in
    one that finds its prefix in the cache."""
    served = serve()
    session, proposer = served.session, served.drafter._proposer
    own, noise = served.weights(served.files()), served.weights(served.noise(1))
    long = Scenario([{"max_tokens": 40, "ignore_eos": True}], PROMPTS[2:4])
    served.engine.reset_prefix_cache()
    run(served.engine, long)
    alone = predictions(records)
    steps = 0
    begin = session.begin_step

    def swapped() -> None:
        nonlocal steps
        steps += 1
        begin()
        proposer.use_weights(noise if steps <= 8 else own)

    monkeypatch.setattr(session, "begin_step", swapped)
    served.engine.reset_prefix_cache()
    records.clear()
    run(served.engine, long)
    with_noise = list(records)
    records.clear()
    outputs = run(served.engine, long)
    assert sum(output.num_cached_tokens for output in outputs) >= 64
    again = predictions(records)
    assert again.keys() == alone.keys()
    for text, found in again.items():
        assert found.tokens.tolist() == alone[text].tokens.tolist()
        assert abs(found.log_probs - alone[text].log_probs).max() < 1e-4
    # It was noise indeed, and what came after it in the same requests was not.
    others = [
        abs(found.log_probs - alone[text].log_probs).max()
        for text, _, _, found in with_noise
        if found is not None and text in alone
    ]
    assert max(others[:8]) > 0.1
    assert max(others[-10:]) < 1e-4


def test_only_the_first_use_lays_layers_out(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three versions are kept: in use, on trial, and the start's."""
    served = serve()
    (model,) = served.drafter.models.paged
    loads: list[int] = []
    load_one = model._load

    def load_watched(given: Any) -> Any:
        loads.append(given.number)
        return load_one(given)

    monkeypatch.setattr(model, "_load", load_watched)
    weights = [served.weights(served.noise(number)) for number in (1, 2, 3)]
    use = served.drafter._proposer.use_weights
    for number in (0, 1, 0, 1, 0, 2, 0, 2):
        use(weights[number])
    assert loads == [weights[number].number for number in (0, 1, 2)]
    assert len(model._loaded) == 3


def changed(files: dict[str, bytes], file: str, name: str, how: Callable[[Any], Any]) -> Any:
    """These files with another tensor in one of them."""
    weights = load(files[file])
    return {**files, file: save({**weights, name: how(weights[name]).contiguous()})}


def test_versions_that_do_not_fit_are_refused(serve: Serve) -> None:
    """Another context side above all: its KV would not be what is in the cache."""
    served = serve()
    session, files = served.session, served.files()
    config = json.loads(files[CONFIG_NAME])
    keys = "layers.1.self_attn.k_proj.weight"
    asked: list[tuple[dict[str, bytes], str]] = [
        (changed(files, WEIGHTS_NAME, "fc.weight", lambda w: w * 1.001), "its fc.weight differs"),
        (changed(files, WEIGHTS_NAME, keys, lambda w: -w), f"its {keys} differs"),
        (
            changed(files, WEIGHTS_NAME, "layers.0.self_attn.k_norm.weight", lambda w: w + 1),
            "k_norm.weight differs",
        ),
        (changed(files, EXTRAS_NAME, "draft_vocab", lambda v: v.flip(0)), "draft_vocab differs"),
        (changed(files, WEIGHTS_NAME, "norm.weight", lambda w: w[:4]), "norm.weight has the shape"),
        (
            changed(files, WEIGHTS_NAME, "norm.weight", lambda w: w * float("nan")),
            "not finite",
        ),
        (
            {**files, CONFIG_NAME: json.dumps({**config, "rope_theta": 5e5}).encode()},
            "config.json has rope_theta",
        ),
        ({**files, WEIGHTS_NAME: b"noise"}, "no whole drafter"),
        ({name: files[name] for name in files if name != EXTRAS_NAME}, "no whole drafter"),
    ]
    for number, (given, _) in enumerate(asked, start=1):
        served.publish(number, given)
        served.until(lambda number=number: session.state.handled == number)  # type: ignore[misc]
    served.publish(len(asked) + 1, files, drafter="another")
    served.until(lambda: session.state.handled == len(asked) + 1)
    reasons = [verdict.reason for verdict in session.state.verdicts]
    for reason, expected in zip(
        reasons, [*(expected for _, expected in asked), "another drafter"], strict=True
    ):
        assert expected in reason
    run(served.engine, SCENARIOS["batch_of_one"])
    assert session.state.serving == 0
    assert session.state.trying is None


def test_what_is_learned_is_kept_and_noise_is_not(serve: Serve, make_engine: Any) -> None:
    """The whole loop: recorded, trained, published, tried, kept; and noise is refused and, where
    it serves, falls behind the weights of the start."""
    options = {"publish_steps": 120, "trial_steps": 60, "guard": 0.2, **UNTIL_LEARNED}
    served = serve(**options)
    session, asked = served.session, Asked(served.engine, make_engine)
    learn(served, asked, 120)
    (verdict,) = session.state.verdicts
    assert verdict.kept
    assert verdict.after > verdict.before + 0.2
    assert session.state.serving == 1
    served.publish(2, served.noise(2))
    served.until(lambda: session._ready is not None)
    asked.until(lambda: len(session.state.verdicts) > 1)
    assert [verdict.kept for verdict in session.state.verdicts] == [True, False]
    assert session.state.serving == 1
    noise = served.weights(served.noise(2))
    session._weights = {0: session._weights[1], 1: noise}
    session._trial.changed()
    session._using = -1
    asked.until(lambda: session.state.serving == 0)
    # A fresh proposer begins with the weights of the start, though the engine keeps the model.
    served.engine.collective_rpc("spec_ext_reset")
    (model,) = served.drafter.models.paged
    norm = load(served.files()[WEIGHTS_NAME])["norm.weight"]
    assert torch.equal(model.module.model.norm.weight, norm)
    asked.once()


def test_a_trainer_process_beside_a_bfloat16_target(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine starts it; what it publishes is tried, kept and shown; it ends with the engine."""
    options = {"publish_steps": 60, "trial_steps": 60, "budget": 8.0, **UNTIL_LEARNED}
    served = serve({"dtype": "bfloat16"}, start_trainer=True, **options)
    session = served.session
    trainer = session._trainer
    params = sampling_params({"max_tokens": 40})
    for _ in range(3):
        served.engine.generate(PROMPTS, params, use_tqdm=False)
    session.flush()
    served.until(lambda: session._ready is not None or trainer.poll() is not None, 240.0)
    assert trainer.poll() is None, (served.folder / "trainer.log").read_text()
    for _ in range(20):
        served.engine.generate(PROMPTS, params, use_tqdm=False)
        if session.state.verdicts:
            break
    verdict = session.state.verdicts[0]
    assert verdict.kept
    assert verdict.after > verdict.before + 0.2
    served.drafter.close()
    assert trainer.wait(timeout=240) == 0  # of the lowest priority, beside other tests
    with pytest.raises(SystemExit) as ended:
        main(["online", "status", str(served.folder)])
    assert not ended.value.code
    shown = capsys.readouterr().out
    for part in ("nar of", "kept", "standard errors"):
        assert part in shown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_neox_style": False}, "found is_neox_style False"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "found rope_type 'yarn'"),
        ({"is_causal": True}, "dflash_config.causal to say the same"),
        ({"embed_tokens": True}, "found a tensor embed_tokens.weight"),
    ],
)
def test_drafters_that_cannot_be_trained_are_refused(
    changes: dict[str, Any], message: str, tiny_model: Path, tmp_path: Path
) -> None:
    folder = Path(save_dflash(tiny_model, tmp_path / "drafter"))
    if changes.pop("embed_tokens", False):
        weights = load((folder / WEIGHTS_NAME).read_bytes())
        weights["embed_tokens.weight"] = torch.zeros(512, 128)
        (folder / WEIGHTS_NAME).write_bytes(save(weights))
    config = json.loads((folder / CONFIG_NAME).read_text())
    (folder / CONFIG_NAME).write_text(json.dumps({**config, **changes}))
    given = {"method": "nar", "model": str(folder), "num_speculative_tokens": 4}
    with pytest.raises(ValueError, match=message):
        start_engine(
            tiny_model,
            speculative_config={**given, "online": {"folder": str(tmp_path / "x"), **ALL}},
        )
