# SPDX-License-Identifier: Apache-2.0
"""Online distillation as asked for in the front end: refused where it could not work."""

import sys
from typing import TYPE_CHECKING

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.online.folder import check_folder, folder_path
from vllm_spec_ext.online.student import READ_TARGETS
from vllm_spec_ext.online.target_ends import check_target
from vllm_spec_ext.online.versions import drafter_hash
from vllm_spec_ext.options import MethodOptions, OnlineOptions

if TYPE_CHECKING:
    from vllm.config import ModelConfig

    from vllm_spec_ext.proposers.base import BaseProposer


def is_on_ray(backend: object) -> bool:
    """Whether the working directory is Ray's.

    Args:
        backend: vLLM's ``distributed_executor_backend``. Ray's own replicas and workers choose
            others, too (2.60 on CPUs, or with one device).
    """
    if backend == "ray":
        return True
    if "ray" not in sys.modules:
        return False
    import ray

    if not ray.is_initialized():
        return False
    process = ray.get_runtime_context()  # a driver is neither, and has a directory of its own
    return process.get_actor_id() is not None or process.get_task_id() is not None


def check_online(
    online: OnlineOptions,
    method: str,
    proposer: "type[BaseProposer]",
    options: MethodOptions,
    share_unsalted: bool,
    target: "ModelConfig",
    *,
    on_ray: bool,
) -> None:
    """Refuse what would record nothing, and a folder of another drafter.

    Args:
        online: What was asked for.
        method: That learns.
        proposer: Its class.
        options: Its options.
        share_unsalted: As resolved for this engine.
        target: vLLM's configuration of the target.
        on_ray: As of :func:`is_on_ray`; a relative folder leads elsewhere there.

    Raises:
        SpecExtError: With what to change.
    """
    if online.record == "unsalted" and not share_unsalted:
        raise SpecExtError(
            "online: nothing would be recorded: on a server requests share nothing, with or "
            "without a cache_salt, unless the operator says so. If its clients may train one "
            'drafter, add "share_unsalted": true (requests without a salt) or '
            '"record": "all" to online (all requests)'
        )
    if on_ray and not folder_path(online).is_absolute():
        raise SpecExtError(
            f"online: found the folder {online.folder!r}, expected an absolute path: Ray's workers "
            "have a working directory of their own"
        )
    if method in READ_TARGETS:
        check_target(target.model, target.hf_config)
    check_folder(folder_path(online), method, drafter_hash(proposer.drafter_files(options)))
