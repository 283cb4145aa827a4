# SPDX-License-Identifier: Apache-2.0
"""Blockwise parallel decoding (Stern et al. 2018): trained heads guess the next tokens at once.

The paper merges the prediction of a block with the verification of the one before: the target's
pass that verifies a draft also yields the hidden state from which the heads propose the next. So
a draft costs two small matrix products and one vocabulary projection, and no target pass.

Serving order: hidden state h_t, the target's own token x_{t+1} (the bonus token), then head i
drafts x_{t+1+i}. Exact acceptance; the relaxed rules of the paper are scorers.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.fingerprint import tokenizer_fingerprint
from vllm_spec_ext.options import MethodOptions
from vllm_spec_ext.proposers.base import (
    EMPTY_DRAFT,
    BaseProposer,
    Draft,
    EngineHandle,
    IntArray,
    LateDrafter,
    Needs,
    RequestStep,
    StepContext,
    StepOutcome,
    TargetFacts,
    proposer,
)
from vllm_spec_ext.proposers.blockwise.late_heads import LateHeads, why_not_late
from vllm_spec_ext.proposers.blockwise.options import BlockwiseOptions
from vllm_spec_ext.proposers.blockwise.without_adapters import without_adapters
from vllm_spec_ext.proposers.draft_tree import is_branching
from vllm_spec_ext.proposers.payoff import branches
from vllm_spec_ext.proposers.payoff.node_payoff import NodePayoff
from vllm_spec_ext.proposers.text_index.copied_tokens import copied_tokens
from vllm_spec_ext.proposers.text_index.occurrence_index import warm_up
from vllm_spec_ext.proposers.text_index.request_texts import RequestTexts

if TYPE_CHECKING:
    import torch

    from vllm_spec_ext.proposers.blockwise.heads import BlockwiseHeads, TokensSeen

# Not a seed that an engine or a request has: the same noise in draft and target would make the
# target agree with what it never drew.
_SEED = 0x5EC0D4A7


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

    needs = Needs(hidden_states=True)
    steps_a_turn = 1  # an exchange costs nothing

    def __init__(self, options: MethodOptions) -> None:
        """Keep the options; the heads are loaded in :meth:`start`."""
        super().__init__(options)
        self._options = cast(BlockwiseOptions, options)
        self.needs = Needs(hidden_states=True, distributions=self._options.draw)
        self._heads: BlockwiseHeads | None = None
        self._target: Any = None
        self.late: LateHeads | None = None  # drafts alone, where the scheduler does not wait
        self._payoff = NodePayoff()
        self._texts = RequestTexts()  # with copy_match

    @classmethod
    def check(cls, options: MethodOptions, target: TargetFacts) -> None:
        """Heads that are missing, damaged, too few, or of another target; raises SpecExtError."""
        from vllm_spec_ext.proposers.blockwise.heads import check_heads

        asked = cast(BlockwiseOptions, options)
        tokenizer = target.load_tokenizer()
        check_heads(
            asked.model,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            fingerprint=None if tokenizer is None else tokenizer_fingerprint(tokenizer),
            num_draft_tokens=None
            if asked.tree or target.is_level
            else target.num_speculative_tokens,
        )

    @classmethod
    def drafter_folder(cls, options: MethodOptions) -> Path:
        """Where the heads are; raises SpecExtError if there are none."""
        from vllm_spec_ext.proposers.blockwise.heads import check_heads

        return check_heads(cast(BlockwiseOptions, options).model)[0]

    @classmethod
    def drafter_files(cls, options: MethodOptions) -> Mapping[str, bytes]:
        """The heads' configuration and weights; raises SpecExtError if there are none."""
        from vllm_spec_ext.proposers.blockwise.heads import CONFIG_NAME, WEIGHTS_NAME

        folder = cls.drafter_folder(options)
        return {name: (folder / name).read_bytes() for name in (CONFIG_NAME, WEIGHTS_NAME)}

    def read_weights(self, folder: Path) -> "BlockwiseHeads":
        """Heads of the same shape and vocabulary; raises SpecExtError for others."""
        from vllm_spec_ext.proposers.blockwise.heads import load_heads, same_shape

        own = cast("BlockwiseHeads", self._heads)
        _, heads = load_heads(folder)
        if not same_shape(own, heads):
            raise SpecExtError(f"the heads in {folder} have another shape or vocabulary")
        return heads.to(device=own.b_out.device, dtype=own.b_out.dtype)

    def use_weights(self, weights: object) -> None:
        """Draft with these heads."""
        self._heads = cast("BlockwiseHeads", weights)

    def start(self, engine: EngineHandle) -> None:
        """Load the heads onto the target's device and check that they belong to it.

        Raises:
            SpecExtError: Missing or damaged heads, another target, more draft tokens than heads.
        """
        import torch

        from vllm_spec_ext.proposers.blockwise.draft_logits import DraftLogits
        from vllm_spec_ext.proposers.blockwise.heads import load_heads

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
            num_draft_tokens=None
            if self._options.tree or engine.is_level
            else engine.num_speculative_tokens,
        )
        self._embed: Any = without_adapters(engine.target, "embed_input_ids")
        if self._embed is None and (config.condition_on_next or config.copy_match):
            raise SpecExtError(
                f"the heads in {self._options.model} use embeddings of tokens, but {engine.model} "
                "offers no embed_input_ids(); train with --no-condition-on-next --copy-match 0"
            )
        self._target = engine.target
        self._heads = heads if engine.device is None else heads.to(engine.device)
        self._random = torch.Generator(engine.device or "cpu").manual_seed(_SEED)
        self._logits = DraftLogits(
            engine.target, self._heads.draft_vocab, engine.vocab_size, engine.pack
        )
        if config.copy_match:
            warm_up()
        if self._options.tree:
            one = np.log(np.full((1, 1), 0.5, np.float32))
            self._tree(one, np.zeros((1, 1), np.int32), 1, -math.inf)
            branches.warm_up()

    @classmethod
    def drafts_late(cls, options: MethodOptions) -> bool:
        """Chains of the heads' best tokens."""
        return why_not_late(cast(BlockwiseOptions, options)) is None

    def late_drafter(self, engine: EngineHandle) -> LateDrafter | str:
        """The heads themselves, reading what is on the device."""
        config = cast("BlockwiseHeads", self._heads).config
        reason = why_not_late(self._options)
        return LateHeads(self, config, engine.num_speculative_tokens) if reason is None else reason

    def propose(self, step: StepContext) -> list[Draft]:
        """One draft per request; empty where there is no room."""
        import torch

        if self.late is not None:
            return self.late.drafted(step.requests)
        drafts = [EMPTY_DRAFT] * len(step.requests)
        rows = [i for i, request in enumerate(step.requests) if request.room > 0]
        if self._heads is None or step.hidden_states is None or not rows:
            return drafts
        for row in rows:
            self._payoff.forget(step.requests[row].request_id)  # a draft that had no outcome
        confidence = self._confidence(step.min_probability)
        if confidence > 1.0:
            return drafts
        with torch.inference_mode():
            logits, shown = self._asked_heads(step, rows)
            if logits is None:
                return drafts
            tokens, log_probs = self._candidates(logits, shown, confidence > 0.0)
        limit = math.log(confidence) if confidence > 0.0 else -math.inf
        for i, row in enumerate(rows):
            request = step.requests[row]
            if self._options.tree:
                draft = self._tree(log_probs[i], tokens[i], request.room, limit)
                if self._options.adaptive_length:
                    draft = branches.without_dear_branches(draft, step, self._payoff.acceptance)
            elif self._options.draw and request.may_be_drawn:
                own = None if shown is None else shown[i]
                draft = self._drawn(logits[i], own, request, confidence)
            else:
                draft = self._chain(log_probs[i, :, 0], tokens[i, :, 0], request.room, limit)
            drafts[row] = draft
            if draft.path_probs is not None:
                self._payoff.drafted(request.request_id, draft.path_probs)
        return drafts

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Learn how far the heads' probabilities can be trusted."""
        for outcome in outcomes:
            self._payoff.verified(outcome.request_id, outcome.num_drafted, outcome.accepted)

    def finish(self, request_ids: Sequence[str]) -> None:
        """Forget the outcomes that will not come, and the texts."""
        for request_id in request_ids:
            self._payoff.forget(request_id)
            self._texts.forget(request_id)

    def _confidence(self, min_probability: float | None) -> float:
        """Least path probability of a node that is drafted; 0 drafts all."""
        least = self._options.min_confidence
        if self._options.adaptive_length and min_probability is not None:
            least = max(least, self._payoff.confidence(min_probability))
        return least

    def _asked_heads(
        self, step: StepContext, rows: list[int]
    ) -> "tuple[torch.Tensor | None, torch.Tensor | None]":
        """As :meth:`head_logits`, of some of the requests."""
        import torch

        hidden = cast("torch.Tensor", step.hidden_states)
        if len(rows) < len(step.requests):
            hidden = hidden[torch.tensor(rows).to(hidden.device)]
        seen = self._seen([step.requests[row] for row in rows], hidden.device)
        return self.head_logits(hidden, seen, max(step.requests[row].room for row in rows))

    def head_logits(
        self, hidden: "torch.Tensor", seen: "TokensSeen", room: int
    ) -> "tuple[torch.Tensor | None, torch.Tensor | None]":
        """What the heads say of the next tokens.

        Args:
            hidden: [n, hidden_size] of the target's final layer.
            seen: By each row.
            room: Most draft tokens of any row.

        Returns:
            [n, depth, columns], on ranks that vLLM gives logits; and what heads are shown,
            [n, depth], if anything.
        """
        heads = cast("BlockwiseHeads", self._heads)
        config = heads.config
        if heads.b_out.dtype != hidden.dtype or heads.b_out.device != hidden.device:
            heads.to(device=hidden.device, dtype=hidden.dtype)
        # The vocabulary projection is most of the cost: leave out heads no request has room for.
        depth = min(config.num_heads, room)
        states = heads(hidden, seen, self._embed)[:, :depth]
        shown = None if seen.shown is None else seen.shown[:, :depth].contiguous()
        flat = None if shown is None else shown.view(-1)
        logits = self._logits(states.reshape(-1, config.hidden_size), flat)
        return None if logits is None else logits.unflatten(0, (-1, depth)), shown

    def tokens(self, places: "torch.Tensor", shown: "torch.Tensor | None") -> "torch.Tensor":
        """Token ids at columns [n, depth, m] of logits that were made with `shown`."""
        flat = None if shown is None else shown.view(-1)
        return self._logits.tokens(places.flatten(0, 1), flat).view_as(places)

    def _seen(self, requests: Sequence[RequestStep], device: "torch.device") -> "TokensSeen":
        """Tokens that the heads see, the copied ones only if these heads do."""
        import torch

        from vllm_spec_ext.proposers.blockwise.heads import TokensSeen

        config = cast("BlockwiseHeads", self._heads).config
        if not config.copy_match:
            last = [int(request.token_ids[-1]) for request in requests]
            return TokensSeen(torch.tensor(last).to(device))
        rows = np.empty((len(requests), 2 + config.num_heads), np.int64)
        for row, request in zip(rows, requests, strict=True):
            found = copied_tokens(self._texts.of(request), config.copy_match, config.num_heads)
            row[0], row[1], row[2:] = request.token_ids[-1], found.length, found.tokens
            if found.tokens.max() >= config.vocab_size:  # what stands for a picture in a prompt
                row[1:] = 0  # as where nothing is found
        return TokensSeen.of_rows(torch.from_numpy(rows).to(device))

    def _candidates(
        self, logits: "torch.Tensor", shown: "torch.Tensor | None", need_probs: bool
    ) -> "tuple[IntArray, np.ndarray[Any, Any]]":
        """Best tokens of the heads and their log-probabilities, [num_rows, depth, m] each.

        A chain without a cut-off needs no probabilities; they are zero then.
        """
        import torch

        from vllm_spec_ext.top_columns import top_log_probs

        if self._options.tree:
            count = min(self._options.candidates, self._logits.num_listed)
            best, places = top_log_probs(logits, count)
        elif need_probs:
            best, places = top_log_probs(logits, 1)
        else:
            places = logits.argmax(dim=-1, keepdim=True)
            best = torch.zeros(places.shape, dtype=torch.float32)
        ids = self.tokens(places, shown)
        # Waits for the device: drafts are scheduled from host memory.
        return ids.to("cpu", torch.int32).numpy(), best.to("cpu", torch.float32).numpy()

    def _chain(
        self, log_probs: "np.ndarray[Any, Any]", tokens: IntArray, room: int, limit: float
    ) -> Draft:
        paths = np.cumsum(log_probs[: min(room, len(tokens))])
        length = int((paths >= limit).sum())  # cumulative log-probabilities only fall
        if not length:
            return EMPTY_DRAFT
        probs = np.exp(paths[:length]).astype(np.float32)
        return Draft(tokens[:length].copy(), path_probs=probs if limit > -math.inf else None)

    def _drawn(
        self,
        logits: "torch.Tensor",
        shown: "torch.Tensor | None",
        request: RequestStep,
        confidence: float,
    ) -> Draft:
        """A chain of draws, of a length that does not depend on what was drawn."""
        import torch

        distributions = (logits[: request.room].float() / request.temperature).softmax(dim=-1)
        # Chance that a target of the same distribution would draw the same token.
        paths = distributions.square().sum(dim=-1).cumprod(dim=0).cpu().numpy()
        length = int((paths >= confidence).sum())
        if not length:
            return EMPTY_DRAFT
        distributions = distributions[:length]
        shown = None if shown is None else shown[:length]
        places = torch.multinomial(distributions, 1, generator=self._random)
        tokens = self._logits.tokens(places, shown).flatten().to("cpu", torch.int32).numpy()
        probs = self._logits.spread(distributions, shown)
        return Draft(tokens, probs=probs, path_probs=paths[:length])

    def _tree(
        self, log_probs: "np.ndarray[Any, Any]", tokens: IntArray, room: int, limit: float
    ) -> Draft:
        from vllm_spec_ext.proposers.blockwise.tree import best_tree, path_log_probs

        log_probs = np.ascontiguousarray(log_probs)
        depths, ranks, parents = best_tree(log_probs, room, limit)
        if not len(depths):
            return EMPTY_DRAFT
        drafted = np.ascontiguousarray(tokens[depths, ranks])
        probs = np.exp(path_log_probs(log_probs, depths, ranks, parents))
        if not is_branching(parents.tolist()):
            return Draft(drafted, path_probs=probs)  # no branch: the plain path is cheaper
        return Draft(drafted, parents, path_probs=probs)


def _hidden_size(target: "torch.nn.Module") -> int | None:
    config: Any = getattr(target, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    size = getattr(config, "hidden_size", None)
    return size if isinstance(size, int) else None
