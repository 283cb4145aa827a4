# SPDX-License-Identifier: Apache-2.0
"""Predictions on paper against the figures that TriForce published for an A100.

Sun et al. 2024 (arXiv 2404.11912v3), tables 2 and 8: Llama2-7B-128K, 122K of context, a view of
4096 tokens, JF68M with 256 tokens as the smallest level and with 1K as the naive policy. Acceptance
is published per token: the paper's upper bounds are 1 / (1 - acceptance).

The paper's program has no fused kernels. Its launch costs, 160 us a layer and 1 ms a pass, are not
published but fitted to these rows. With them a plain step takes 54 ms, which is what the paper says
of it: 0.108 s a token elsewhere is "half as slow".
"""

import dataclasses

import pytest

from vllm_spec_ext.bench import draft_levels, gpu_costs, model_shape
from vllm_spec_ext.bench.paper_plan import LONGEST, SHORTEST, Machine, break_even, predict

CONTEXT = 122 * 1024
PAPER = Machine(gpu_costs.find("a100,layer_us=160,forward_us=1000"), model_shape.find("llama2-7b"))
WITHIN = 0.15
TEMPERATURES = [
    # acceptance under the target, of the 68M model; speed-ups of TriForce and the 68M model alone
    (0.9234, 0.4649, 2.31, 1.56),
    (0.9203, 0.4452, 2.25, 1.54),
    (0.9142, 0.4256, 2.20, 1.47),
    (0.9137, 0.4036, 2.19, 1.42),
    (0.8986, 0.3131, 2.08, 1.34),
    (0.9004, 0.2872, 2.08, 1.29),
    (0.8902, 0.2664, 2.02, 1.27),
]
CHUNKS = [2.30, 2.31, 2.24, 2.17]  # of 1, 2, 3 and 4 tokens of the 68M model; see below
DRAFT_LENGTHS = [1.62, 1.90, 2.13, 2.22, 2.26, 2.31, 2.24, 2.20]


def speed_up(
    levels: str, machine: Machine = PAPER, batch: int = 1, context: int = CONTEXT
) -> float:
    return predict(machine, draft_levels.parse(levels), batch, context).speed_up


def triforce(view: float, small: float, tokens: int = 6, chunk: int = 2) -> str:
    """Pages are chosen at the end of the prompt alone, as in the released program."""
    return (
        f"view,budget=4096,page=0,accept={view},tokens={tokens}; "
        f"model=llama-68m,budget=256,accept={small},tokens={chunk}"
    )


def test_a_plain_step_takes_what_the_paper_says() -> None:
    assert PAPER.plain_s(1, CONTEXT) == pytest.approx(0.108 / 2, rel=0.02)


@pytest.mark.parametrize(("view", "small", "published", "naive"), TEMPERATURES)
def test_triforce_table(view: float, small: float, published: float, naive: float) -> None:
    assert speed_up(triforce(view, small)) == pytest.approx(published, rel=WITHIN)
    alone = speed_up(f"model=llama-68m,budget=1024,accept={small}")
    assert alone == pytest.approx(naive, rel=WITHIN)


def test_triforce_ablations_at_temperature_six_tenths() -> None:
    view_alone = speed_up("view,budget=4096,page=0,accept=0.9126")
    assert view_alone == pytest.approx(1.80, rel=WITHIN)
    assert speed_up(triforce(0.8745, 0.4036)) == pytest.approx(1.90, rel=WITHIN)


@pytest.mark.parametrize(("tokens", "published"), enumerate(DRAFT_LENGTHS, 1))
def test_triforce_draft_lengths(tokens: int, published: float) -> None:
    found = speed_up(triforce(0.9234, 0.4649, tokens))
    assert found == pytest.approx(published, rel=WITHIN)


@pytest.mark.parametrize(("chunk", "published"), enumerate(CHUNKS, 1))
def test_triforce_chunks(chunk: int, published: float) -> None:
    """Longer ones are not compared: ours end with the draft, the paper's go beyond it."""
    found = speed_up(triforce(0.9234, 0.4649, chunk=chunk))
    assert found == pytest.approx(published, rel=WITHIN)


def test_fused_kernels_gain_more_than_the_papers_program() -> None:
    """So much of a view's pass is launching there; an engine's prediction is not the paper's."""
    engine = Machine(gpu_costs.GPUS["a100"], PAPER.target)
    assert speed_up(triforce(0.9234, 0.4649), engine) > 2.8


