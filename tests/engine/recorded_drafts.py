# SPDX-License-Identifier: Apache-2.0
"""What two engines draft, by the tokens before each draft: vLLM's own drafter, and ours.

Of vLLM's drafts it is noted where its head did not read what the definition says, so that its KV
holds something else from there on. Who shares that prefix shares that KV, by the prefix cache.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
from test_greedy_identity import runner_of

Text = tuple[int, ...]


@dataclass
class VllmDrafts:
    """Drafts of vLLM 0.32's runner."""

    drafts: dict[Text, list[int]] = field(default_factory=dict)
    behind_drafts: set[Text] = field(default_factory=set)
    """Made in a step in which some request had drafts to verify."""
    cut_prompts: set[Text] = field(default_factory=set)
    """Prompts up to the end of a chunk, where the head was to read a token of the next chunk."""
    skipped: set[Text] = field(default_factory=set)
    """Texts up to the first token of a step in which the drafter did not run at all."""

    def leans_on(self, text: Text, prefixes: set[Text]) -> bool:
        """Whether a text goes on behind one of these prefixes."""
        return any(text[: len(prefix)] == prefix for prefix in prefixes)


def recorded_by_vllm(engine: Any, patch: pytest.MonkeyPatch) -> VllmDrafts:
    """What vLLM's method drafts from here on."""
    runner, found, calls = runner_of(engine), VllmDrafts(), []
    propose, sample = runner.propose_draft_token_ids, runner.sample_tokens

    def note_call(*arguments: Any) -> Any:
        made = propose(*arguments)
        calls.append((made, arguments[6] is not None))  # spec_decode_metadata
        return made

    def record(*arguments: Any) -> Any:
        calls.clear()
        output = sample(*arguments)
        batch = runner.input_batch
        made, has_drafts = calls[0] if calls else (None, False)
        for row, request_id in enumerate(batch.req_ids):
            new = output.sampled_token_ids[output.req_id_to_index[request_id]]
            text = tuple(batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]].tolist())
            computed = int(batch.num_computed_tokens_cpu[row])
            if made is None:
                found.skipped.add(text[: computed + 1])
            elif not new:
                found.cut_prompts.add(text[: computed + int(runner.num_scheduled_tokens.np[row])])
            else:
                found.drafts[text] = made[row].tolist()
                (found.behind_drafts.add if has_drafts else found.behind_drafts.discard)(text)
        return output

    patch.setattr(runner, "propose_draft_token_ids", note_call)
    patch.setattr(runner, "sample_tokens", record)
    return found


def recorded_by_us(engine: Any, patch: pytest.MonkeyPatch) -> dict[Text, list[int]]:
    """The path that the last model of ``model_paths`` drafts from here on."""
    drafter = runner_of(engine).drafter._proposer
    found: dict[Text, list[int]] = {}
    propose = drafter.propose

    def record(step: Any) -> Any:
        made = propose(step)
        for request, draft in zip(step.requests, made, strict=True):
            path = [int(draft.tokens[node]) for node in drafter._right[request.request_id]]
            found[tuple(request.token_ids.tolist())] = path
        return made

    patch.setattr(drafter, "propose", record)
    return found
