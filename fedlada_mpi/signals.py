"""SIGTERM and SIGUSR1 end the run at the next round boundary; another one, seconds later, ends it at once.

Launchers deliver one signal by several ways, so repeats within ``GRACE`` seconds count as the same one.

Only the standard library is imported here: the handlers must be in place before torch and MPI are loaded,
or a signal in those seconds would kill the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

STOPPED = 75  # exit code: stopped by a signal, checkpoint written, --resume continues

GRACE = 2.0

_received: list[float] = []


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Within the block, the signals are handled as above."""
    _received.clear()
    before = {number: signal.signal(number, _handle) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handle(number: int, frame: FrameType | None) -> None:
    if _received and time.monotonic() - _received[0] > GRACE:
        os._exit(128 + number)
    _received.append(time.monotonic())


def stop_requested() -> bool:
    return bool(_received)
