# SPDX-License-Identifier: Apache-2.0
"""The blockwise proposer on a stand-in target: chains, trees, cut-offs, refusals."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.options import parse_options
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import (
    Draft,
    EngineHandle,
    RequestStep,
    StepContext,
    StepOutcome,
)
from vllm_spec_ext.proposers.blockwise import Blockwise
from vllm_spec_ext.proposers.blockwise.heads import BlockwiseHeads, HeadsConfig, TokensSeen
from vllm_spec_ext.proposers.blockwise.options import BlockwiseOptions
from vllm_spec_ext.training.blockwise.checkpoint import save_heads
from vllm_spec_ext.training.blockwise.evaluate import HeadFigures

VOCAB, SIZE, HEADS = 40, 16, 3


class StandInTarget(nn.Module):
    """What the proposer uses of a vLLM model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lm_head = nn.Linear(SIZE, VOCAB, bias=False)
        self.embed = nn.Embedding(VOCAB, SIZE)
        self.calls = 0

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        self.calls += 1
        logits: Tensor = self.lm_head(hidden)
        return logits

    def embed_input_ids(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.embed(ids)
        return embedded


class SeesPictures(nn.Module):
    """A target around one that writes, as many of vLLM's are; the projection is the inner one's."""

    def __init__(self, writes: StandInTarget) -> None:
        super().__init__()
        self.writes = writes

    def get_language_model(self) -> nn.Module:
        return self.writes

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        return self.writes.compute_logits(hidden)

    def embed_input_ids(self, ids: Tensor) -> Tensor:
        return self.writes.embed_input_ids(ids)


class StandInTokenizer:
    """A vocabulary of numbers."""

    def get_vocab(self) -> dict[str, int]:
        return {f"t{i}": i for i in range(VOCAB)}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [len(text) % VOCAB]


def save(folder: Path, listed: Tensor | None = None, **changes: Any) -> tuple[Path, BlockwiseHeads]:
    """Heads with random weights, saved; ``changes`` go to their config."""
    facts: dict[str, Any] = {
        "target": "stand-in",
        "hidden_size": SIZE,
        "vocab_size": VOCAB,
        "num_heads": HEADS,
        "head_width": 8,
    }
    config = HeadsConfig.model_validate({**facts, **changes})
    torch.manual_seed(2)
    heads = BlockwiseHeads(config)
    nn.init.normal_(heads.w_out)
    heads.draft_vocab = listed
    save_again(folder, heads)
    return folder, heads


def save_again(folder: Path, heads: BlockwiseHeads) -> None:
    """Write these heads with invented figures."""
    accuracy = [dict.fromkeys(("top1", "top2", "top3", "top5"), 0.5)] * HEADS
    figures = HeadFigures(1, 1, 1.0, accuracy, 1.5, 1.5, 8, 1.6)
    save_heads(folder, heads.config, heads, "fp32", figures)


def start(
    target: nn.Module | None, folder: Path, num_tokens: int = HEADS, **options: Any
) -> Blockwise:
    """A started proposer."""
    parsed = parse_options(BlockwiseOptions, {"model": str(folder), **options}, "blockwise")
    proposer = Blockwise(parsed)
    proposer.start(
        EngineHandle(
            vocab_size=VOCAB,
            max_model_len=128,
            max_num_seqs=4,
            num_speculative_tokens=num_tokens,
            model="stand-in",
            load_tokenizer=StandInTokenizer,
            target=target,
            device=torch.device("cpu"),
        )
    )
    return proposer


def step(hidden: Tensor, rooms: list[int], last: int = 5) -> StepContext:
    """A batch in which every request just got token ``last``."""
    requests = [
        RequestStep(f"r{i}", np.array([1, 2, last], np.int32), 2, [last], room)
        for i, room in enumerate(rooms)
    ]
    return StepContext(requests, hidden)


def test_is_registered() -> None:
    assert registry.load("blockwise") is Blockwise
    assert Blockwise.needs.hidden_states
    assert registry.info("blockwise").needs_checkpoint


@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize("block_diagonal", [False, True])
def test_chain_is_each_heads_best_token(
    tmp_path: Path, conditioned: bool, block_diagonal: bool
) -> None:
    target = StandInTarget()
    folder, heads = save(tmp_path, condition_on_next=conditioned, block_diagonal=block_diagonal)
    proposer = start(target, folder)
    hidden = torch.randn(4, SIZE)
    drafts = proposer.propose(step(hidden, [3, 0, 2, 9], last=7))
    seen = TokensSeen(torch.full((4,), 7))
    expected = target.lm_head(heads(hidden, seen, target.embed)).argmax(-1).numpy()
    assert [len(d) for d in drafts] == [3, 0, 2, 3]
    for row in (0, 2, 3):
        assert drafts[row].tokens.dtype == np.int32
        assert drafts[row].parents is None
        assert drafts[row].tokens.tolist() == expected[row, : len(drafts[row])].tolist()
    assert target.calls == 1
    assert proposer.propose(step(hidden, [0, 0, 0, 0])) == [drafts[1]] * 4
    assert target.calls == 1


def test_heads_see_what_followed_earlier(tmp_path: Path) -> None:
    """Trained to trust copies, heads draft them; each request has a text of its own that grows."""
    target = StandInTarget()
    folder, heads = save(tmp_path, copy_match=4)
    with torch.no_grad():
        heads.copy_trust[1:] = 50.0
        target.lm_head.weight[:] = target.embed.weight / target.embed.weight.norm(dim=1)[:, None]
    save_again(folder, heads)
    proposer = start(target, folder)

    def drafts(*texts: list[int], room: int = 3) -> list[list[int]]:
        requests = [
            RequestStep(f"r{i}", np.array(text, np.int32), 2, text[-1:], room)
            for i, text in enumerate(texts)
        ]
        context = StepContext(requests, torch.zeros(len(texts), SIZE))
        return [draft.tokens.tolist() for draft in proposer.propose(context)]

    first, second = drafts([1, 2, 3, 4, 5, 1], [5, 6, 7, 8, 5])
    assert (first, second) == ([2, 3, 4], [6, 7, 8])
    first, second = drafts([1, 2, 3, 4, 5, 1, 2, 3], [5, 6, 7, 8, 5, 9, 5])
    assert (first, second) == ([4, 5, 1], [9, 5, 9])
    assert drafts([1, 2, 3, 4, 5, 1, 2, 3, 6, 7], room=0) == [[]]
    assert drafts([1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 8, 2, 3]) == [[6, 7, 8]]
    assert drafts([1, 2, 3, 4]) == [[0, 0, 0]]  # a session: the last tokens were taken back ...
    assert drafts([1, 2, 3, 4, 7, 1, 2, 3]) == [[4, 7, 1]]  # ... and others came
    proposer.finish(["r0", "r1"])  # the same names may come back for other texts
    assert drafts([9, 8, 7, 9]) == [[8, 7, 9]]
    proposer.finish(["r0"])
    beyond = heads.config.vocab_size  # stands in a prompt for a picture or an embedding
    (draft,) = drafts([9, beyond, beyond, 4, 9])
    proposer.finish(["r0"])
    assert [draft] == drafts([9])


@pytest.mark.parametrize("sees", [False, True])
@pytest.mark.parametrize("plain_projection", [True, False])
@pytest.mark.parametrize("tree", [True, False])
def test_a_draft_vocabulary_bounds_what_is_drafted(
    tmp_path: Path, plain_projection: bool, tree: bool, sees: bool
) -> None:
    target = StandInTarget()
    if plain_projection:  # as vLLM's: the rows are copied, and the target is not asked
        target.logits_processor = SimpleNamespace(scale=1.0, soft_cap=None)
    listed = torch.tensor([2, 3, 5, 7, 11, 13], dtype=torch.int32)
    folder, heads = save(tmp_path, draft_vocab_size=6, listed=listed)
    proposer = start(SeesPictures(target) if sees else target, folder, tree=tree)
    hidden = torch.randn(5, SIZE)
    drafts = proposer.propose(step(hidden, [3] * 5))
    logits = target.lm_head(heads(hidden))
    best = listed[logits[..., listed.long()].argmax(-1)].numpy()
    assert (best != logits.argmax(-1).numpy()).any()
    for row, draft in enumerate(drafts):
        assert set(draft.tokens.tolist()) <= set(listed.tolist())
        assert draft.tokens[0] == best[row, 0]
        if not tree:
            assert draft.tokens.tolist() == best[row].tolist()
    assert target.calls == (0 if plain_projection else 1)


@pytest.mark.parametrize("plain_projection", [True, False])
@pytest.mark.parametrize("kind", ["chain", "tree", "draw"])
def test_what_is_copied_is_drafted_though_it_is_not_listed(
    tmp_path: Path, plain_projection: bool, kind: str
) -> None:
    target = StandInTarget()
    if plain_projection:
        target.logits_processor = SimpleNamespace(scale=1.0, soft_cap=None)
    listed = torch.tensor([2, 9, 11], dtype=torch.int32)
    folder, heads = save(tmp_path, copy_match=4, draft_vocab_size=3, listed=listed)
    with torch.no_grad():
        heads.copy_trust[1:] = 50.0
        target.lm_head.weight[:] = target.embed.weight / target.embed.weight.norm(dim=1)[:, None]
    save_again(folder, heads)
    proposer = start(target, folder, tree=kind == "tree", draw=kind == "draw")
    requests = [
        RequestStep(f"r{i}", np.array(text, np.int32), 2, text[-1:], 3, temperature=0.5)
        for i, text in enumerate(([1, 2, 3, 4, 5, 1], [5, 9, 7, 2, 8]))
    ]
    copying, alone = proposer.propose(StepContext(requests, torch.zeros(2, SIZE)))
    assert copying.tokens.tolist() == [2, 3, 4]  # of these, 2 is listed
    assert set(alone.tokens.tolist()) <= set(listed.tolist())
    if kind == "draw":
        for draft in (copying, alone):
            assert draft.probs is not None
            assert draft.probs.sum(dim=1).numpy() == pytest.approx(1.0, abs=1e-5)
        assert copying.probs is not None
        drawn = copying.probs[torch.arange(3), torch.from_numpy(copying.tokens).long()]
        assert (drawn > 0.99).all()


def test_a_draft_without_an_outcome_is_forgotten(tmp_path: Path) -> None:
    folder, _ = save(tmp_path)
    proposer = start(StandInTarget(), folder)
    hidden = torch.randn(1, SIZE)
    one = StepContext(step(hidden, [1]).requests, hidden, min_probability=0.001)
    assert len(proposer.propose(one)[0]) == 1
    proposer.propose(step(hidden, [3]))  # the cost is unknown again, and nothing is promised
    proposer.observe([StepOutcome("r0", 3, 3)])
    assert proposer._payoff.trust == 1.0


def test_drafts_only_what_pays(tmp_path: Path) -> None:
    folder, _ = save(tmp_path)
    proposer = start(StandInTarget(), folder)
    hidden = torch.randn(1, SIZE)
    dear = StepContext(step(hidden, [3]).requests, hidden, min_probability=0.9)
    cheap = StepContext(step(hidden, [3]).requests, hidden, min_probability=0.001)
    (draft,) = proposer.propose(cheap)
    assert len(draft) == 3
    assert draft.path_probs is not None
    assert (np.diff(draft.path_probs) <= 0).all()
    assert len(proposer.propose(dear)[0]) == 0
    assert len(start(StandInTarget(), folder, adaptive_length=False).propose(dear)[0]) == 3
    # Heads that are right more often than they say are trusted more.
    for _ in range(200):
        proposer.propose(cheap)
        proposer.observe([StepOutcome("r0", 3, 3)])
    assert len(proposer.propose(dear)[0]) == 3
    proposer.propose(cheap)
    proposer.finish(["r0"])
    assert proposer._payoff._pending == {}


def test_tree_path_probabilities(tmp_path: Path) -> None:
    proposer = start(StandInTarget(), save(tmp_path)[0], tree=True, candidates=3)
    (draft,) = proposer.propose(step(torch.randn(1, SIZE), [8]))
    assert draft.path_probs is not None
    for node, parent in enumerate(draft.parents if draft.parents is not None else range(-1, 7)):
        above = 1.0 if parent < 0 else float(draft.path_probs[parent])
        assert 0 < float(draft.path_probs[node]) <= above


def test_batch_neighbours_do_not_change_a_draft(tmp_path: Path) -> None:
    proposer = start(StandInTarget(), save(tmp_path)[0], tree=True)
    hidden = torch.randn(3, SIZE)
    together = proposer.propose(step(hidden, [6, 6, 6]))
    alone = proposer.propose(step(hidden[1:2], [6]))[0]
    assert np.array_equal(together[1].tokens, alone.tokens)


def test_tree_keeps_the_contract(tmp_path: Path) -> None:
    target = StandInTarget()
    folder, heads = save(tmp_path)
    proposer = start(target, folder, num_tokens=12, tree=True, candidates=3)
    hidden = torch.randn(8, SIZE) * 0.3
    drafts = proposer.propose(step(hidden, [12] * 8))
    candidates = target.lm_head(heads(hidden)).topk(3).indices.numpy()
    for row, draft in enumerate(drafts):
        assert draft.parents is not None
        assert len(draft) == 12
        depths: list[int] = []
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            assert -1 <= parent < len(depths)
            depths.append(0 if parent == -1 else depths[parent] + 1)
            assert token in candidates[row, depths[-1]]
        assert draft.tokens[0] == candidates[row, 0, 0]
        pairs = list(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True))
        assert len(set(pairs)) == len(pairs)


