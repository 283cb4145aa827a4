# SPDX-License-Identifier: Apache-2.0
"""Texts from JSON, which can hold half a character: no tokenizer takes it, nor can it be sent."""

from vllm_spec_ext.errors import SpecExtError


def check_whole(text: str, where: str, what: str = "text") -> None:
    """Raise SpecExtError for a text with a surrogate that has no partner.

    Args:
        text: As JSON gave it.
        where: File and line, for the message.
        what: The text is, likewise.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SpecExtError(
            f"{where}: the {what} holds half a character, {text[error.start]!r} at {error.start}; "
            "remove it, or leave the line out"
        ) from error
