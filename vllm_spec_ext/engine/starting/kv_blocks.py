# SPDX-License-Identifier: Apache-2.0
"""How many tokens a KV block has on a CPU, where drafts copy blocks or look at single ones.

vLLM takes 128 there (0.32 ``CpuPlatform.check_and_update_config``; since 0.33 only once the model
is loaded, ``update_block_size_for_backend``), 16 elsewhere. Scratch blocks and copies for branches
take four times as much memory and time with 128 as with 32, for nothing: attention over blocks of
32 was measured to be as fast. Workers of several platforms choose the size of blocks after the
engine was configured, and the scheduler takes theirs over (vLLM 0.32
``EngineCore._initialize_kv_caches``); so does ours.
"""

import logging
from typing import TYPE_CHECKING

from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.spec_ext")

_CPU_DEFAULT = 128
_UNSAID = (_CPU_DEFAULT, 16)  # before a runner is built, in vLLM 0.32 and 0.33
_SMALLER = 32  # vLLM's kernels for CPUs prefer multiples of it
_OTHER_DEFAULT = 16


def expected_block_size(args: "EngineArgs") -> int:
    """Tokens a block that an engine with scratch blocks will have, as far as arguments tell."""
    return args.block_size or (_SMALLER if current_platform.is_cpu() else _OTHER_DEFAULT)


def choose_block_size(config: "VllmConfig") -> None:
    """Make blocks smaller on a CPU if nobody has asked for their size; before a runner is built.

    Args:
        config: A worker's; changed in place. Models whose attention wants other blocks (latent
            attention, or another size than the usual ones) keep theirs.
    """
    cache = config.cache_config
    is_free = not cache.user_specified_block_size and not config.model_config.use_mla
    if is_free and cache.block_size in _UNSAID:
        cache.block_size = _SMALLER
        cache.user_specified_block_size = True  # else vLLM 0.33 chooses again
        logger.info(
            "vllm-spec-ext: KV blocks of %d tokens, not %d, as drafts copy them; --block-size "
            "chooses otherwise",
            _SMALLER,
            _CPU_DEFAULT,
        )
