# SPDX-License-Identifier: Apache-2.0
"""Draft lengths beside LoRA adapters, for which vLLM wants room for all drafts in one step."""

import copy
import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from vllm_spec_ext.engine.starting.given_arguments import usage_context
from vllm_spec_ext.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig
    from vllm.config.parallel import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.spec_ext")


def leave_room_for_adapters(
    sizes: tuple[int, int], method: str, vllm_options: MutableMapping[str, Any], *, is_given: bool
) -> None:
    """Shorten a method's usual drafts to what a step has room for.

    With LoRA a step must hold a full draft of every request that may run (0.32
    ``EngineArgs.create_engine_config``).

    Args:
        sizes: Of :func:`batch_limits`.
        method: Ours, for messages.
        vllm_options: With ``num_speculative_tokens``; changed.
        is_given: The user asked for as many.

    Raises:
        UnsupportedError: There is no room for what was asked for, or for any draft.
    """
    tokens, seqs = sizes
    wanted, room = vllm_options["num_speculative_tokens"], tokens // seqs - 1
    if wanted <= room:
        return
    if is_given or room < 1:
        each = (wanted if is_given else 1) + 1
        others = [f"lower --max-num-seqs to {tokens // each}"] if tokens >= each else []
        others += [f"lower num_speculative_tokens to {room}"] if room >= 1 else []
        raise UnsupportedError(
            f"{method} with LoRA needs steps of max_num_seqs * (num_speculative_tokens + 1) "
            f"tokens: found max_num_seqs={seqs}, num_speculative_tokens={wanted} and "
            f"max_num_batched_tokens={tokens}, expected at least {seqs * each} of these; raise "
            + ", or ".join(["--max-num-batched-tokens", *others])
        )
    vllm_options["num_speculative_tokens"] = room
    logger.info(
        "vllm-spec-ext: with LoRA a step of %d tokens has room for %d draft tokens of each of %d "
        "requests, so drafts are no longer than that; a larger --max-num-batched-tokens or a "
        "smaller --max-num-seqs makes room for %d",
        tokens,
        room,
        seqs,
        wanted,
    )


def batch_limits(
    args: "EngineArgs", model: "ModelConfig", parallel: "ParallelConfig"
) -> tuple[int, int]:
    """Tokens and requests of a step, by vLLM's defaults where the user says nothing.

    vLLM settles these behind the drafts' length (0.32 ``EngineArgs.create_engine_config``).
    """
    settled = copy.copy(args)
    settled._set_default_max_num_seqs_and_batched_tokens_args(usage_context(), model, parallel)
    tokens, seqs = settled.max_num_batched_tokens, settled.max_num_seqs
    assert tokens is not None
    assert seqs is not None
    return tokens, seqs