H100 = Machine(gpu_costs.GPUS["h100"], model_shape.find("llama2-7b"))
GROUPED = Machine(gpu_costs.GPUS["h100"], model_shape.find("llama3-8b"))
VIEW = "view,budget=4096,accept=0.92"


def test_views_pay_where_the_cache_outweighs_the_weights() -> None:
    gains = [speed_up(VIEW, H100, 1, tokens * 1024) for tokens in (8, 16, 32, 64)]
    assert gains == sorted(gains)
    assert speed_up(VIEW, H100, 4, 16384) > speed_up(VIEW, H100, 1, 16384)
    # Grouped-query attention has a quarter of the cache, so a view saves less.
    assert speed_up(VIEW, GROUPED, 1, 32768) < speed_up(VIEW, H100, 1, 32768)
    # An inner level that is free saves passes of the view.
    assert speed_up(f"{VIEW}; lookup,accept=0.42", H100, 1, 32768) > gains[2]


def test_without_graphs_a_draft_pass_of_an_8b_model_is_launching() -> None:
    eager = dataclasses.replace(GROUPED, eager_drafts=True)
    level = draft_levels.parse(VIEW).levels[0]
    assert eager.level_s(level, 1, 1, 32768) == pytest.approx(0.0098)
    assert speed_up(VIEW, eager, 1, 32768) < 1.0 < speed_up(VIEW, GROUPED, 1, 32768)
    assert eager.plain_s(1, 32768) == GROUPED.plain_s(1, 32768)


def test_break_even_is_where_the_speed_up_crosses_one() -> None:
    cascade = draft_levels.parse(VIEW)
    found = break_even(H100, cascade, 1)
    assert found is not None
    assert SHORTEST < found < LONGEST
    assert predict(H100, cascade, 1, found).speed_up >= 1.0
    assert predict(H100, cascade, 1, found * 97 // 100).speed_up < 1.0
    earlier = break_even(H100, cascade, 4)
    assert earlier is not None
    assert earlier < found
    assert break_even(H100, draft_levels.parse("model=llama-68m,accept=0.9"), 1) == SHORTEST
    assert break_even(H100, draft_levels.parse("model=llama2-7b,accept=0.9"), 1) is None
    large = Machine(H100.gpu, model_shape.find("llama3-70b"))  # 141 GB of weights
    assert break_even(large, draft_levels.parse("lookup,accept=0.9"), 1) is None


def test_memory_counts_weights_cache_and_means() -> None:
    target, draft = H100.target, model_shape.find("llama-68m")
    cascade = draft_levels.parse("model=llama-68m,budget=256,accept=0.5")
    needed = target.memory_bytes + 2 * 1000 * 524288 + draft.memory_bytes
    assert H100.memory_bytes(cascade, 2, 1000) == needed + 2 * 256 * draft.kv_bytes
    paged = draft_levels.parse("view,budget=256,page=32,accept=0.5")
    means = 2 * 1000 * 524288 / 2 / 32
    assert H100.memory_bytes(paged, 2, 1000) == H100.memory_bytes(None, 2, 1000) + means
    assert not H100.fits(None, 1, 131072)
    assert Machine(gpu_costs.GPUS["h200"], target).fits(None, 1, 131072)
    assert PAPER.fits(None, 1, CONTEXT)


def test_lengths_are_searched_or_kept() -> None:
    cascade = draft_levels.parse(
        "view,budget=4096,accept=0.92; model=llama-68m,accept=0.4,tokens=3"
    )
    best = predict(H100, cascade, 1, 65536, most_tokens=8)
    assert best.lengths[1] == 3
    for tokens in range(1, 9):
        other = predict(
            H100,
            draft_levels.parse(
                f"view,budget=4096,accept=0.92,tokens={tokens}; model=llama-68m,accept=0.4,tokens=3"
            ),
            1,
            65536,
        )
        assert other.lengths == (tokens, 3)
        assert other.speed_up <= best.speed_up
    tail = draft_levels.parse("model=llama-68m,accept=0.6,tokens=2 | lookup,accept=0.3,tokens=4")
    found = predict(H100, tail, 1, 4096)
    assert found.lengths == (2, 4)
    assert found.step.num_drafted == 6
