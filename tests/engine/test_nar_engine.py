# SPDX-License-Identifier: Apache-2.0
"""`nar` on a real engine: same text, drafts by definition, and those of vLLM's own dflash."""

import itertools
import json
from collections.abc import Callable, Hashable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from generation import count_preempted, run, sampling_params, tokens
from homogeneity import same_distribution_p_value
from nar_reference import DenseDrafter
from nar_soak import FEW_BLOCKS, soak
from safetensors.torch import load, save
from sampling_distributions import DIFFERENT, SAME, samples_of
from save_dflash import ALL_EXTRAS, random_drafter, save_dflash
from save_drafts import save_draft
from scenarios import PROMPTS, SCENARIOS, SEVERAL, Scenario
from test_bad_input import start
from test_greedy_identity import runner_of
from unreadable_files import make_unreadable

from vllm_spec_ext.engine.drafting.draft_budget import UNLIMITED
from vllm_spec_ext.engine.drafting.step_drafts import StepDrafts
from vllm_spec_ext.engine.models import host
from vllm_spec_ext.engine.models.dflash_loading import load_extras
from vllm_spec_ext.environment import STRICT
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.models import SlotCandidates, SlotHint
from vllm_spec_ext.proposers.nar import Nar, drawing
from vllm_spec_ext.proposers.nar.layout import EXTRAS_NAME, NarConfig

KINDS: dict[str, dict[str, Any]] = {
    "public": {},
    "same_norms": {"seed": 8, "k_norms": False},
    "mask": {
        "seed": 4,
        "k_norms": False,
        "own_mask_embedding": True,
        "target_layer_ids": (0, 2),
    },
    "wide": {"seed": 5, "num_attention_heads": 8, "num_hidden_layers": 1, "intermediate_size": 96},
    "extras": {"seed": 6, "nar": ALL_EXTRAS, "own_mask_embedding": True},
    "selector": {"seed": 7, "nar": NarConfig(selector_rank=8)},
}

METHODS: dict[str, dict[str, Any]] = {
    "chain": {"model": "public", "num_speculative_tokens": 4},
    "tree": {"model": "public", "tree": True, "num_speculative_tokens": 10},
    "all_chain": {"model": "extras", "num_speculative_tokens": 6},
    "all_tree": {"model": "extras", "tree": True, "num_speculative_tokens": 12, "candidates": 8},
}

NUM_SOAK_STEPS = 200

Record = tuple[tuple[int, ...], SlotHint | None, int, SlotCandidates | None]


@pytest.fixture(scope="module")
def drafters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("dflash")
    return {name: save_dflash(tiny_model, folder / name, **kind) for name, kind in KINDS.items()}


@pytest.fixture(scope="module")
def engines(make_engine: Any, drafters: dict[str, str]) -> Callable[..., Any]:
    def make(name: str, **changes: Any) -> Any:
        config = {"method": "nar", "adaptive_length": False, **METHODS[name]}
        more = changes.pop("engine", {})
        config |= {"model": drafters[config["model"]], **changes}
        return make_engine(speculative_config=config, **more)

    return make


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """All that block drafters predict."""
    from vllm_spec_ext.engine.models.block_model import BlockModel

    found: list[Record] = []
    predict = BlockModel.predict

    def watched(self: Any, requests: Any, rows: Any, num_slots: int, *rest: Any) -> Any:
        made = predict(self, requests, rows, num_slots, *rest)
        hints = rest[1] or [None] * len(rows)
        for row, hint, one in zip(rows, hints, made, strict=True):
            text = tuple(requests[row].token_ids.tolist())
            left = min(num_slots, self.facts.num_slots, self.max_model_len - len(text))
            found.append((text, hint, left, one))
        return made

    monkeypatch.setattr(BlockModel, "predict", watched)
    return found


ROUNDING = 1e-4
"""Of float32, which differs by processor (2.0e-5 was seen); what is wrong is off by 1e-2."""