def test_confidence_cuts_chains_and_trees(tmp_path: Path) -> None:
    target = StandInTarget()
    folder, heads = save(tmp_path)
    hidden = torch.randn(6, SIZE)
    best = target.lm_head(heads(hidden)).softmax(-1).max(-1).values.cumprod(-1).detach().numpy()
    cut = float(np.median(best[:, 1]))
    chains = start(target, folder, min_confidence=cut).propose(step(hidden, [3] * 6))
    assert [len(d) for d in chains] == (best >= cut).sum(axis=1).tolist()
    trees = start(target, folder, tree=True, min_confidence=cut).propose(step(hidden, [3] * 6))
    assert all(len(tree) >= min(3, len(line)) for tree, line in zip(trees, chains, strict=True))
    nothing = start(target, folder, min_confidence=0.999999).propose(step(hidden, [3] * 6))
    assert all(len(d) == 0 for d in nothing)


def test_a_tree_without_branches_is_a_chain(tmp_path: Path) -> None:
    proposer = start(StandInTarget(), save(tmp_path)[0], tree=True, candidates=1)
    draft: Draft = proposer.propose(step(torch.randn(1, SIZE), [3]))[0]
    assert draft.parents is None
    assert len(draft) == 3


def test_follows_the_dtype_of_the_hidden_states(tmp_path: Path) -> None:
    target = StandInTarget().to(torch.bfloat16)
    proposer = start(target, save(tmp_path, condition_on_next=True, copy_match=4)[0])
    draft = proposer.propose(step(torch.randn(1, SIZE, dtype=torch.bfloat16), [3]))[0]
    assert len(draft) == 3


