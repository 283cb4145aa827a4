# SPDX-License-Identifier: Apache-2.0
"""Whether vLLM will find and load this plugin in the processes it starts."""

import os
from importlib.metadata import entry_points

GROUP = "vllm.general_plugins"
NAME = "spec_ext"


def invisible_because() -> str | None:
    """Why vLLM would not load the plugin, with the fix; None if it would."""
    if not entry_points(group=GROUP, name=NAME):
        return (
            f"no entry point {NAME!r} in group {GROUP}; expected this package to be installed, not "
            "only on PYTHONPATH; fix: pip install . (in a checkout)"
        )
    # vLLM 0.32 plugins/__init__.py: if set, only the names listed in it are loaded.
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and NAME not in allowed.split(","):
        listed = ",".join(filter(None, [allowed, NAME]))
        return f"VLLM_PLUGINS={allowed!r} leaves it out; fix: export VLLM_PLUGINS={listed}"
    return None
