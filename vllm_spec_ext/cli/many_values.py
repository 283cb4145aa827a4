# SPDX-License-Identifier: Apache-2.0
"""Flags that take several values after one name, as argparse's do: ``--prompts a b``."""

from collections.abc import Collection, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup


def repeat_flags(words: Sequence[str], flags: Collection[str]) -> list[str]:
    """``--prompts a b`` as ``--prompts a --prompts b``: click gives a flag one value only."""
    repeated: list[str] = []
    flag, num_values = "", 0
    for word in words:
        if word.startswith("-"):
            flag, num_values = word if word in flags else "", 0
        elif flag:
            repeated += [flag] * (num_values > 0)
            num_values += 1
        repeated.append(word)
    return repeated


class ManyValues(TyperCommand):
    """Accepts several values after a flag that may be repeated."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As click does, after repeating the flags."""
        return super().parse_args(ctx, repeat_flags(args, _lists(self.params)))


class ManyValuesGroup(TyperGroup):
    """The same for a command that has commands of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As click does, after repeating the flags."""
        return super().parse_args(ctx, repeat_flags(args, _lists(self.params)))


def _lists(options: Sequence[Any]) -> list[str]:
    return [flag for option in options if option.multiple for flag in option.opts]
