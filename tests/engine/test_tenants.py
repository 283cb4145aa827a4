# SPDX-License-Identifier: Apache-2.0
"""What one user was answered is drafted for no other: from the ``cache_salt`` to the draft."""

from pathlib import Path
from typing import Any

import pytest
from generation import sampling_params

from vllm_spec_ext.engine.requests.options import GROUP_KEY, share_group
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.proposers.candidates import calibration, path_trust

PROMPT = "The quick brown fox jumps over the lazy dog, and the dog"
COPY = {"method": "input_copy", "num_speculative_tokens": 16, "adaptive_length": False}
NGRAM = {"method": "adaptive_ngram", "overlay": "both", "adaptive_length": False}
AUTO = {"method": "auto", "num_speculative_tokens": 16, "adaptive_length": False}


def answer(engine: Any, salt: str | None = None, **extra: Any) -> list[list[int]]:
    """The drafts that were judged while one prompt was answered, step by step."""
    prompt: dict[str, Any] = {"prompt": PROMPT}
    if salt is not None:
        prompt["cache_salt"] = salt
    params = sampling_params({"max_tokens": 40, "ignore_eos": True})
    params.extra_args = extra or None
    engine.collective_rpc("spec_ext_record", args=(True,))
    engine.generate(prompt, params, use_tqdm=False)
    assert params.extra_args == (extra or None), "the caller's object stays as it was"
    return [step["tokens"] for step in engine.collective_rpc("spec_ext_recorded")[0]]


def fresh(engine: Any, salt: str | None = None, **extra: Any) -> list[list[int]]:
    engine.collective_rpc("spec_ext_reset")
    return answer(engine, salt, **extra)


@pytest.mark.parametrize("method", [COPY, NGRAM, AUTO], ids=lambda m: str(m["method"]))
def test_a_salt_separates_and_a_common_salt_helps(
    method: dict[str, Any], make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How much the sources of `auto` are worth is learned from all; it is no text of anybody's.
    monkeypatch.setattr(calibration, "_RATE", 0.0)
    monkeypatch.setattr(calibration, "_HOPE", 0.0)
    monkeypatch.setattr(path_trust, "_RATE", 0.0)
    engine = make_engine(speculative_config=method)
    alone = fresh(engine, "alice")
    assert answer(engine, "bob") == alone
    assert answer(engine) == alone, "without a salt, but not of alice's or bob's group"
    forged = {GROUP_KEY: share_group("alice", share_unsalted=True)}
    assert answer(engine, "mallory", **forged) == alone
    helped = answer(engine, "alice")
    assert helped != alone
    assert len(helped) <= len(alone)
    # Offline, requests without a salt share.
    fresh(engine)
    assert answer(engine) == helped
    unsalted = {GROUP_KEY: share_group(None, share_unsalted=True)}
    assert answer(engine, "mallory", **unsalted) == alone


def test_requests_without_a_salt_share_nothing_where_they_should_not(make_engine: Any) -> None:
    engine = make_engine(speculative_config={**COPY, "share_unsalted": False})
    alone = fresh(engine)
    assert answer(engine) == alone
    unsalted = {GROUP_KEY: share_group(None, share_unsalted=True)}
    assert answer(engine, None, **unsalted) == alone
    assert answer(engine, "alice") == alone
    assert len(answer(engine, "alice")) < len(alone)


def test_a_request_keeps_its_answer_out(make_engine: Any) -> None:
    engine = make_engine(speculative_config=COPY)
    alone = fresh(engine, "alice", spec_ext={"remember": False})
    assert answer(engine, "alice") == alone
    assert answer(engine, "alice") != alone


def test_the_salt_is_no_secret_in_the_logs() -> None:
    group = share_group("salt of alice", share_unsalted=False)
    assert group is not None
    assert "alice" not in group
    assert group != share_group("salt of bob", share_unsalted=False)
    assert share_group("", share_unsalted=False) is None


@pytest.mark.parametrize(
    ("server", "asked", "shares"),
    [
        (False, None, True),
        (True, None, False),
        (False, False, False),
        (True, True, True),
    ],
)
def test_servers_share_only_if_their_operator_says_so(
    *, server: bool, asked: bool | None, shares: bool, tiny_model: Path
) -> None:
    config = _spec_config(tiny_model, {} if asked is None else {"share_unsalted": asked}, server)
    assert config.spec_ext.share_unsalted is shares


def test_contradictions_are_refused_before_weights_load(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecExtError, match="share_unsalted: found 'yes', expected true or false"):
        _spec_config(tiny_model, {"share_unsalted": "yes"}, False)
    saved = {**NGRAM, "overlay_file": str(tmp_path / "overlay")}
    with pytest.raises(SpecExtError, match="overlay_file holds what requests without"):
        _spec_config(tiny_model, saved, True)
    assert _spec_config(tiny_model, {**saved, "share_unsalted": True}, True).spec_ext.share_unsalted


def _spec_config(model: Path, options: dict[str, Any], server: bool) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    kind = AsyncEngineArgs if server else EngineArgs
    given = {"method": "input_copy", **options}
    arguments = {"dtype": "float32", "max_model_len": 128, "enforce_eager": True}
    args = kind(model=str(model), speculative_config=given, **arguments)
    return args.create_engine_config().speculative_config
