# SPDX-License-Identifier: Apache-2.0
"""Names of proposers, resolved lazily; open to other packages by entry points."""

import importlib
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from vllm_spec_ext.errors import SpecExtError, UnknownNameError
from vllm_spec_ext.proposers.base import BaseProposer, ProposerInfo

ENTRY_POINT_GROUP = "vllm_spec_ext.proposers"

# name -> "module:Class", in the order in which lists and docs show them; the class carries its own
# ProposerInfo, from which all else is made.
BUILTIN = {
    "auto": "vllm_spec_ext.proposers.auto:Auto",
    "input_copy": "vllm_spec_ext.proposers.input_copy:InputCopy",
    "adaptive_ngram": "vllm_spec_ext.proposers.adaptive_ngram:AdaptiveNgram",
    "suffix_tree": "vllm_spec_ext.proposers.suffix_tree:SuffixTree",
    "recycling": "vllm_spec_ext.proposers.recycling:Recycling",
    "blockwise": "vllm_spec_ext.proposers.blockwise:Blockwise",
    "nar": "vllm_spec_ext.proposers.nar:Nar",
    "small_model": "vllm_spec_ext.proposers.small_model:SmallModel",
    "token_tree": "vllm_spec_ext.proposers.token_tree:TokenTree",
    "cascade": "vllm_spec_ext.proposers.cascade:Cascade",
    "cache_view": "vllm_spec_ext.proposers.cache_view:CacheView",
}


@cache
def _third_party() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name in BUILTIN or entry.name in found:
            other = BUILTIN.get(entry.name) or found[entry.name].value
            raise SpecExtError(
                f"two proposers are called {entry.name!r}: {other} and {entry.value}; "
                "uninstall or rename one of them"
            )
        found[entry.name] = entry
    return found


def names() -> list[str]:
    """All methods that can be asked for, ours first; loads none of them."""
    return [*BUILTIN, *sorted(_third_party())]


def load(name: str) -> type[BaseProposer]:
    """The proposer class of a method.

    Raises:
        UnknownNameError: No such method.
        SpecExtError: Its module cannot be imported, or does not hold a decorated proposer.
    """
    if name in BUILTIN:
        module, _, attribute = BUILTIN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    if name not in names():
        raise UnknownNameError("speculative method", name, names())
    entry = _third_party()[name]
    try:
        cls = entry.load()
    except Exception as error:
        raise SpecExtError(
            f"proposer {name!r} ({entry.value}) cannot be imported: {error}"
        ) from error
    found = getattr(cls, "info", None)
    if not isinstance(found, ProposerInfo) or found.name != name:
        raise SpecExtError(
            f"entry point {name!r} of group {ENTRY_POINT_GROUP} points to {entry.value}, which is "
            f"not a class decorated with @proposer({name!r}, ...)"
        )
    return cls


def info(name: str) -> ProposerInfo:
    """What a method says about itself; raises as :func:`load`."""
    return load(name).info