def greatest_difference(dense: DenseDrafter, records: list[Record], step: int = 5) -> float:
    """Between the candidates' log-probabilities and those of a dense computation."""
    worst = 0.0
    for text, hint, num_slots, found in records[::step]:
        if found is None:
            assert len(text) == 160  # no position is left
            continue
        alone = dense.log_probs(text, num_slots, hint)
        own = torch.from_numpy(found.tokens).long()
        size = own.shape[1]
        alone = alone[: len(own)]
        best = alone.topk(size).values
        worst = max(worst, float((alone.gather(1, own) - best).abs().max()))
        if num_slots == len(own):  # else the dense one would have a shorter block
            given = torch.from_numpy(found.log_probs)
            differ = (dense.conditional(text, own, hint) - given).abs().max()
            worst = max(worst, float(differ))
    return worst


# All by a chain and by the tree that has everything.
CASES = [
    (name, scenario)
    for name in METHODS
    for scenario in (SCENARIOS if name in ("chain", "all_tree") else SEVERAL)
]


@pytest.mark.parametrize(("name", "scenario"), CASES)
def test_same_tokens(name: str, scenario: str, engines: Any, expected: dict[str, Any]) -> None:
    assert tokens(run(engines(name), SCENARIOS[scenario])) == expected[scenario]


@pytest.mark.parametrize("name", METHODS)
def test_drafts_by_definition(
    name: str,
    engines: Any,
    drafters: dict[str, str],
    tiny_model: Path,
    records: list[Record],
) -> None:
    """In mixed batches, beside chunked prefill, after prefix hits, near the greatest length."""
    engine = engines(name)
    for scenario in ("mixed_lengths", "prefix_reused", "max_model_len"):
        outputs = run(engine, SCENARIOS[scenario])
        if scenario == "prefix_reused":
            assert sum(out.num_cached_tokens for out in outputs) > 100
    dense = DenseDrafter(tiny_model, Path(drafters[METHODS[name]["model"]]))
    assert len(records) > 300
    assert greatest_difference(dense, records) < ROUNDING


def predictions(records: list[Record]) -> dict[tuple[int, ...], SlotCandidates]:
    return {text: found for text, *_, found in records if found is not None}


def test_a_prefix_hit_predicts_as_much_as_a_fresh_request(
    engines: Any, records: list[Record]
) -> None:
    """Another request, with other drafts behind the same beginning, wrote the context."""
    engine = engines("all_chain")
    engine.reset_prefix_cache()
    fresh = Scenario([{"max_tokens": 20}], [PROMPTS[2]])
    others = Scenario([{"max_tokens": 50, "ignore_eos": True}], [PROMPTS[3], PROMPTS[6]])
    run(engine, fresh)
    alone = predictions(records)
    engine.reset_prefix_cache()
    run(engine, others)
    records.clear()
    (output,) = run(engine, fresh)
    assert output.num_cached_tokens >= 32
    after = predictions(records)
    assert after.keys() == alone.keys()
    for text, found in after.items():
        assert found.tokens.tolist() == alone[text].tokens.tolist()
        assert abs(found.log_probs - alone[text].log_probs).max() < 1e-4


