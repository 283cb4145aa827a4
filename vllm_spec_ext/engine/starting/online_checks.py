# SPDX-License-Identifier: Apache-2.0
"""Online distillation as asked for in the front end: refused where it could not work."""

from typing import TYPE_CHECKING

from vllm_spec_ext.errors import SpecExtError
from vllm_spec_ext.online.folder import check_folder, folder_path
from vllm_spec_ext.online.versions import drafter_hash
from vllm_spec_ext.options import MethodOptions, OnlineOptions

if TYPE_CHECKING:
    from vllm_spec_ext.proposers.base import BaseProposer


def check_online(
    online: OnlineOptions,
    method: str,
    proposer: "type[BaseProposer]",
    options: MethodOptions,
    share_unsalted: bool,
) -> None:
    """Refuse what would record nothing, and a folder of another drafter.

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
    check_folder(folder_path(online), method, drafter_hash(proposer.drafter_files(options)))
