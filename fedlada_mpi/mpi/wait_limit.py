"""A limit on waiting for other ranks: a lost node, or a rank that hangs, must not hold up a run for ever.

    limit = WaitLimit(7200, give_up)
    with limit:
        comm.Barrier()

MPI itself waits without a limit, and does not notice that a link was cut. A thread counts the seconds that the rank
spends in such a block; it never calls MPI.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

TICKS = 20  # into which the limit is divided


def _nothing() -> None:
    pass


class WaitLimit:
    """Counts the seconds that this rank spends in one ``with`` block; blocks may be nested."""

    def __init__(self, seconds: float = 0, give_up: Callable[[], object] = lambda: None) -> None:
        """Call ``give_up`` after ``seconds`` (0: never) in one block; if it returns true, count from zero again."""
        self.seconds, self._give_up = seconds, give_up
        self._depth = self._blocks = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._count, name="wait limit", daemon=True) if seconds else None
        if self._thread:
            self._thread.start()

    def __enter__(self) -> None:
        self._blocks += not self._depth
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    @property
    def waiting(self) -> bool:
        """Whether the rank is in a block now."""
        return self._depth > 0

    def close(self) -> None:
        """End the thread, and let go of what ``give_up`` refers to."""
        self._closed.set()
        if self._thread is threading.current_thread():
            return
        if self._thread:
            self._thread.join()
        self._give_up = _nothing

    def _count(self) -> None:
        # Ticks are counted instead of reading a clock, which runs on while the whole job is suspended.
        block = ticks = 0
        while not self._closed.wait(self.seconds / TICKS):
            ticks = ticks + 1 if self._depth and self._blocks == block else 0
            block = self._blocks
            if ticks == TICKS:
                ticks = 0
                if not self._give_up():
                    return
