# SPDX-License-Identifier: Apache-2.0
"""The target's vocabulary projection, or only its rows for the tokens that heads may draft."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from vllm_spec_ext.proposers.blockwise.without_adapters import without_adapters
from vllm_spec_ext.proposers.records import Projection

# Of a torch module, and of vLLM's embedding and linear layers (its modules are not imported here).
_PLAIN = ("NoneType", "UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")


class DraftLogits:
    """Projects draft states; columns are places in the draft vocabulary."""

    def __init__(
        self,
        target: Any,
        draft_vocab: Tensor | None,
        vocab_size: int,
        pack: Callable[[Tensor], Projection],
    ) -> None:
        """Copy the rows that are needed, where the projection is a plain, whole matrix.

        With tensor parallelism, a quantised projection or scaled logits, the target's own
        projection is asked for all tokens instead, and the columns are picked from its answer.

        Args:
            target: vLLM's model.
            draft_vocab: [m] token ids; None = all tokens.
            vocab_size: The target's.
            pack: The engine's, see ``EngineHandle.pack``.
        """
        self._ask: Any = without_adapters(target, "compute_logits")
        self._vocab_size = vocab_size
        self._ids = None if draft_vocab is None else draft_vocab.long()
        whole = None if draft_vocab is None else plain_rows(target, vocab_size)
        self._project = None if whole is None else pack(whole[self._ids].contiguous())

    def __call__(self, states: Tensor) -> Tensor | None:
        """Logits [n, m] of states [n, hidden_size]; None on ranks that vLLM gives none."""
        if self._project is not None:
            return self._project(states)
        logits: Tensor | None = self._ask(states)
        if logits is None or self._ids is None:
            return logits
        return logits[:, self._ids.to(logits.device)]

    def tokens(self, places: Tensor) -> Tensor:
        """Token ids at these columns."""
        return places if self._ids is None else self._ids.to(places.device)[places]

    def spread(self, distributions: Tensor) -> Tensor:
        """[n, vocab_size] over all tokens, of distributions [n, m] over the draft vocabulary."""
        if self._ids is None:
            return distributions
        whole = distributions.new_zeros(len(distributions), self._vocab_size)
        return whole.index_copy_(1, self._ids.to(distributions.device), distributions)


def plain_rows(target: Any, vocab_size: int = 0) -> Tensor | None:
    """[>= vocab_size, hidden_size] weights whose product with a state is its logits, or None.

    Args:
        target: vLLM's model.
        vocab_size: Tokens that it must have.
    """
    head, processor = getattr(target, "lm_head", None), getattr(target, "logits_processor", None)
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        return None
    if len(weight) < vocab_size or getattr(head, "bias", None) is not None:
        return None
    quantisation = type(getattr(head, "quant_method", None)).__name__
    if quantisation not in _PLAIN or getattr(head, "tp_size", 1) != 1:
        return None
    if getattr(processor, "scale", None) != 1.0 or getattr(processor, "soft_cap", 1.0) is not None:
        return None
    return weight.detach()
