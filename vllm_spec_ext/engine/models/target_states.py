# SPDX-License-Identifier: Apache-2.0
"""The target's hidden states that draft models read: of which layers, and of which rows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.errors import UnsupportedError, shown

if TYPE_CHECKING:
    import torch

    from vllm_spec_ext.engine.models.draft_config import DraftConfig
    from vllm_spec_ext.engine.step import Step


def state_rows(
    step: "Step", starts: Sequence[int], new_tokens: Sequence[Sequence[int]]
) -> list[NDArray[np.int64]]:
    """Rows of a step that have the states of tokens which are certain now, in order of these.

    Rows of rejected tokens are left out; those of an accepted path through a draft tree lie apart.

    Args:
        step: After its verification.
        starts: First row of each request.
        new_tokens: Of each request; empty in an unfinished prefill.
    """
    found = []
    for row, (start, tokens) in enumerate(zip(starts, new_tokens, strict=True)):
        draft = step.drafts[row]
        num_known = int(step.num_scheduled[row]) - len(draft)
        accepted = step.accepted_nodes(row, max(0, len(tokens) - 1)) if draft else ()
        rows = np.arange(start, start + num_known + len(accepted), dtype=np.int64)
        if accepted:
            rows[num_known:] = start + num_known + np.asarray(accepted, np.int64)
        found.append(rows)
    return found


def default_layers(target: "torch.nn.Module") -> tuple[int, ...]:
    """What vLLM's class of the target says where a checkpoint names no layers."""
    layers: tuple[int, ...] = target.get_eagle3_default_aux_hidden_state_layers()
    return layers


def layers_by_model(
    drafts: "Sequence[DraftConfig]", default: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Layers of the target whose output each head reads, ascending.

    Args:
        drafts: The heads.
        default: What the target says where a checkpoint does not.

    Raises:
        UnsupportedError: A head is made for another number of states.
    """
    found: list[tuple[int, ...]] = []
    for draft in drafts:
        facts = draft.reads
        assert facts is not None
        if not facts.num_states:
            found.append(())
            continue
        layers = tuple(sorted(set(facts.layers or default)))
        if len(layers) != facts.num_states:
            raise UnsupportedError(
                f"EAGLE-3 checkpoint {draft.name} ({shown(draft.model_config.model)}): found "
                f"{len(layers)} layers of the target, {list(layers)}, expected "
                f"{facts.num_states} different ones; name them in its config.json as "
                "eagle_aux_hidden_state_layer_ids"
            )
        found.append(layers)
    return found


def pick(
    hidden_states: "torch.Tensor",
    aux_hidden_states: "Sequence[torch.Tensor] | None",
    layers: Sequence[int],
    wanted: Sequence[int],
) -> "list[torch.Tensor]":
    """What one head reads of a step.

    Args:
        hidden_states: [rows, hidden] of the final layer.
        aux_hidden_states: [rows, hidden] of each of `layers`.
        layers: That the target puts out, ascending.
        wanted: Those of the head; none = the final one.
    """
    if not wanted:
        return [hidden_states]
    assert aux_hidden_states is not None
    return [aux_hidden_states[layers.index(layer)] for layer in wanted]
