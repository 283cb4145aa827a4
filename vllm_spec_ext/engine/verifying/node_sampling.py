# SPDX-License-Identifier: Apache-2.0
"""Verification by the target's own samples: one draw at every node, then a walk.

Each row of a step (a request's last verified token, or one of its draft nodes) is given to vLLM's
own ``Sampler`` as if it were a request with that node's history, so penalties, bad words, allowed
tokens, minimum length, seeds and log-probabilities mean what they mean in plain decoding.
Field names are those of vLLM 0.32 v1/sample/metadata.py.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.logits_processor.state import LogitsProcessors

from vllm_spec_ext.engine.verifying.draft_batch import DraftBatch
from vllm_spec_ext.engine.verifying.drawn_drafts import (
    DraftDistributions,
    verified_rows,
    verify_drawn,
)
from vllm_spec_ext.engine.verifying.seeded_rows import SeededRows
from vllm_spec_ext.scorers.walk.tree import Walk, walk, walk_samples

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

# [num_rows, vocab] float32 -> ([num_nodes] bool tolerated, [num_nodes] float32 draft logits)
StepRule = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def verify(
    batch: DraftBatch,
    logits: torch.Tensor,  # [num_rows, vocab]
    metadata: "SamplingMetadata",
    sampler: "Sampler",
    rule: StepRule | None = None,
    distributions: Mapping[int, DraftDistributions] | None = None,
) -> tuple[SamplerOutput, Walk]:
    """Draw a token at every row and walk.

    Args:
        batch: Rows and draft nodes of the step.
        logits: The target's logits, rows as in `batch`; may be modified.
        metadata: vLLM's ``SamplingMetadata`` of the requests.
        sampler: vLLM's ``Sampler``, with our :class:`.DistributionSampler` in it.
        rule: A relaxed rule: from the logits, penalties and masks applied, to the nodes it
            tolerates and the draft tokens' logits. None is the lossless rule.
        distributions: Request index -> what its draft was drawn from; not with a rule.

    Returns:
        What vLLM's rejection sampler would return, [num_requests, longest] padded with -1, and the
        accepted nodes.
    """
    expanded = expand_metadata(metadata, batch)
    tolerated, draft_logits, raw = None, None, None
    if rule is not None:
        tolerated, draft_logits = rule(_masked_logits(logits, expanded, sampler))
    if distributions:
        rows = torch.from_numpy(verified_rows(batch, distributions)).to(logits.device)
        sampler.topk_topp_sampler.watch(rows)
    wants_logprobs = metadata.max_num_logprobs is not None or bool(metadata.logprob_token_ids)
    if (rule is not None or distributions) and wants_logprobs:
        raw = logits.to(torch.float32, copy=True)  # the sampler works in place
    sampled = sampler(logits=logits, sampling_metadata=expanded)
    # The walk runs on the host; vLLM's synchronous path waits for these tokens right after anyway.
    choices = sampled.sampled_token_ids.squeeze(-1).cpu().numpy()
    nodes = (batch.parents, batch.tokens, batch.node_starts, choices)
    if tolerated is None or draft_logits is None:
        taken = walk_samples(*nodes)
    else:
        taken = walk(*nodes, tolerated=tolerated, draft_logits=draft_logits)
    if distributions:
        target_distributions = sampler.topk_topp_sampler.take_distributions()
        taken = verify_drawn(batch, distributions, target_distributions, choices, taken)
    expanded.generators.settle(taken.num_accepted, metadata.generators)
    emitted = torch.from_numpy(taken.emitted.astype(np.int32)).to(logits.device)
    logprobs = sampled.logprobs_tensors
    if logprobs is not None:
        rows = torch.from_numpy(emitting_rows(batch, taken)).to(logits.device)
        if raw is None:
            logprobs = LogprobsTensors(*(_take(part, rows) for part in logprobs[:3]))
        else:
            logprobs = _logprobs_of(emitted, raw[rows], metadata, sampler)
    return SamplerOutput(sampled_token_ids=emitted, logprobs_tensors=logprobs), taken


def _masked_logits(
    logits: torch.Tensor, expanded: "SamplingMetadata", sampler: "Sampler"
) -> torch.Tensor:
    """Float32 logits after everything that changes what the target would choose."""
    budgets = expanded.thinking_budget_state_holder
    changes = (
        (budgets is not None and budgets.has_tracked_requests())
        or not expanded.no_penalties
        or expanded.bad_words_token_ids
        or expanded.allowed_token_ids_mask is not None
        or expanded.logitsprocs.non_argmax_invariant
    )
    if not changes:
        return logits.to(torch.float32)
    copied = logits.to(torch.float32, copy=True)
    return sampler.apply_logits_processors(copied, expanded, False)


def counts_tokens(metadata: "SamplingMetadata") -> bool:
    """Whether a request has said fewer than its ``min_tokens``.

    vLLM's rejection sampler masks stop tokens in the last row of a draft by the length before the
    step (0.32 ``Sampler.apply_logits_processors`` with ``predict_bonus_token``): a text would go on
    where plain decoding ends it.
    """
    return any(
        isinstance(processor, MinTokensLogitsProcessor) and bool(processor.min_toks)
        for processor in metadata.logitsprocs.non_argmax_invariant
    )


def _logprobs_of(
    emitted: torch.Tensor, raw: torch.Tensor, metadata: "SamplingMetadata", sampler: "Sampler"
) -> LogprobsTensors:
    """Log-probabilities of tokens that need not be the target's draws, from its raw logits.

    Args:
        emitted: [num_requests, width].
        raw: [num_requests * width, vocab] of the rows that they come from.
        metadata: Of the requests: which are wanted.
        sampler: vLLM's.
    """
    values = raw if sampler.logprobs_mode == "raw_logits" else sampler.compute_logprobs(raw)
    tokens = emitted.flatten().clamp(min=0).to(torch.int64)
    if metadata.logprob_token_ids:
        width = emitted.shape[1]
        wanted = {
            request * width + place: ids
            for request, ids in metadata.logprob_token_ids.items()
            for place in range(width)
        }
        return sampler.gather_specific_token_logprobs(values, wanted, tokens)
    num_logprobs = metadata.max_num_logprobs
    assert num_logprobs is not None
    if num_logprobs < 0:
        num_logprobs = raw.shape[-1]
    return sampler.gather_logprobs(values, num_logprobs, token_ids=tokens)


def _take(part: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return part[rows] if part.numel() else part  # full log-probabilities come without ids or ranks


def emitting_rows(batch: DraftBatch, walk: Walk) -> np.ndarray:
    """[num_requests * width] int64: the row whose draw each emitted token is; 0 for padding."""
    roots = batch.root_rows[:, None]
    width = walk.emitted.shape[1]
    nodes = np.full((len(roots), width), -1, np.int64)
    nodes[:, 1:] = walk.accepted[:, : width - 1]
    return np.where(walk.emitted >= 0, roots + 1 + nodes, 0).reshape(-1)


def expand_metadata(metadata: "SamplingMetadata", batch: DraftBatch) -> "SamplingMetadata":
    """One row of sampling metadata for each row of the step."""
    of_row = torch.from_numpy(batch.request_of_row).to(metadata.repetition_penalties.device)

    def pick(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[of_row]

    output = metadata.output_token_ids
    needs_histories = not metadata.no_penalties or bool(metadata.bad_words_token_ids)
    return replace(
        metadata,
        temperature=pick(metadata.temperature),
        top_p=pick(metadata.top_p),
        top_k=pick(metadata.top_k),
        generators=SeededRows(metadata.generators, batch),
        prompt_token_ids=None if metadata.no_penalties else pick(metadata.prompt_token_ids),
        frequency_penalties=pick(metadata.frequency_penalties),
        presence_penalties=pick(metadata.presence_penalties),
        repetition_penalties=pick(metadata.repetition_penalties),
        # For these alone, and long: vLLM keeps them of thinking budgets, too.
        output_token_ids=_histories(output, batch) if output and needs_histories else [],
        allowed_token_ids_mask=pick(metadata.allowed_token_ids_mask),
        bad_words_token_ids=_by_row(metadata.bad_words_token_ids, batch),
        logitsprocs=_minimum_lengths(metadata.logitsprocs, batch, of_row.device),
        logprob_token_ids=(
            _by_row(metadata.logprob_token_ids, batch) if metadata.logprob_token_ids else None
        ),
        spec_token_ids=None,
    )


def _by_row(by_request: dict[int, Any], batch: DraftBatch) -> dict[int, Any]:
    if not by_request:
        return by_request
    return {
        row: by_request[request]
        for row, request in enumerate(batch.request_of_row.tolist())
        if request in by_request
    }


def _histories(output: Sequence[list[int]], batch: DraftBatch) -> list[list[int]]:
    """Output tokens up to and including each row's own token.

    A request that is still in its prefill has one row and its history as it is.
    """
    histories: list[list[int]] = []
    for request, root in enumerate(batch.root_rows.tolist()):
        histories.append(output[request])
        first, end = batch.node_starts[request : request + 2].tolist()
        for node in range(first, end):
            before = histories[root + 1 + int(batch.parents[node])]
            histories.append([*before, int(batch.tokens[node])])
    return histories


def _minimum_lengths(
    processors: LogitsProcessors, batch: DraftBatch, device: torch.device
) -> LogitsProcessors:
    """vLLM's ``min_tokens`` masks, for rows instead of requests."""
    result = []
    for processor in processors.non_argmax_invariant:
        if not isinstance(processor, MinTokensLogitsProcessor) or not processor.min_toks:
            continue
        rows: list[int] = []
        tokens: list[int] = []
        restored: tuple[list[int], list[int]] = ([], [])
        for row, request in enumerate(batch.request_of_row.tolist()):
            least, output, stops, structured = processor.min_toks.get(request, (0, (), (), False))
            if len(output) + int(batch.depth_of_row[row]) >= least:
                continue
            rows += [row] * len(stops)
            tokens += stops
            if structured:
                restored[0].extend([row] * len(stops))
                restored[1].extend(stops)
        ours = copy.copy(processor)
        ours.logits_slice = _index_pair(rows, tokens, device)
        ours.restore_logits_slice = _index_pair(*restored, device)
        result.append(ours)
    return LogitsProcessors(result)


def _index_pair(
    rows: list[int], tokens: list[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.tensor(rows, dtype=torch.int64, device=device),
        torch.tensor(tokens, dtype=torch.int64, device=device),
    )
