# SPDX-License-Identifier: Apache-2.0
"""Errors for users: each says what was found, what was expected and how to fix it."""

import difflib
from collections.abc import Iterable


class SpecExtError(ValueError):
    """Bad input to this plugin; the message is meant for the person who typed it."""


class UnknownNameError(SpecExtError):
    """A name that does not exist, with the nearest one that does."""

    def __init__(
        self, kind: str, name: str, valid: Iterable[str], *, renamed: str | None = None
    ) -> None:
        """Compose the message.

        Args:
            kind: What the name stands for, e.g. ``"option of input_copy"``.
            name: The name as given.
            valid: All names that would have been right.
            renamed: What the name is called now, if it was right once.
        """
        valid = sorted(valid)
        near = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        if renamed in valid:
            hint = f" It is now called {renamed!r}."
        super().__init__(f"unknown {kind}: {name!r}.{hint} Valid: {', '.join(valid) or 'none'}.")
        self.name = name


class UnsupportedError(SpecExtError):
    """A combination of settings that cannot work, with the one-line reason."""


class IncompatibleVLLMError(SpecExtError):
    """The installed vLLM lacks something this plugin relies on."""


class RequestOptionError(SpecExtError):
    """A wrong per-request option; ``parameter`` names the field for the HTTP answer."""

    def __init__(self, parameter: str, message: str) -> None:
        """Compose the message ``parameter: message``."""
        super().__init__(f"{parameter}: {message}")
        self.parameter = parameter
