"""The exceptions that end a run with a one-line message, and helpers that make such a line short and printable."""

from __future__ import annotations

from collections.abc import Iterable


def printable(text: str) -> str:
    """The text with all characters escaped that are not printable, line breaks too."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def shortened(value: object, length: int = 80) -> str:
    """The value as ``repr`` shows it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= length else text[: length - 1] + "…"


def some(names: Iterable[str], most: int = 3) -> str:
    """The first of many names, and how many more there are."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def first_line(error: BaseException) -> str:
    """The first line of an exception's message; the name of its type, if that is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class UserError(Exception):
    """Bad input; the message says, in one line, what was given, what is allowed and what to type."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(" ".join(message.splitlines())))


class PublicError(UserError):
    """Bad input that no data has a part in: with ``--secure``, a silo may still show the message to the others."""


class CallbackError(UserError):
    """``on_round`` raised on the root; the exception itself is the cause."""


class DivergedError(Exception):
    """The training left the finite numbers; the message names the round, the clients and the last good checkpoint."""


class OtherRankError(Exception):
    """Another rank has failed, and has printed why; this one prints nothing."""


# Exit codes.
DIVERGED = 3
NO_ANSWER = 4  # from other ranks, see --patience