@pytest.mark.parametrize("name", ["chain", "all_tree"])
def test_preemption(
    name: str,
    engines: Any,
    plain: Any,
    drafters: dict[str, str],
    tiny_model: Path,
    records: list[Record],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cache too small for the batch: contexts are dropped and made again, or found again."""
    long = Scenario([{"max_tokens": 100, "ignore_eos": True}], PROMPTS)
    engine = engines(name, engine={"num_gpu_blocks_override": FEW_BLOCKS})
    preempted = count_preempted(engine, monkeypatch)
    assert tokens(run(engine, long)) == tokens(run(plain, long))
    assert preempted
    dense = DenseDrafter(tiny_model, Path(drafters[METHODS[name]["model"]]))
    assert all(found is not None for text, _, slots, found in records if slots > 0)
    assert greatest_difference(dense, records, step=9) < ROUNDING


@pytest.fixture
def resting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every second step that is read drafts, and up to three in a row go by; their lengths."""
    seen: list[int] = [0]
    turns = itertools.count()
    within = StepDrafts._within_budget

    def rests(self: Any, step: Any, new_tokens: list[list[int]]) -> bool:
        unread = self._unread
        if seen[-1] == 3 or step.started is None or any(step.drafts):
            seen.append(0)
            return False
        if not unread.can_take(step.request_ids, new_tokens):
            seen.append(0)
            return False
        self._leave_unread(new_tokens)
        seen[-1] += 1
        return True

    def every_second(self: Any, requests: list[Any]) -> Any:
        if next(turns) % 2:
            for request in requests:
                request.room = 0
        return within(self, requests)

    monkeypatch.setattr(StepDrafts, "_rests", rests)
    monkeypatch.setattr(StepDrafts, "_within_budget", every_second)
    return seen


@pytest.mark.parametrize("name", ["chain", "all_tree"])
def test_states_of_steps_that_went_by_are_read_later(
    name: str,
    engines: Any,
    plain: Any,
    expected: dict[str, Any],
    drafters: dict[str, str],
    tiny_model: Path,
    records: list[Record],
    resting: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In batches that change, after prefix hits, and with requests that are preempted."""
    engine = engines(name)
    for scenario in ("mixed_lengths", "prefix_reused", "seeded"):
        assert tokens(run(engine, SCENARIOS[scenario])) == expected[scenario]
    long = Scenario([{"max_tokens": 100, "ignore_eos": True}], PROMPTS)
    small = engines(name, engine={"num_gpu_blocks_override": FEW_BLOCKS})
    preempted = count_preempted(small, monkeypatch)
    assert tokens(run(small, long)) == tokens(run(plain, long))
    assert preempted
    assert resting.count(3) > 20
    assert len(records) > 100
    dense = DenseDrafter(tiny_model, Path(drafters[METHODS[name]["model"]]))
    assert greatest_difference(dense, records, step=3) < ROUNDING
    assert all(found is not None for text, _, slots, found in records if slots > 0)


def test_a_second_turn_finds_what_the_first_one_did_not_read(
    engines: Any, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps of the first one go by; it is read when its request leaves."""

    def rests(self: Any, step: Any, new_tokens: list[list[int]]) -> bool:
        if step.started is None or not self._unread.can_take(step.request_ids, new_tokens):
            return False
        self._leave_unread(new_tokens)
        return True

    def no_room(self: Any, requests: list[Any]) -> Any:
        for request in requests:
            request.room = 0
        return UNLIMITED

    engine = engines("chain")
    engine.reset_prefix_cache()
    with monkeypatch.context() as patch:
        patch.setattr(StepDrafts, "_rests", rests)
        patch.setattr(StepDrafts, "_within_budget", no_room)
        (first,) = run(engine, Scenario([{"max_tokens": 60, "ignore_eos": True}], [PROMPTS[2]]))
    said = [*first.prompt_token_ids, *first.outputs[0].token_ids]
    records.clear()
    (second,) = run(engine, Scenario([{"max_tokens": 8}], [{"prompt_token_ids": said}]))
    assert second.num_cached_tokens > len(first.prompt_token_ids) + 20
    assert len(records) > 1
    assert all(found is not None for *_, found in records)


def test_models_that_read_every_step_do_not_rest(
    engines: Any, make_engine: Any, tiny_model: Path
) -> None:
    model = {"method": "small_model", "model": str(tiny_model), "num_speculative_tokens": 3}
    for engine, rests in (
        (engines("chain", adaptive_length=True), True),
        (make_engine(speculative_config=model), False),
    ):
        budget = runner_of(engine).step_drafts.budget
        assert (budget._resting is not None) == rests


def test_states_of_other_rows_are_found_out(
    engines: Any,
    drafters: dict[str, str],
    tiny_model: Path,
    records: list[Record],
    resting: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    join = host.with_unread

    def swapped(rows: Any, places: dict[str, int], *sizes: int) -> Any:
        return join(rows, dict(zip(places, [*places.values()][::-1], strict=True)), *sizes)

    monkeypatch.setattr(host, "with_unread", swapped)
    engine = engines("chain")
    engine.reset_prefix_cache()
    run(engine, SCENARIOS["mixed_lengths"])
    dense = DenseDrafter(tiny_model, Path(drafters["public"]))
    assert greatest_difference(dense, records, step=3) > 1e-2


def test_nothing_is_left_of_requests_that_end(engines: Any) -> None:
    engine = engines("all_chain")
    core = engine.llm_engine
    params = sampling_params({"max_tokens": 60, "ignore_eos": True})
    for i, prompt in enumerate(PROMPTS):
        core.add_request(f"nar-{i}", prompt, params)
    steps = 0
    while core.has_unfinished_requests():
        core.step()
        steps += 1
        if steps == 6:
            core.abort_request(["nar-4", "nar-7"])
    drafter = runner_of(engine).drafter
    (model,) = drafter.models.block_models
    run(engine, Scenario([{"max_tokens": 2}], PROMPTS[:1]))  # vLLM tells of ends in the next step
    run(engine, Scenario([{"max_tokens": 2}], PROMPTS[:1]))
    assert len(model._known) <= 1
    assert len(drafter._proposer._hints) <= 1
    assert not model._rows


@pytest.mark.parametrize("name", ["all_chain", "all_tree"])
def test_nothing_grows_while_requests_come_and_go(name: str, engines: Any) -> None:
    """They end, are aborted and preempted; ``nar_soak.py`` does it for 100,000 steps."""
    report = soak(engines(name, engine={"num_gpu_blocks_override": FEW_BLOCKS}), NUM_SOAK_STEPS)
    assert min(report.finished, report.aborted, report.preempted) >= NUM_SOAK_STEPS / 50
    assert report.passes > 0.8 * NUM_SOAK_STEPS
    assert 4 < report.most_known <= 8
    assert any("BlockModel" in holder for holder in report.while_running)  # they can be found
    assert (report.overdue, report.left) == (0, [])


def test_the_context_is_written_even_if_nothing_is_drafted(
    engines: Any, records: list[Record]
) -> None:
    """The target's states are gone with their step."""
    engine = engines("chain")
    run(engine, Scenario([{"max_tokens": 1}], PROMPTS[:1]))  # requests of other tests leave now
    engine.reset_prefix_cache()
    (model,) = runner_of(engine).drafter.models.block_models
    before, forwards = model.counts.rows, model.counts.forwards
    (output,) = run(engine, Scenario([{"max_tokens": 1}], ["no draft follows a single token"]))
    assert model.counts.rows == before + len(output.prompt_token_ids)
    assert model.counts.forwards == forwards


@pytest.mark.parametrize("always", [True, False])
def test_a_context_that_cannot_be_written_costs_its_drafts_and_nothing_else(
    always: bool,
    engines: Any,
    expected: dict[str, Any],
    records: list[Record],
    resting: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whenever it fails: while something drafts, when it ends, or when blocks change hands."""
    monkeypatch.delenv(STRICT)
    engine = engines("chain")
    engine.reset_prefix_cache()
    module = runner_of(engine).drafter.models.paged[0].module
    write, turns, failed = module.precompute_and_store_context_kv, itertools.count(), []

    def fails(*arguments: Any) -> None:
        if always or next(turns) % 2:
            failed.append("of memory")
            raise RuntimeError("out of memory")
        write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, "precompute_and_store_context_kv", fails)
        assert tokens(run(engine, SCENARIOS["mixed_lengths"])) == expected["mixed_lengths"]
    assert len(failed) > 1
    assert not always or all(found is None for *_, found in records)
    run(engine, Scenario([{"max_tokens": 1}], PROMPTS[:1]))  # the requests of before leave now
    engine.reset_prefix_cache()
    records.clear()
    assert tokens(run(engine, SCENARIOS["mixed_lengths"])) == expected["mixed_lengths"]
    assert all(found is not None for _, _, slots, found in records if slots > 0)


@pytest.mark.parametrize("name", ["all_chain", "all_tree"])
def test_copies_can_be_switched_off(
    name: str, engines: Any, expected: dict[str, Any], records: list[Record]
) -> None:
    assert tokens(run(engines(name), SCENARIOS["mixed_lengths"])) == expected["mixed_lengths"]
    kinds = {0 if hint is None else hint.kind for _, hint, *_ in records}
    assert {0, 1, 9} <= kinds  # nothing, copies, the rest of a draft
    records.clear()
    engine = engines(name, copies=False)
    assert tokens(run(engine, SCENARIOS["mixed_lengths"])) == expected["mixed_lengths"]
    assert all(hint is None for _, hint, *_ in records)


# Few outcomes, all of them likely; drafts are made of the same tokens, so that they hit these.
DRAWN = {"temperature": 0.9, "allowed_token_ids": [40, 42, 44], "ignore_eos": True}
SAMPLED: dict[str, dict[str, Any]] = {
    "chosen": {"num_speculative_tokens": 3},
    "tree": {"tree": True, "num_speculative_tokens": 8},
    "drawn": {"draw": True, "num_speculative_tokens": 3},
}


def test_as_the_drafter_of_auto(
    make_engine: Any, drafters: dict[str, str], expected: dict[str, Any], records: list[Record]
) -> None:
    drafter = {"method": "nar", "model": drafters["extras"]}
    config = {"method": "auto", "drafter": drafter, "num_speculative_tokens": 12}
    engine = make_engine(speculative_config={**config, "adaptive_length": False})
    for name in ("mixed_lengths", "seeded"):
        assert tokens(run(engine, SCENARIOS[name])) == expected[name]
    assert len(records) > 50


@pytest.fixture(scope="module")
def sample(
    make_engine: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[Hashable]]:
    """Samples of the first tokens by an engine that drafts so, or "plain"."""
    few = NarConfig(selector_rank=4, copy_match=2, draft_vocab_size=3)
    drafter = random_drafter(tiny_model, 5, nar=few)
    drafter.extras.draft_vocab = torch.tensor([40, 42, 44], dtype=torch.int32)
    drafter.norm.weight.mul_(0.05)  # a flatter distribution
    folder = tmp_path_factory.mktemp("few") / "drafter"
    drafter.save(folder)

    def draw(name: str) -> list[Hashable]:
        own = {"method": "nar", "model": str(folder), "adaptive_length": False}
        return samples_of(make_engine, DRAWN, None if name == "plain" else own | SAMPLED[name])

    return draw


@pytest.fixture(scope="module")
def plain_sample(sample: Any) -> list[Hashable]:
    return sample("plain")


@pytest.mark.parametrize("name", SAMPLED)
def test_samples_keep_the_targets_distribution(
    name: str, sample: Any, plain_sample: list[Hashable], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = []
    observe = Nar.observe

    def watched(self: Nar, given: Any) -> None:
        outcomes.extend(given)
        observe(self, given)

    monkeypatch.setattr(Nar, "observe", watched)
    found = sample(name)
    accepted = sum(outcome.num_accepted for outcome in outcomes)
    drafted = sum(outcome.num_drafted for outcome in outcomes)
    assert 1000 <= accepted < 0.9 * drafted
    assert same_distribution_p_value(plain_sample, found) > SAME


def test_draws_with_another_distribution_are_found_out(
    sample: Any, plain_sample: list[Hashable], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: the likeliest token with the probabilities of a draw."""
    monkeypatch.setattr(
        drawing, "draw", lambda probs, numbers: probs.argmax(-1, keepdim=True).int().numpy()
    )
    assert same_distribution_p_value(plain_sample, sample("drawn")) < DIFFERENT


def test_gad_plus_plus(engines: Any, plain: Any) -> None:
    """The rule of GAD++ takes what is nearly as likely: fewer steps, and another text."""
    rule = {"type": "tolerance", "beta": 5, "tau": 3.0}
    lossy = engines("all_tree", scorer=rule, allow_lossy=True)
    long = Scenario([{"max_tokens": 60, "ignore_eos": True}], PROMPTS)
    outputs, exact = tokens(run(lossy, long)), tokens(run(plain, long))
    assert [len(out[0]) for out in outputs] == [len(out[0]) for out in exact]
    assert outputs != exact


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"target_hidden_size": 64}, "states of size 64, expected the target's 128"),
    "layers": ({"target_layer_ids": (0, 2, 30)}, r"target_layer_ids=\[0, 2, 30\].* 0 to 2"),
    "same_layers": ({"target_layer_ids": (0, 2, 2)}, "different ones that ascend"),
    "no_layers": ({"target_layer_ids": ()}, "found no dflash_config.target_layer_ids"),
    "depth": ({"num_target_layers": 36}, "found num_target_layers=36, expected the target's 3"),
    "vocabulary": ({"vocab_size": 600}, "vocabulary of 600 tokens, expected the target's 512"),
    "mask": ({"mask_token_id": 512}, "found mask_token_id=512, expected the id"),
    "block": ({"block_size": 1}, "found block_size=1, expected 2 or more"),
    "tokenizer": (
        {"nar": NarConfig(tokenizer_fingerprint="sha256:0")},
        "trained with another tokenizer",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_checkpoints_that_cannot_work(name: str, tiny_model: Path, tmp_path: Path) -> None:
    changes, words = BAD[name]
    folder = save_dflash(tiny_model, tmp_path / "drafter", **changes)
    with pytest.raises(SpecExtError, match=words):
        start(tiny_model, {"method": "nar", "model": folder})


def edit(folder: str, **changes: Any) -> None:
    """Other values in config.json; None takes a key away."""
    file = Path(folder) / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_extras_that_are_damaged(tiny_model: Path, tmp_path: Path) -> None:
    folder = save_dflash(tiny_model, tmp_path / "extras", nar=ALL_EXTRAS)

    def refused(words: str) -> None:
        with pytest.raises(SpecExtError, match=words):
            start(tiny_model, {"method": "nar", "model": folder})

    file = Path(folder) / EXTRAS_NAME
    whole = file.read_bytes()
    for ids, words in ((512, "holds token ids outside"), (0, "names a token more than once")):
        changed = load(whole)
        changed["draft_vocab"][:2] = ids
        file.write_bytes(save(changed))
        refused(f"extras.safetensors: draft_vocab {words}")
    file.write_bytes(whole[:-10])
    refused(r"extras.safetensors is damaged \(")
    make_unreadable(file)
    refused("extras.safetensors cannot be read: Input/output error; expected a file that")
    file.unlink()
    changed = load(whole)
    changed["copy_gate"][0, 0] = float("nan")
    file.write_bytes(save(changed))
    with pytest.raises(SpecExtError, match="copy_gate holds values that are not finite"):
        load_extras(
            cast(Any, SimpleNamespace(nar=ALL_EXTRAS, block_size=7, hidden_size=128)), folder
        )


def test_files_that_are_missing_or_damaged(tiny_model: Path, tmp_path: Path) -> None:
    def refused(words: str, folder: str, method: str = "nar", **options: Any) -> None:
        with pytest.raises(SpecExtError, match=words):
            start(tiny_model, {"method": method, "model": folder}, **options)

    refused("no such folder", str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    refused(r"no config.json in", str(tmp_path / "empty"))

    def saved(name: str, **changes: Any) -> str:
        return save_dflash(tiny_model, tmp_path / name, **changes)

    folder = saved("weights")
    (Path(folder) / "model.safetensors").unlink()
    refused("found no weights", folder)
    folder = saved("extras", nar=ALL_EXTRAS)
    edit(folder, nar={"slot_queries": True, "copy_match": 4})
    refused(r"extras.safetensors: found copy_gate of shape \(10, 6\), expected \(6, 6\)", folder)
    edit(folder, nar={"copy_match": -4})
    refused("nar.copy_match: .*found -4", folder)
    given = ALL_EXTRAS.model_dump()
    edit(folder, nar={**given, "heads": {**given["heads"], "vocab_size": 99}})
    refused(r"found heads for a hidden size and a vocabulary of \(128, 99\)", folder)
    edit(folder, nar={**given, "heads": {**given["heads"], "num_heads": 8}})
    refused("found 8 heads, expected at most one for each of the 6 slots", folder)
    edit(folder, nar=given)
    (Path(folder) / "nar/extras.safetensors").unlink()
    refused("found no nar/extras.safetensors", folder)
    own = {"mask_token_id": 1, "target_layer_ids": [0]}
    folder = saved("window")
    edit(folder, dflash_config={**own, "use_swa": True})
    refused("found layers with sliding windows", folder)
    kinds = ["sliding_attention", "full_attention"]
    edit(folder, dflash_config={**own, "swa_window_size": 16}, layer_types=kinds)
    refused("^((?!disable-sliding).)*found layers with sliding windows", folder)
    refused("found layers with sliding windows", folder, disable_sliding_window=True)
    folder = saved("anchor")
    given = {"mask_token_id": 1, "target_layer_ids": [0], "sample_from_anchor": True}
    edit(folder, dflash_config=given)
    refused("found sample_from_anchor, expected rows of masks alone", folder)
    folder = saved("descendant")
    for name in ("Qwen3DSparkModel", "DFlash2DraftModel", "DFlashLagunaForCausalLM"):
        edit(folder, architectures=[name])
        for method in ("nar", "small_model"):
            refused(f"found {name}, a descendant of DFlash .* in a way of its", folder, method)
    folder = saved("fc", target_layer_ids=(0, 1))
    edit(folder, dflash_config={"mask_token_id": 1, "target_layer_ids": [0, 1, 2]})
    refused(r"found fc.weight of shape \[128, 256\], expected \[128, 384\]", folder)
    folder = saved("heads", num_attention_heads=1, num_key_value_heads=1)
    refused(
        "found 1 attention heads, expected a multiple of tensor_parallel_size=2",
        folder,
        tensor_parallel_size=2,
    )
    folder = saved("elsewhere")
    refused('found a DFlash drafter.*use the method "nar"', folder, "small_model")
    model = save_draft(tiny_model, tmp_path / "model", num_hidden_layers=1)
    refused("found architecture LlamaForCausalLM, expected a drafter of blocks", model)


def test_the_block_of_a_checkpoint_in_the_layout_of_speculators(
    tiny_model: Path, tmp_path: Path
) -> None:
    """vLLM's reader of that layout leaves its size out."""
    from vllm.engine.arg_utils import EngineArgs

    folder = save_dflash(tiny_model, tmp_path / "drafter", block_size=5)
    file = Path(folder) / "config.json"
    own = json.loads(file.read_text())
    dflash = own.pop("dflash_config")
    outside = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": str(tiny_model), "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": own,
        "block_size": own.pop("block_size"),
        "mask_token_id": dflash["mask_token_id"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in dflash["target_layer_ids"]],
        "draft_vocab_size": own["vocab_size"],
    }
    file.write_text(json.dumps(outside))
    config = EngineArgs(
        model=str(tiny_model),
        speculative_config={"method": "nar", "model": folder},
        max_model_len=128,
    ).create_engine_config()
    spec: Any = config.speculative_config
    (draft,) = spec.draft_models
    assert draft.dflash.block_size == 5
    assert draft.dflash.layers == tuple(outside["aux_hidden_state_layer_ids"])


# All but the prompt that comes near the greatest length: while one request does, vLLM 0.32 drafts
# for none, and its drafter never gets the context of these steps.
SHORT = Scenario([{"max_tokens": n} for n in (12, 60, 33, 9, 2, 47, 75)], PROMPTS[:4] + PROMPTS[5:])


@pytest.fixture
def vllms(make_engine: Any, drafters: dict[str, str], plain: Any) -> Any:
    """Drafts of vLLM's own method ``dflash``, by the text before them."""

    def drafts(kind: str) -> dict[tuple[int, ...], list[int]]:
        config = {"method": "dflash", "model": drafters[kind], "num_speculative_tokens": 4}
        engine = make_engine(speculative_config=config, async_scheduling=False)
        runner, found = runner_of(engine), {}
        propose = runner.propose_draft_token_ids

        def record(output: Any, sampled: Any, *rest: Any) -> Any:
            made = propose(output, sampled, *rest)
            for row, new in enumerate(sampled.tolist()):
                length = int(runner.input_batch.num_tokens_no_spec[row])
                text = runner.input_batch.token_ids_cpu[row, :length].tolist()
                text += [token for token in new if token >= 0]  # not noted there yet
                found[tuple(text)] = made[row].tolist()
            return made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "propose_draft_token_ids", record)
            for _ in range(2):  # the second time with prefix hits
                assert tokens(run(engine, SHORT)) == tokens(run(plain, SHORT))
        return found

    return drafts


@pytest.mark.parametrize("kind", ["same_norms", "mask", "wide"])
def test_same_drafts_as_vllm(
    kind: str, vllms: Any, engines: Any, drafters: dict[str, str], records: list[Record]
) -> None:
    """Token by token, in mixed batches, beside chunked prefill, after prefix hits.

    On CPUs vLLM 0.32 gives the context's keys of all layers the norm of the first one, so layers
    here have the same one, or there is one layer.
    """
    theirs = vllms(kind)
    engine = engines("chain", model=drafters[kind])
    run(engine, SHORT)
    assert sum(out.num_cached_tokens for out in run(engine, SHORT)) > 100
    pairs = [
        (found.tokens[:, 0].tolist(), theirs[text])
        for text, _, _, found in records
        if found is not None and text in theirs
    ]
    assert len(pairs) > 200
    differ = [pair for pair in pairs if pair[0] != pair[1][: len(pair[0])]]
    assert not differ, (len(differ), len(pairs), differ)
    assert len({token for ours, _ in pairs for token in ours}) > 20  # no constant


def test_extras_do_not_keep_vllm_from_running_a_checkpoint(vllms: Any) -> None:
    assert len(vllms("extras")) > 100
