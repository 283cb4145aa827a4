# SPDX-License-Identifier: Apache-2.0
"""A corpus of the target's own answers on a real engine: the same text, in fewer steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from generation import ALWAYS_DRAFT, run, tokens
from scenarios import SCENARIOS
from test_greedy_identity import runner_of
from typer.testing import CliRunner
from worker_counts import kept_counts

from vllm_spec_ext.cli.corpus import corpus_app, load_tokenizer
from vllm_spec_ext.fingerprint import tokenizer_fingerprint
from vllm_spec_ext.training.shards import TokenSequence, open_manifest, shard_path, write_shard

ALONE = {"copy_input": False, "own_text": False, "earlier_answers": 0, "recycled_contexts": 0}


def save_corpus(model: Path | str, outputs: Sequence[Any], folder: Path) -> str:
    """Of a target's answers, twice, as contexts that occur once are left out."""
    facts = {"tokenizer_fingerprint": tokenizer_fingerprint(load_tokenizer(str(model)))}
    open_manifest(folder / "answers", {"num_shards": 1, "model": "tiny", **facts})
    texts = [
        TokenSequence([*out.prompt_token_ids, *out.outputs[0].token_ids], len(out.prompt_token_ids))
        for out in outputs
    ]
    write_shard(shard_path(folder / "answers", 0), texts * 2)
    given = ["--tokenizer", str(model), "--input", str(folder / "answers"), "--quiet"]
    CliRunner().invoke(
        corpus_app, ["build", *given, "--out", str(folder / "store")], catch_exceptions=False
    )
    return str(folder / "store")


@pytest.fixture(scope="module")
def corpus(tiny_model: Path, plain: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the target's answers to all prompts."""
    outputs = run(plain, SCENARIOS["mixed_lengths"])
    return save_corpus(tiny_model, outputs, tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("others", [ALONE, {}], ids=["alone", "with_others"])
def test_a_corpus_of_the_targets_answers(
    others: dict[str, Any],
    corpus: str,
    plain: Any,
    make_engine: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method = {"method": "auto", "num_speculative_tokens": 12, **ALWAYS_DRAFT, **others}
    engine = make_engine(speculative_config={**method, "corpus": corpus})
    counted = kept_counts(runner_of(engine), monkeypatch)
    for name in ("mixed_lengths", "penalties"):
        expected = tokens(run(plain, SCENARIOS[name]))
        assert tokens(run(engine, SCENARIOS[name])) == expected
    counts = counted()
    said = sum(len(one) for out in tokens(run(plain, SCENARIOS["mixed_lengths"])) for one in out)
    accepted = counts["counts"]["accepted_nodes"]
    assert accepted > 0.4 * said
    _, of_corpus, _ = counts["sources"]["corpus"]
    assert of_corpus == accepted if others else of_corpus > 0.3 * accepted
