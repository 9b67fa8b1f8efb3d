"""SIGTERM and SIGUSR1 end the run at the next round boundary; another one, seconds later, ends it at once.

Launchers deliver one signal by several ways, so repeats within ``GRACE`` seconds count as the same one.

Only the standard library is imported here: the handlers must be in place before torch and MPI are loaded,
or a signal in those seconds would kill the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

STOPPED = 75  # exit code: stopped by a signal, checkpoint written, --resume continues

GRACE = 2.0


class Stop:
    """Whether a run was asked to stop, and when."""

    at: float | None = None


_stops: dict[int, Stop] = {}  # of the runs of this process, by thread


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Within the block, the signals are handled as above.

    Python handles signals in the main thread only: a run in another one stops with those that the main thread handles.
    """
    me, earlier = threading.get_ident(), _stops.get(threading.get_ident())
    _stops[me] = Stop()
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, _handle) for number in (signal.SIGTERM, signal.SIGUSR1) if main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        del _stops[me]
        if earlier is not None:  # a run that is started in a round of another
            _stops[me] = earlier


def _handle(number: int, frame: FrameType | None) -> None:
    now, stops = time.monotonic(), list(_stops.values())
    if any(stop.at is not None and now - stop.at > GRACE for stop in stops):
        os._exit(128 + number)
    for stop in stops:
        stop.at = now if stop.at is None else stop.at


def stop_requested() -> bool:
    """Whether the run of this thread was asked to stop."""
    stop = _stops.get(threading.get_ident())
    return stop is not None and stop.at is not None
