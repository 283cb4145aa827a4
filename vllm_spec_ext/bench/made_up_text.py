# SPDX-License-Identifier: Apache-2.0
"""Sentences for prompts that are made here: simple, true of nothing, and seldom twice the same."""

import random

_NAMES = ("Anna", "Boris", "Chloe", "Dmitri", "Elena", "Farid", "Greta", "Hugo")
_DEEDS = ("carried", "sold", "painted", "found", "repaired", "hid", "borrowed", "weighed")
_KINDS = ("old", "green", "broken", "heavy", "silver", "wooden", "tiny", "noisy")
_THINGS = ("clock", "boat", "lamp", "violin", "ladder", "kettle", "map", "bicycle")
_PLACES = ("near the harbour", "behind the mill", "on the bridge", "at the market", "in the attic")
_TIMES = ("before dawn", "on Tuesday", "after the storm", "last winter", "at noon")


def sentence(chance: random.Random) -> str:
    """One of 102,400, about a dozen tokens long."""
    name, deed, kind, thing, place, time = map(
        chance.choice, (_NAMES, _DEEDS, _KINDS, _THINGS, _PLACES, _TIMES)
    )
    return f"{name} {deed} the {kind} {thing} {place} {time}."
