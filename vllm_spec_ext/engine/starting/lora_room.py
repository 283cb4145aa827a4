# SPDX-License-Identifier: Apache-2.0
"""Draft lengths beside LoRA adapters, for which vLLM wants room for all drafts in one step."""

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from vllm_spec_ext.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.spec_ext")


def leave_room_for_adapters(
    args: "EngineArgs", method: str, vllm_options: MutableMapping[str, Any], *, is_given: bool
) -> None:
    """Shorten a method's usual drafts to what a step has room for.

    With LoRA a step must hold a full draft of every request that may run (0.32
    ``EngineArgs.create_engine_config``).

    Args:
        args: ``EngineArgs``.
        method: Ours, for messages.
        vllm_options: With ``num_speculative_tokens``; changed.
        is_given: The user asked for as many.

    Raises:
        UnsupportedError: There is no room for what was asked for, or for any draft.
    """
    if not args.enable_lora:
        return
    tokens, seqs = batch_limits(args)
    wanted, room = vllm_options["num_speculative_tokens"], tokens // seqs - 1
    if wanted <= room:
        return
    if is_given or room < 1:
        each = (wanted if is_given else 1) + 1
        shorter = f", or num_speculative_tokens to {room}" if room >= 1 else ""
        raise UnsupportedError(
            f"{method} with LoRA needs steps of max_num_seqs * (num_speculative_tokens + 1) "
            f"tokens: found max_num_seqs={seqs}, num_speculative_tokens={wanted} and "
            f"max_num_batched_tokens={tokens}, expected at least {seqs * each} of these; raise "
            f"--max-num-batched-tokens, lower --max-num-seqs to {max(1, tokens // each)}{shorter}"
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


def batch_limits(args: "EngineArgs") -> tuple[int, int]:
    """Tokens and requests of a step, by vLLM's defaults where the user says nothing.

    (vLLM 0.32 ``EngineArgs._set_default_max_num_seqs_and_batched_tokens_args``, which runs later.)
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    usual_tokens, usual_seqs = args.get_batch_defaults(args.tensor_parallel_size)
    is_server = isinstance(args, AsyncEngineArgs)
    context = UsageContext.OPENAI_API_SERVER if is_server else UsageContext.LLM_CLASS
    tokens = args.max_num_batched_tokens or usual_tokens[context]
    return tokens, args.max_num_seqs or min(usual_seqs[context], tokens)