def test_refusals(tmp_path: Path) -> None:
    folder, _ = save(tmp_path)
    target = StandInTarget()
    with pytest.raises(SpecExtError, match="holds 3 heads, but 4 draft tokens"):
        start(target, folder, num_tokens=4)
    start(target, folder, num_tokens=64, tree=True)  # a tree's budget counts nodes
    with pytest.raises(SpecExtError, match="compute_logits"):
        start(None, folder)
    other, _ = save(tmp_path / "other", tokenizer_fingerprint="0" * 64)
    with pytest.raises(SpecExtError, match="another tokenizer"):
        start(target, other)
    target.config = type("C", (), {"hidden_size": 32})()
    with pytest.raises(SpecExtError, match=r"hidden size 16 \(the target has 32\)"):
        start(target, folder)
    with pytest.raises(SpecExtError, match="model"):
        parse_options(BlockwiseOptions, {}, "blockwise")


def test_no_logits_on_this_rank_means_no_draft(tmp_path: Path) -> None:
    target = StandInTarget()
    target.compute_logits = lambda hidden: None  # type: ignore[method-assign]
    proposer = start(target, save(tmp_path)[0])
    assert len(proposer.propose(step(torch.randn(1, SIZE), [3]))[0]) == 0


def sampled(temperature: float, room: int = HEADS) -> StepContext:
    torch.manual_seed(4)
    request = RequestStep("r", np.array([1, 2, 5], np.int32), 2, [5], room, temperature=temperature)
    return StepContext([request], torch.randn(1, SIZE))


