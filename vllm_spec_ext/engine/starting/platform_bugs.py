# SPDX-License-Identifier: Apache-2.0
"""Defects of supported vLLM versions that would make a lossless method lossy, found by probing."""

import logging

import torch

logger = logging.getLogger("vllm.spec_ext")


def chain_sampling_is_broken(device: torch.device) -> bool:
    """Whether vLLM's rejection sampler reads wrong sampling parameters on this device.

    On vLLM 0.32's CPU platform ``expand_batch_to_tokens`` writes its result into a converted copy
    (``cpu_triton_utils._expand_kernel_impl``), so temperature, top-k and top-p of draft rows are
    uninitialised memory. Our methods then verify sampled chains by the target's own samples
    instead, as they do with trees.
    """
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    values = torch.tensor([0.25, 0.75], device=device)
    ends = torch.tensor([2, 5], dtype=torch.int32, device=device)
    expected = values[torch.tensor([0, 0, 1, 1, 1], device=device)]
    broken = not torch.equal(expand_batch_to_tokens(values, ends, 5), expected)
    if broken:
        logger.info(
            "vllm-spec-ext: this vLLM's rejection sampler misreads sampling parameters on %s; "
            "sampled requests are verified by the target's own samples",
            device.type,
        )
    return broken
