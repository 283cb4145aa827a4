# SPDX-License-Identifier: Apache-2.0
"""vLLM's kernels that verification rests on, alone: no engine, a handful of numbers each."""

import torch
from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens, post_update
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from vllm_spec_ext.engine.v2.chains import follow_chains

VOCAB = 2000


def draws(slots: list[int], positions: list[int], logits: torch.Tensor) -> list[int]:
    """Of rows of these requests, at these positions."""
    seeds = torch.tensor([11, 12, 11, 14])  # two requests have the same one
    rows = torch.tensor(slots, dtype=torch.int32)
    temperature = torch.ones(4)
    where = torch.tensor(positions)
    return gumbel_sample(logits, rows, temperature, seeds, where, True, False).tolist()


def test_noise_is_a_function_of_seed_and_position_alone() -> None:
    """So a seeded text is plain sampling's, whatever is drafted and whatever else is in a batch."""
    row = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    slots, positions = [0, 0, 0, 1, 3], [5, 6, 7, 5, 5]
    alone = [draws([s], [p], row)[0] for s, p in zip(slots, positions, strict=True)]
    assert draws(slots, positions, row.repeat(5, 1)) == alone
    assert draws(slots[::-1], positions[::-1], row.repeat(5, 1)) == alone[::-1]
    assert len(set(alone)) == 5  # other seeds and positions draw other tokens
    assert draws([2], [6], row) == alone[1:2]  # another request with the same seed
    # A row that is sampled twice, as of a node with two branches, draws the same token.
    assert draws([0, 0], [6, 6], row.repeat(2, 1)) == [alone[1]] * 2


def test_from_drafts_to_the_tokens_of_a_step() -> None:
    """Laid out, verified and written back; requests stand in other places than in the batch."""
    slots = torch.tensor([3, 1], dtype=torch.int32)
    starts = torch.tensor([0, 4, 8], dtype=torch.int32)
    last, computed = torch.zeros(4, 1, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    last[3, 0], last[1, 0] = 70, 80
    computed[3], computed[1] = 10, 20
    drafts = torch.zeros(4, 3, dtype=torch.int64)
    drafts[3], drafts[1] = torch.tensor([71, 72, 73]), torch.tensor([81, 82, 83])
    ids = torch.zeros(8, dtype=torch.int32)
    lengths = torch.tensor([14, 24], dtype=torch.int32)  # with this step's tokens
    prompts = torch.full((4,), 5, dtype=torch.int32)
    rows = combine_sampled_and_draft_tokens(
        ids, slots, last, starts, lengths, prompts, drafts, starts, 8
    )
    assert ids.tolist() == [70, 71, 72, 73, 80, 81, 82, 83]
    assert rows.tolist() == [*range(8)]
    said = torch.tensor([71, 72, 99, 1, 81, 82, 83, 84])  # the third draft of one is wrong
    tokens, num_sampled = follow_chains(said, ids, starts, 3)
    assert num_sampled.tolist() == [3, 4]
    texts, totals = torch.zeros(4, 40, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    totals[3], totals[1] = 11, 21
    post_update(
        slots, computed, last, None, tokens, num_sampled, 4 - num_sampled, starts, texts, totals
    )
    assert (computed[3].item(), computed[1].item()) == (13, 24)
    assert (last[3, 0].item(), last[1, 0].item()) == (99, 84)
    assert (totals[3].item(), totals[1].item()) == (14, 25)
    assert texts[3, 11:14].tolist() == [71, 72, 99]
    assert texts[1, 21:25].tolist() == [81, 82, 83, 84]