@pytest.mark.parametrize("listed", [None, torch.tensor([3, 7, 8, 20, 31])])
def test_draws_come_from_the_distributions_that_are_given(
    tmp_path: Path, listed: Tensor | None
) -> None:
    size = {} if listed is None else {"draft_vocab_size": len(listed)}
    proposer = start(StandInTarget(), save(tmp_path, listed, **size)[0], draw=True)
    counts = np.zeros((HEADS, VOCAB))
    for _ in range(2000):
        (draft,) = proposer.propose(sampled(0.8))
        counts[np.arange(HEADS), draft.tokens] += 1
    assert draft.probs is not None
    distributions = draft.probs.numpy()
    assert distributions.sum(axis=1) == pytest.approx(1.0, abs=1e-5)
    if listed is not None:
        assert distributions[:, listed].sum(axis=1) == pytest.approx(1.0, abs=1e-5)
    assert np.abs(counts / 2000 - distributions).sum(axis=1).max() < 0.15
    (sharper,) = proposer.propose(sampled(0.2))
    assert sharper.probs is not None
    assert (sharper.probs.max(dim=1).values.numpy() > distributions.max(axis=1)).all()


def test_a_drawn_draft_is_as_long_whatever_was_drawn(tmp_path: Path) -> None:
    """Else the tokens that are left would no longer follow the distribution."""
    folder, _ = save(tmp_path)
    lengths = set()
    proposer = start(StandInTarget(), folder, draw=True, min_confidence=0.2)
    for _ in range(50):
        (draft,) = proposer.propose(sampled(0.8))
        lengths.add(len(draft))
    assert len(lengths) == 1
    assert 0 < lengths.pop() < HEADS


