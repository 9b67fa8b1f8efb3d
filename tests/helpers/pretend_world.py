"""Ranks as threads of this process, for what takes no more of a world than messages."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from fedlada_mpi.support.errors import PublicError, UserError


class PretendWorld:
    """One of ``size`` ranks; all of them share the ``meeting``."""

    def __init__(self, rank: int, size: int, meeting: Meeting):
        self.rank, self.size, self._meeting = rank, size, meeting
        self.original_size, self.original_ranks = size, list(range(size))
        self.heard = hashlib.sha256()

    def allgather_json(self, item: Any) -> list[Any]:
        found = self._meeting.exchange(self.rank, item)
        self.heard.update(json.dumps(found).encode())
        return found

    def collectively(self, action: Callable[[], Any]) -> Any:
        result, message = None, ""
        try:
            result = action()
        except UserError as error:
            message = str(error)
        first = next((text for text in self._meeting.exchange(self.rank, message) if text), "")
        if first:
            raise PublicError(first)
        return result

    def reduce_words(self, words: np.ndarray) -> np.ndarray:
        every = self._meeting.exchange(self.rank, words.view(np.uint64).copy())
        return np.sum(every, axis=0, dtype=np.uint64).view(np.int64) if self.rank == 0 else words


class Meeting:
    """Where the threads meet; ``tamper`` may change what the server passes on to a rank."""

    def __init__(self, size: int, tamper: Callable[[int, list[Any]], list[Any]] | None = None):
        self.barrier, self.items = threading.Barrier(size, timeout=30), [None] * size
        self.tamper = tamper or (lambda rank, items: items)

    def exchange(self, rank: int, item: Any) -> list[Any]:
        self.items[rank] = item
        self.barrier.wait()
        found = self.tamper(rank, list(self.items))
        self.barrier.wait()
        return found


def on_ranks(size: int, action: Callable[[PretendWorld], Any], tamper: Any = None) -> list[Any]:
    """What ``action`` returns, or raises, on every rank."""
    meeting, results = Meeting(size, tamper), [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = action(PretendWorld(rank, size, meeting))
        except UserError as error:  # on all of them
            results[rank] = error
        except Exception as error:
            results[rank] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
