# SPDX-License-Identifier: Apache-2.0
"""Errors for users: each says what was found, what was expected and how to fix it."""

import difflib
import reprlib
from collections.abc import Iterable

_MAX_SHOWN = 200
_MAX_MESSAGE = 2000
_MAX_PARAMETER = 100

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = _MAX_SHOWN
_SHORT.maxlevel = 4


def shown(value: object) -> str:
    """How a message quotes a value: like ``repr``, but short however long or deep the value is."""
    try:
        return _cut(_SHORT.repr(value), _MAX_SHOWN)
    except Exception:  # an integer of thousands of digits has no repr; a foreign repr may fail
        return f"a value of type {type(value).__name__}"


def _cut(text: str, length: int) -> str:
    """Text that fits into an HTTP answer: of bounded length, and without lone surrogates."""
    if len(text) > length:
        text = text[: length - 3] + "..."
    return text.encode("utf-8", "backslashreplace").decode()


class SpecExtError(ValueError):
    """Bad input to this plugin; the message is meant for the person who typed it."""


class UnknownNameError(SpecExtError):
    """A name that does not exist, with the nearest one that does."""

    def __init__(
        self,
        kind: str,
        name: str,
        valid: Iterable[str],
        *,
        renamed: str | None = None,
        reason: str | None = None,
    ) -> None:
        """Compose the message.

        Args:
            kind: What the name stands for, e.g. ``"option of input_copy"``.
            name: The name as given.
            valid: All names that would have been right.
            renamed: What the name is called now, if it was right once.
            reason: A sentence on why a name that was right once is no more.
        """
        valid = sorted(valid)
        near = difflib.get_close_matches(name[:_MAX_PARAMETER], valid, n=1, cutoff=0.6)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        if renamed in valid:
            hint = f" It is now called {renamed!r}."
        if reason is not None:
            hint = f" {reason}"
        known = ", ".join(valid) or "none"
        super().__init__(f"unknown {kind}: {shown(name)}.{hint} Valid: {known}.")
        self.name = name


class UnsupportedError(SpecExtError):
    """A combination of settings that cannot work, with the one-line reason."""


class IncompatibleVLLMError(SpecExtError):
    """The installed vLLM lacks something this plugin relies on."""


class RequestOptionError(SpecExtError):
    """A wrong per-request option; ``parameter`` names the field for the HTTP answer.

    Both are cut to a length that can be sent back: a client's megabytes are not its answer.
    """

    def __init__(self, parameter: str, message: str) -> None:
        """Compose the message ``parameter: message``."""
        self.parameter = _cut(parameter, _MAX_PARAMETER)
        super().__init__(f"{self.parameter}: {_cut(message, _MAX_MESSAGE)}")


class RanksApartError(RuntimeError):
    """A rank left what several compute together; they can only end."""


class ProposerError(RuntimeError):
    """A proposer broke its contract; raised only where ``VLLM_SPEC_EXT_STRICT`` asks for it."""
