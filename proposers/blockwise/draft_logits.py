# SPDX-License-Identifier: Apache-2.0
"""The target's vocabulary projection, or only its rows for the tokens that may be drafted."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from vllm_spec_ext.proposers.blockwise.without_adapters import without_adapters
from vllm_spec_ext.proposers.draft_columns import DraftColumns
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
        self._columns = self._rows = self._project = None
        if draft_vocab is not None:
            self._columns = DraftColumns(draft_vocab, vocab_size)
            self._rows = plain_rows(target, vocab_size)
        if self._columns is not None and self._rows is not None:
            self._project = pack(self._rows[self._columns.ids].contiguous())

    def __call__(self, states: Tensor, shown: Tensor | None = None) -> Tensor | None:
        """Logits of states; None on ranks that vLLM gives none.

        Args:
            states: [n, hidden_size].
            shown: [n] int64 token that each row is shown, -1 = none.

        Returns:
            [n, m]; with tokens that are shown [n, m + 1] (:mod:`..draft_columns`).
        """
        columns = self._columns
        if columns is not None and self._rows is not None and self._project is not None:
            logits = self._project(states)
            if shown is None:
                return logits
            rows = self._rows[shown.clamp(min=0)]
            return columns.append(logits, (states.float() * rows.float()).sum(-1), shown)
        whole: Tensor | None = self._ask(states)
        if whole is None or columns is None:
            return whole
        logits = whole[:, columns.ids]
        if shown is None:
            return logits
        own = whole.gather(1, shown.clamp(min=0).unsqueeze(1)).squeeze(1)
        return columns.append(logits, own, shown)

    @property
    def num_listed(self) -> int:
        """Tokens that any row may draft, and so the most candidates of a row.

        One more could be the column of a row that is shown nothing, or what is listed.
        """
        return self._vocab_size if self._columns is None else len(self._columns)

    def places(self, shown: Tensor) -> Tensor:
        """[n] columns of shown tokens [n]; below 0 where nothing is shown."""
        return shown if self._columns is None else self._columns.places(shown, shown)

    def tokens(self, places: Tensor, shown: Tensor | None = None) -> Tensor:
        """[n, ...] token ids at columns [n, ...] of logits that were made with `shown` [n]."""
        return places if self._columns is None else self._columns.tokens(places, shown)

    def spread(self, distributions: Tensor, shown: Tensor | None = None) -> Tensor:
        """[n, vocab_size] over all tokens, of distributions over the columns of such logits."""
        if self._columns is None:
            return distributions
        listed = len(self._columns)
        whole = distributions.new_zeros(len(distributions), self._vocab_size)
        whole.index_copy_(1, self._columns.ids, distributions[:, :listed])
        if shown is not None:
            whole.scatter_add_(1, shown.clamp(min=0).unsqueeze(1), distributions[:, listed:])
        return whole


def plain_rows(target: Any, vocab_size: int = 0) -> Tensor | None:
    """[>= vocab_size, hidden_size] weights whose product with a state is its logits, or None.

    Args:
        target: vLLM's model; of one that sees or hears the part that writes, where that has the
            projection.
        vocab_size: Tokens that it must have.
    """
    if getattr(target, "lm_head", None) is None:
        target = getattr(target, "get_language_model", lambda: target)()
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
