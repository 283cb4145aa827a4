# SPDX-License-Identifier: Apache-2.0
"""From a validated rule to a scorer that runs."""

import torch

from vllm_spec_ext.scorers.options import (
    AnyOfRule,
    DistanceRule,
    MinBlockRule,
    ScorerOptions,
    ToleranceRule,
    TopKRule,
)
from vllm_spec_ext.scorers.parse import check_rule, is_strict
from vllm_spec_ext.scorers.rules.any_of import AnyOf
from vllm_spec_ext.scorers.rules.base import Scorer, Verification
from vllm_spec_ext.scorers.rules.distance import Distance, id_distance
from vllm_spec_ext.scorers.rules.distance_table import load_metric
from vllm_spec_ext.scorers.rules.exact import Exact
from vllm_spec_ext.scorers.rules.min_block import MinBlock
from vllm_spec_ext.scorers.rules.tolerance import Tolerance
from vllm_spec_ext.scorers.rules.top_k import TopK


def _build(rule: ScorerOptions, vocab_size: int | None) -> Scorer:
    if is_strict(rule):
        return Exact()
    if isinstance(rule, TopKRule):
        return TopK(rule.k)
    if isinstance(rule, ToleranceRule):
        return Tolerance(rule.beta, rule.tau)
    if isinstance(rule, MinBlockRule):
        return MinBlock(rule.length)
    if isinstance(rule, DistanceRule):
        metric = id_distance if rule.table is None else load_metric(rule.table, vocab_size)
        return Distance(rule.epsilon, metric)
    assert isinstance(rule, AnyOfRule)
    return AnyOf(tuple(_build(member, vocab_size) for member in rule.rules))


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
    return Exact() if options is None else _build(options, vocab_size)


def warm_up(scorer: Scorer) -> None:
    """Compile a rule's kernels (about a second on a cold cache) before the first request."""
    nodes = torch.zeros(1, dtype=torch.int64)
    scorer.tolerated(
        Verification(
            logits=torch.zeros(1, 4),
            draft_token_ids=nodes,
            depths=nodes,
            request_index=nodes,
            exact_only=nodes.bool(),
        )
    )
