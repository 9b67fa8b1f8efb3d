"""SIGTERM and SIGUSR1 end the run at the next round boundary; a second one ends it at once.

Only the standard library is imported here: the handlers must be in place before torch and MPI are loaded,
or a signal in those seconds would kill the process.
"""

from __future__ import annotations

import os
import signal

STOPPED = 75  # exit code: stopped by a signal, checkpoint written, --resume continues

_received: list[int] = []


def install() -> None:
    _received.clear()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _handle)


def _handle(number: int, frame) -> None:
    if _received:
        os._exit(128 + number)
    _received.append(number)


def stop_requested() -> bool:
    return bool(_received)
