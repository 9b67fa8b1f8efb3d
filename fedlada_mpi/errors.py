"""The exception for everything a user can fix, and the suggestion after a mistyped name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input; the message says what was given, what is allowed and what to type."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'fedavg'?)`` if a known name is close, else nothing."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""
