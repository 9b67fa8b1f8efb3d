"""SIGTERM and SIGUSR1 end the run after the current round; a second one, seconds later, ends it at once.

Launchers may deliver the same signal several times, so repeats within ``GRACE`` seconds are ignored. For the command,
Ctrl-C does the same, with a shorter time for repeats; in ``fedlada_mpi.train`` it raises KeyboardInterrupt as usual.

Only the standard library is imported here: the handlers must be in place before torch and MPI are loaded,
or a signal in those seconds would kill the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

STOPPED = 75  # exit code: stopped by a signal, checkpoint written, --resume continues

TOLERANT = "OMPI_MCA_mpi_ft_enable"  # set by mpirun --with-ft ulfm
GRACE = 2.0  # seconds
GRACE_OF_HANDS = 0.2  # seconds, for Ctrl-C


class Stop:
    """Whether a run was asked to stop, and when."""

    at: float | None = None


_stops: dict[int, Stop] = {}  # of the runs in this process, by the thread of each


@contextlib.contextmanager
def handlers(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within the block, these signals call ``handler``."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def handled(interrupt: bool = False) -> Iterator[None]:
    """Within the block, signals are handled as above; ``interrupt``: Ctrl-C too.

    Python runs handlers in the main thread only: a run in another thread sets none, and stops when a run in the main
    thread is asked to.
    """
    me, earlier = threading.get_ident(), _stops.get(threading.get_ident())
    # A run that was started from within another, such as by its ``on_round``, stops with it.
    _stops[me] = earlier or Stop()
    main = threading.current_thread() is threading.main_thread()
    numbers = [signal.SIGTERM, signal.SIGUSR1, *([signal.SIGINT] if interrupt else [])]
    try:
        with handlers(numbers if main else [], _handle):
            yield
    finally:
        if earlier is None:
            del _stops[me]


def _handle(number: int, frame: FrameType | None) -> None:
    now, stops = time.monotonic(), list(_stops.values())
    grace = GRACE_OF_HANDS if number == signal.SIGINT else GRACE
    if any(stop.at is not None and now - stop.at > grace for stop in stops):
        if tolerant():
            # MPI tells the other ranks of a process that was killed, not of one that has exited.
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(128 + number)
    if number == signal.SIGINT and all(stop.at is None for stop in stops):
        os.write(2, b"\nstopping after this round; Ctrl-C again stops at once\n")
    for stop in stops:
        stop.at = now if stop.at is None else stop.at


def tolerant() -> bool:
    """Whether this process is one of several ranks that go on when another dies."""
    return os.environ.get(TOLERANT) == "1"


def stop_requested() -> bool:
    """Whether the run of this thread was asked to stop."""
    stop = _stops.get(threading.get_ident())
    return stop is not None and stop.at is not None
