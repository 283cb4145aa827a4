# SPDX-License-Identifier: Apache-2.0
"""Names of proposers, resolved lazily; open to other packages by entry points."""

import pkgutil
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
def _third_party() -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        found.setdefault(entry.name, []).append(entry)
    return found


def names() -> list[str]:
    """All methods that can be asked for, ours first; loads none of them, and never fails.

    Every vLLM in whose environment this package is installed asks whether a method is one of these.
    """
    return [*BUILTIN, *sorted(_third_party().keys() - BUILTIN.keys())]


def load(name: str) -> type[BaseProposer]:
    """The proposer class of a method.

    Raises:
        UnknownNameError: No such method.
        SpecExtError: Its module cannot be imported, or does not hold a decorated proposer; or two
            packages have a method of this name.
    """
    entries = _third_party().get(name, [])
    places = [*filter(None, [BUILTIN.get(name)]), *(entry.value for entry in entries)]
    if len(places) > 1:
        raise SpecExtError(
            f"two proposers are called {name!r}: {' and '.join(places)}; uninstall or "
            "rename all but one"
        )
    if name in BUILTIN:
        builtin: type[BaseProposer] = pkgutil.resolve_name(BUILTIN[name])
        return builtin
    if name not in names():
        raise UnknownNameError("speculative method", name, names(), reason=_of_vllm(name))
    (entry,) = entries
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


def _of_vllm(name: str) -> str | None:
    from vllm_spec_ext.bench.methods import CHECKPOINT_METHODS, OTHER_METHODS, VLLM_METHODS

    if name not in (*VLLM_METHODS, *CHECKPOINT_METHODS, *OTHER_METHODS):
        return None
    return "It is vLLM's own: give it to `vllm serve` or LLM, or compare with it by `bench`."


def info(name: str) -> ProposerInfo:
    """What a method says about itself; raises as :func:`load`."""
    return load(name).info
