"""Filters of warnings that hold for a block of code, also where several threads train at once."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

# Filters belong to the process: of two threads with catch_warnings at once, the one that leaves last
# puts back what the other had set, for good.
_one_at_a_time = threading.RLock()


@contextmanager
def warning_filter(
    action: Literal["ignore", "error"], category: type[Warning] = Warning, message: str = ""
) -> Iterator[None]:
    """What to do with warnings of ``category`` that start with ``message``; afterwards all filters are as before."""
    with _one_at_a_time, warnings.catch_warnings():
        warnings.filterwarnings(action, message, category)
        yield
