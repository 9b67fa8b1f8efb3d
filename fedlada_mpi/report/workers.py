"""Work spread over the cores of this machine by forked processes, which see the caller's data without copying it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_work: tuple[Callable[[Any], Any], Sequence[Any]] | None = None


def _one(index: int) -> Any:
    assert _work is not None
    return _work[0](_work[1][index])


def spread(function: Callable[[T], R], items: Sequence[T], least: int = 4) -> list[R]:
    """The results in order; few items are not worth the processes."""
    global _work
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < 2 or len(items) < least or "fork" not in multiprocessing.get_all_start_methods():
        return [function(item) for item in items]
    _work = function, items
    try:
        # The workers end by themselves: a SIGTERM could meet a handler that they inherited.
        pool = multiprocessing.get_context("fork").Pool(min(cores, len(items), 8))
        results = pool.map(_one, range(len(items)), chunksize=1)
        pool.close()
        pool.join()
        return results
    finally:
        _work = None
