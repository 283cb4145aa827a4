# SPDX-License-Identifier: Apache-2.0
"""Blockwise parallel decoding (Stern et al. 2018): trained heads guess the next tokens at once.

The paper merges the prediction of a block with the verification of the one before: the target's
pass that verifies a draft also yields the hidden state from which the heads propose the next. So
a draft costs two small matrix products and one vocabulary projection, and no target pass.

Serving order: hidden state h_t, the target's own token x_{t+1} (the bonus token), then head i
drafts x_{t+1+i}. Exact acceptance; the relaxed rules of the paper are scorers.
"""

import math
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from vllm_spec_ext.config import BlockwiseOptions, MethodOptions
from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.fingerprint import tokenizer_fingerprint
from vllm_spec_ext.proposers.base import (
    EMPTY_DRAFT,
    BaseProposer,
    Draft,
    EngineHandle,
    IntArray,
    Needs,
    StepContext,
    chain,
    proposer,
)

if TYPE_CHECKING:
    import torch

    from vllm_spec_ext.proposers.blockwise_heads import BlockwiseHeads


@proposer(
    "blockwise",
    summary="Small heads on the target's last hidden state draft several tokens in one product.",
    options=BlockwiseOptions,
    num_speculative_tokens=4,
    needs_checkpoint=True,
    tree=True,
    best_for="any text, once heads are trained on the target's own output",
    cost="two small matrix products and one vocabulary projection per step",
)
class Blockwise(BaseProposer):
    """Chain of the heads' best tokens, or a tree of their candidates under the node budget."""

    needs: ClassVar[Needs] = Needs(hidden_states=True)

    def __init__(self, options: MethodOptions) -> None:
        """Keep the options; the heads are loaded in :meth:`start`."""
        super().__init__(options)
        self._options = cast(BlockwiseOptions, options)
        self._heads: BlockwiseHeads | None = None
        self._target: Any = None

    def start(self, engine: EngineHandle) -> None:
        """Load the heads onto the target's device and check that they belong to it.

        Raises:
            SpecExtError: Missing or damaged heads, another target, more draft tokens than heads.
        """
        from vllm_spec_ext.proposers.blockwise_heads import load_heads
        from vllm_spec_ext.proposers.draft_logits import DraftLogits

        if engine.target is None or not hasattr(engine.target, "compute_logits"):
            raise SpecExtError(
                f"blockwise needs a target with compute_logits(); {engine.model} has none, so it "
                "is not a text-generation model"
            )
        tokenizer = engine.load_tokenizer()
        config, heads = load_heads(
            self._options.model,
            hidden_size=_hidden_size(engine.target),
            vocab_size=engine.vocab_size,
            fingerprint=None if tokenizer is None else tokenizer_fingerprint(tokenizer),
            # A tree's budget counts nodes, so there it does not bound the depth.
            num_draft_tokens=None if self._options.tree else engine.num_speculative_tokens,
        )
        if config.condition_on_next and not hasattr(engine.target, "embed_input_ids"):
            raise SpecExtError(
                f"the heads in {self._options.model} use the next token's embedding, but "
                f"{engine.model} offers no embed_input_ids(); train with --no-condition-on-next"
            )
        self._target = engine.target
        self._heads = heads if engine.device is None else heads.to(engine.device)
        self._logits = DraftLogits(engine.target, self._heads.draft_vocab, engine.vocab_size)
        if self._options.tree:
            self._tree(np.log(np.full((1, 1), 0.5, np.float32)), np.zeros((1, 1), np.int32), 1)

    def propose(self, step: StepContext) -> list[Draft]:
        """One draft per request; empty where there is no room."""
        import torch

        drafts = [EMPTY_DRAFT] * len(step.requests)
        rows = [i for i, request in enumerate(step.requests) if request.room > 0]
        if self._heads is None or step.hidden_states is None or not rows:
            return drafts
        with torch.inference_mode():
            drafted = self._candidates(step, rows)
        if drafted is None:
            return drafts
        tokens, log_probs = drafted
        for i, row in enumerate(rows):
            room = step.requests[row].room
            if self._options.tree:
                drafts[row] = self._tree(log_probs[i], tokens[i], room)
            else:
                drafts[row] = self._chain(log_probs[i, :, 0], tokens[i, :, 0], room)
        return drafts

    def _candidates(
        self, step: StepContext, rows: list[int]
    ) -> "tuple[IntArray, np.ndarray[Any, Any]] | None":
        """Best tokens of the heads and their log-probabilities, [len(rows), depth, m] each.

        None on tensor-parallel ranks that vLLM gives no logits.
        """
        import torch

        heads = cast("BlockwiseHeads", self._heads)
        hidden = cast("torch.Tensor", step.hidden_states)
        config = heads.config
        if heads.b_out.dtype != hidden.dtype or heads.b_out.device != hidden.device:
            heads.to(device=hidden.device, dtype=hidden.dtype)
        if len(rows) < len(step.requests):
            hidden = hidden[torch.tensor(rows).to(hidden.device)]
        embedding = None
        if config.condition_on_next:
            last = torch.tensor([int(step.requests[row].token_ids[-1]) for row in rows])
            embedding = self._target.embed_input_ids(last.to(hidden.device))
        # The vocabulary projection is most of the cost: leave out heads no request has room for.
        depth = min(config.num_heads, max(step.requests[row].room for row in rows))
        states = heads(hidden, embedding)[:, :depth]
        logits = self._logits(states.reshape(-1, config.hidden_size))
        if logits is None:
            return None
        if self._options.tree:
            scores = torch.log_softmax(logits.float(), dim=-1)
            best, places = scores.topk(min(self._options.candidates, scores.shape[-1]), dim=-1)
        elif self._options.min_confidence > 0.0:
            best, places = torch.log_softmax(logits.float(), dim=-1).max(dim=-1, keepdim=True)
        else:
            places = logits.argmax(dim=-1, keepdim=True)
            best = torch.zeros(places.shape, dtype=torch.float32)
        ids = self._logits.tokens(places)
        # The only wait for the device in a step: drafts are scheduled from host memory.
        shape = (len(rows), depth, ids.shape[-1])
        return (
            ids.to("cpu", torch.int32).numpy().reshape(shape),
            best.to("cpu", torch.float32).numpy().reshape(shape),
        )

    def _min_log_prob(self) -> float:
        confidence = self._options.min_confidence
        return math.log(confidence) if confidence > 0.0 else -math.inf

    def _chain(self, log_probs: "np.ndarray[Any, Any]", tokens: IntArray, room: int) -> Draft:
        length = min(room, len(tokens))
        if self._options.min_confidence > 0.0:
            likely = np.cumsum(log_probs[:length]) >= self._min_log_prob()
            length = int(likely.sum())  # cumulative log-probabilities only fall
        return chain(tokens[:length].copy()) if length else EMPTY_DRAFT

    def _tree(self, log_probs: "np.ndarray[Any, Any]", tokens: IntArray, room: int) -> Draft:
        from vllm_spec_ext.proposers.blockwise_tree import best_tree

        depths, ranks, parents = best_tree(
            np.ascontiguousarray(log_probs), room, self._min_log_prob()
        )
        if not len(depths):
            return EMPTY_DRAFT
        drafted = tokens[depths, ranks]
        if np.array_equal(parents, np.arange(-1, len(parents) - 1)):
            return chain(drafted)  # no branch: the engine's plain path is cheaper
        return Draft(np.ascontiguousarray(drafted), parents)


def _hidden_size(target: "torch.nn.Module") -> int | None:
    config: Any = getattr(target, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    size = getattr(config, "hidden_size", None)
    return size if isinstance(size, int) else None
