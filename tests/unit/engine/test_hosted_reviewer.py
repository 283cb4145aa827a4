# SPDX-License-Identifier: Apache-2.0
"""A hosted model as a level of a cascade, against dense computation on a toy of paged attention."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from fake_model import request as request_step
from paged_toy import VOCAB, ToyModel
from toy_simulation import BLOCK, BLOCKS, SCRATCH, Drafts, Floats, Simulation

from vllm_spec_ext.engine.models.forward_pass import ForwardPass
from vllm_spec_ext.engine.models.hosted_model import BatchRow, HostedModel
from vllm_spec_ext.proposers.cascade.reviewer import HostedReviewer, ReviewRound
from vllm_spec_ext.proposers.records import RequestStep


class Reviews(Simulation):
    """Reads chunks, goes back as far as it may, and reads others; sometimes from the root anew."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, ahead=0, sessions=0.3)
        self.toy = ToyModel(1, BLOCKS + SCRATCH, BLOCK)
        model = HostedModel(
            "toy", self.toy, num_ids=VOCAB, vocab_size=VOCAB, max_model_len=48, max_rows=40
        )
        model.bind(BLOCKS, BLOCK, range(BLOCKS, BLOCKS + SCRATCH))
        self.models = [model]
        self.reviewer = HostedReviewer(model)
        self.num_lost = self.num_anew = 0

    def truth(self, tokens: Sequence[int]) -> int:
        if hash(tuple(tokens)) % 4:
            return int(self.toy.dense(tokens)[-1].argmax())
        return hash(tuple(tokens)) % VOCAB

    def dense(self, model: HostedModel, text: Sequence[int], num_certain: int) -> Floats:
        return self.toy.dense(text)

    def drafts(self, requests: Sequence[RequestStep]) -> Drafts:
        rows = [row for row in range(len(requests)) if self.rng.random() < 0.9]
        if not rows:
            return {}
        found = self.reviewer.begin(requests, rows, [6] * len(rows))
        given: list[list[int]] = [[] for _ in rows]  # that stand, the root first
        lost = [False] * len(rows)
        for _ in range(self.rng.randint(1, 5)):
            self._review(found, [requests[row] for row in rows], given, lost)
        return {row: text[1:] for row, text in zip(rows, given, strict=True)}

    def _review(
        self,
        found: ReviewRound,
        requests: Sequence[RequestStep],
        given: list[list[int]],
        lost: list[bool],
    ) -> None:
        feeds: list[list[int]] = []
        for place, (request, text) in enumerate(zip(requests, given, strict=True)):
            if text and self.rng.random() < 0.5:
                del text[self.rng.randint(0, len(text)) :]
                self.num_anew += not text
            sits_out = lost[place] or self.rng.random() < 0.2
            certain = request.token_ids.tolist()
            path = self.toy.dense([*certain, *text[1:]])[-1].argmax()
            more = [int(path), *self.some_tokens(0, 3)] if text else self.some_tokens(0, 3)
            feeds.append([] if sits_out else [*([] if text else certain[-1:]), *more])
        found.keep([len(text) for text in given])
        for place, rows in enumerate(found.run(feeds)):
            feed = feeds[place]
            if not feed:
                assert rows is None
            elif rows is None:
                lost[place] = True
                self.num_lost += 1
                given[place].clear()
            else:
                given[place] += feed
                dense = self.toy.dense([*requests[place].token_ids, *given[place][1:]])
                bad = ~np.isclose(rows.numpy(), dense[-len(feed) :], atol=1e-5).all(axis=1)
                self.rows += len(rows)
                self.wrong += int(bad.sum())


@pytest.mark.parametrize("seed", range(4))
def test_every_row_equals_a_dense_computation(seed: int) -> None:
    simulation = Reviews(seed)
    simulation.run(80)
    assert simulation.wrong == 0
    assert simulation.rows > 500
    assert simulation.num_lost > 0
    assert simulation.num_anew > 5
    assert simulation.scheduler.num_hits > 20


def test_rows_of_a_root_alone_are_on_the_models_device() -> None:
    """torch's meta device refuses to be mixed, as a GPU would."""

    class OnDevice(ToyModel):
        def forward(self, plan: ForwardPass) -> torch.Tensor:
            return super().forward(plan).to("meta")

    toy = OnDevice(1, 16, BLOCK)
    model = HostedModel("toy", toy, num_ids=VOCAB, vocab_size=VOCAB, max_model_len=48, max_rows=40)
    model.bind(8, BLOCK, range(8, 16))
    text = [1, 2, 3]
    model.begin_step([BatchRow("a", np.arange(1, 4), np.array(text, np.int32), False)])
    (trunk,) = model.sync([request_step(text)], [0], [[]])
    assert trunk is not None
    nothing = model.all_logits(trunk)
    assert nothing.shape == (0, VOCAB)
    assert nothing.device.type == "meta"
    (rows,) = HostedReviewer(model).begin([request_step(text)], [0], [6]).run([[3]])
    assert rows is not None
    assert rows.shape == (1, VOCAB)
    assert rows.device.type == "meta"
