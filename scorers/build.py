# SPDX-License-Identifier: Apache-2.0
"""From a validated rule to a scorer that runs."""

import torch

from vllm_spec_ext.scorers.options import ScorerOptions
from vllm_spec_ext.scorers.parse import check_rule
from vllm_spec_ext.scorers.registry import RULES
from vllm_spec_ext.scorers.rules.base import Scorer, Verification
from vllm_spec_ext.scorers.rules.exact import Exact


def build_scorer(
    options: ScorerOptions | None,
    allow_lossy: bool = False,
    vocab_size: int | None = None,
    num_speculative_tokens: int | None = None,
) -> Scorer:
    """The engine's acceptance rule.

    Args:
        options: The rule; None is the exact one.
        allow_lossy: The user's consent to output that differs from the target's own.
        vocab_size: Width of the target's logits, for checks; None where it is not known yet.
        num_speculative_tokens: Longest draft, for checks; None where it is not known yet.

    Returns:
        A scorer; :class:`Exact` for every rule whose parameters are at their strict end.

    Raises:
        UnsupportedError: A lossy rule without ``allow_lossy``.
        SpecExtError: Parameters that contradict each other or the model, or a bad metric.
    """
    check_rule(options, allow_lossy, vocab_size, num_speculative_tokens)
    return scorer_of(options, vocab_size)


def scorer_of(options: ScorerOptions | None, vocab_size: int | None) -> Scorer:
    """As :func:`build_scorer`, of a rule that has been checked."""
    if options is None or options.is_strict:
        return Exact()
    return RULES[options.type].load_scorer().of(options, vocab_size)


def warm_up(scorer: Scorer) -> None:
    """Compile a rule's kernels (about a second on a cold cache) before the first request."""
    from vllm_spec_ext.scorers.rules.ranking import BLOCK

    nodes = torch.zeros(1, dtype=torch.int64)
    scorer.tolerated(
        Verification(
            logits=torch.zeros(1, BLOCK + 1),  # small vocabularies go another way
            draft_token_ids=nodes,
            depths=nodes,
            request_index=nodes,
            exact_only=nodes.bool(),
        )
    )
