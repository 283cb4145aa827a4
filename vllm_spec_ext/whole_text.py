# SPDX-License-Identifier: Apache-2.0
"""Texts that can hold half a character, from JSON or a terminal.

No tokenizer takes it, nor can it be sent.
"""

from vllm_spec_ext.errors import SpecExtError

LEAVE_OUT = "remove it, or leave the line out"


def check_whole(text: str, where: str, what: str = "text", advice: str = LEAVE_OUT) -> None:
    """Raise SpecExtError for a text with a surrogate that has no partner.

    Args:
        text: As JSON or the command line gave it.
        where: File and line, for the message.
        what: The text is, likewise.
        advice: How to mend it, likewise.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SpecExtError(
            f"{where}: the {what} holds half a character, {text[error.start]!r} at {error.start}; "
            f"{advice}"
        ) from error
