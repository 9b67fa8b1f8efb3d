"""The exceptions that end a run with one line, and the suggestion after a mistyped name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input; the message says what was given, what is allowed and what to type."""


class DivergedError(Exception):
    """The training left the finite numbers; the message names the round, the clients and the last good checkpoint."""


DIVERGED = 3  # exit code


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'fedavg'?)`` if a known name is close, else nothing."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""
