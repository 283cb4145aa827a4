# SPDX-License-Identifier: Apache-2.0
"""What this plugin counts, beside vLLM's own metrics: names and their meaning.

The names do not start with ``vllm:``: vLLM drops every such collector when an engine starts
(v1/metrics/prometheus.py, ``unregister_vllm_metrics``).
"""

PREFIX = "spec_ext:"

COUNTERS = {
    "steps": "Requests' decoding steps, with and without a draft.",
    "emitted_tokens": "Tokens that those steps gave, bonus tokens included.",
    "empty_drafts": "Requests' decoding steps without a draft to verify.",
    "verified_drafts": "Requests' decoding steps with a draft to verify.",
    "drafted_nodes": "Draft tokens (chain tokens or tree nodes) that the proposer made.",
    "verified_nodes": "Draft tokens that the target verified.",
    "accepted_nodes": "Draft tokens that it accepted.",
    "expected_nodes": "Those that were to be expected, by the method's own probabilities, if any.",
    "branching_drafts": "Drafts with branches.",
    "refused_drafts": "Drafts lost because the proposer failed or returned a broken one.",
    "shadow_nodes": "Draft tokens that were only compared with what the target went on to say.",
    "held_back": "Requests' steps in which drafts were limited or left out because they lost time.",
}

MODEL_COUNTERS = {
    "draft_model_forwards": "Forward passes of a draft model, or of the target over a view.",
    "draft_model_rows": "Tokens that were read in them.",
    "draft_model_seconds": "Time of these passes.",
}

SOURCE_COUNTERS = {
    "source_verified_nodes": "Draft tokens that a source named and the target verified.",
    "source_accepted_nodes": "Those that were accepted; a token counts for all of its sources.",
    "source_expected_nodes": "Those that were to be expected, by the method's own probabilities.",
}

STRENGTH_COUNTERS = {
    "strength_verified_nodes": "As of a source, by how strong its evidence was: verified.",
    "strength_accepted_nodes": "Those that were accepted.",
    "strength_expected_nodes": "Those that were to be expected, by the method's own probabilities.",
}
MOST_STRENGTHS = 64
"""Pairs of a source and a strength that are told apart, so that labels stay few."""

TIMES = "drafter_microseconds"
TIMES_TEXT = "Time of the proposer in a step, all requests together."
BUCKETS_US = (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 50_000)

LOSSLESS = "lossless"
LOSSLESS_TEXT = (
    "1 if drafts are verified by a rule that leaves the output as the target's own, else 0."
)

ONLINE_GAUGES = {
    "online_version": "Version of the drafter that is in use; 0 = the weights of the start.",
    "online_version_age_seconds": "Time since it came into use.",
    "online_acceptance": "Draft tokens accepted in a request's step of the version in use.",
    "online_acceptance_at_start": "The same of the weights of the start, on their share of steps.",
    "online_acceptance_before": "The same of the version in use in the last trial.",
    "online_acceptance_after": "The same of the version on trial in the last trial.",
    "online_training_cores": "Cores that the trainer uses on average; 0 = none runs.",
    "online_recorded_positions": "Positions that were recorded since the engine started.",
    "online_lost_positions": "Positions that found no room in memory or on disk.",
}
AGE = "online_version_age_seconds"
