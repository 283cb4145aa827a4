# SPDX-License-Identifier: Apache-2.0
"""The vocabulary projection of a draft model, quicker than the model's own where drafts may be."""

import torch

from vllm_spec_ext.engine.packed_projection import packed_projection, rounds
from vllm_spec_ext.proposers.blockwise.draft_logits import plain_rows
from vllm_spec_ext.proposers.records import Projection


@torch.inference_mode()
def quick_projection(module: torch.nn.Module) -> Projection | None:
    """Half the time of the model's own projection on some CPUs; None = ask the model.

    Args:
        module: vLLM's model, with its weights; what it has under other names, or does beside a
            product with its ``lm_head``, is left to it.
    """
    rows = plain_rows(module)
    if rows is None or not rounds(rows):
        return None
    probe = torch.linspace(-1.0, 1.0, rows.shape[1]).unsqueeze(0)
    logits = module.compute_logits(probe)
    if logits is None or logits.shape[-1] > len(rows):
        return None
    rows = rows[: logits.shape[-1]]  # the rest fills up to a round number
    if not torch.allclose(logits.float(), probe @ rows.T, rtol=1e-3, atol=1e-3):
        return None
    return packed_projection(rows)