def test_a_seeded_request_gets_the_best_tokens_also_with_draw(tmp_path: Path) -> None:
    """Its text must not depend on its drafts, so draws would be verified as if they were chosen."""
    proposer = start(StandInTarget(), save(tmp_path)[0], draw=True)
    given = sampled(1.0)
    (request,) = given.requests
    seeded = StepContext([replace(request, seed=7)], given.hidden_states)
    best = proposer.propose(sampled(0.0))[0].tokens.tolist()
    for _ in range(5):
        (draft,) = proposer.propose(seeded)
        assert draft.tokens.tolist() == best
        assert draft.probs is None
    assert len({tuple(proposer.propose(given)[0].tokens.tolist()) for _ in range(10)}) > 1


def test_draws_do_not_share_noise_with_a_freshly_seeded_engine(tmp_path: Path) -> None:
    """vLLM's default seed is 0: with the same noise, target and draft would agree by accident."""
    proposer = start(StandInTarget(), save(tmp_path)[0], draw=True)
    for seed in (0, 1, 42):
        assert proposer._random.initial_seed() != seed


def test_greedy_requests_get_the_best_tokens_also_with_draw(tmp_path: Path) -> None:
    folder, _ = save(tmp_path)
    (chosen,) = start(StandInTarget(), folder).propose(sampled(0.0))
    (drawn,) = start(StandInTarget(), folder, draw=True).propose(sampled(0.0))
    assert drawn.tokens.tolist() == chosen.tokens.tolist()
    assert drawn.probs is None


def test_draw_is_for_chains(tmp_path: Path) -> None:
    with pytest.raises(SpecExtError, match="draw=true drafts chains"):
        start(StandInTarget(), save(tmp_path)[0], draw=True, tree=True)
