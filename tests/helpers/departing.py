"""A run in which ranks die: before, in or shortly after the n-th call of something, as if they were killed.

    python tests/helpers/departing.py '{"1": ["reduce", 3, 0.002]}' --rounds 6 ...    rank 1, 2 ms into its third Reduce

Rank, place, number of the call and delay: 0 is before the call, less than 0 a stop (SIGSTOP) in place of the kill, and
null makes the file DEPARTING in the environment, for others to act on, and waits. "asked" is no departure: the rank is
asked to stop (SIGTERM), with "exit" it leaves without a word, and with "interrupt" Ctrl-C reaches it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

PLACES = {
    "start": ("fedlada_mpi.session.assemble", "Session._local_data"),
    "order": ("fedlada_mpi.mpi.world", "World.broadcast_json"),
    "barrier": ("fedlada_mpi.mpi.world", "World.barrier"),
    "train": ("fedlada_mpi.rounds.trainer", "Trainer._train"),
    "reduce": ("fedlada_mpi.mpi.transport", "Transport.reduce"),
    "server": ("fedlada_mpi.rounds.server", "Server.step"),
    "bcast": ("fedlada_mpi.mpi.transport", "Transport.bcast"),
    "evaluate": ("fedlada_mpi.rounds.silo", "Silo.report"),
    "record": ("fedlada_mpi.rundir.metrics", "Recorder.add"),
    "checkpoint": ("fedlada_mpi.rounds.silo", "Silo.save"),
    "file": ("fedlada_mpi.rundir.checkpoint", "write_vectors"),
    "results": ("fedlada_mpi.rundir.results", "write"),
    "defect": ("fedlada_mpi.rounds.trainer", "Trainer._train"),
    "recovery": ("fedlada_mpi.mpi.survivors", "_shrunk"),
}


def arm(place: str, number: int, delay: float | str | None) -> None:
    module, path = PLACES[place]
    *owner, name = path.split(".")
    holder = importlib.import_module(module)
    for part in owner:
        holder = getattr(holder, part)
    original, calls = getattr(holder, name), 0

    def call(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == number:
            if place == "defect":
                raise RuntimeError("a defect on this rank alone")
            if delay is None:
                Path(os.environ["DEPARTING"]).touch()
                time.sleep(3600)
            if delay == "exit":
                os._exit(1)
            if delay == "interrupt":
                raise KeyboardInterrupt
            if delay == "asked":
                signal.raise_signal(signal.SIGTERM)
                return original(*arguments, **options)
            if delay == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if delay < 0:
                os.kill(os.getpid(), signal.SIGSTOP)
            if threading.current_thread() is threading.main_thread():  # files of checkpoints are written by another
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, delay)  # ends the process wherever it is then, also inside MPI
        return original(*arguments, **options)

    setattr(holder, name, call)


def hurry() -> None:
    """Ranks that are stopped are ended after 2 s; nodes may be silent for 10 s, who holds the directory for 12 s."""
    from fedlada_mpi.mpi import heartbeat, survivors, watchdog
    from fedlada_mpi.rundir import lock

    watchdog.PERIOD, survivors.UNNOTICED = 0.5, 10
    heartbeat.PERIOD, heartbeat.SILENT = 0.5, 20
    lock.BEAT_SECONDS, lock.SILENT_SECONDS = 5.0, 12.0


def main(argv: list[str]) -> None:
    from fedlada_mpi.mpi import world
    from fedlada_mpi.run import command

    hurry()
    fault = json.loads(argv[0]).get(str(world.MPI.COMM_WORLD.rank))
    if fault:
        arm(*fault)
    command(argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
