"""A run whose n-th write to its output directory kills the process, or fails, as do all after it but for removals.

    python tests/helpers/faults.py kill 12 1 OUT --rounds 6 ...      SIGKILL before write 12 of rank 1
    python tests/helpers/faults.py ENOSPC 3 0 OUT --rounds 6 ...     from write 3 on, rank 0 gets that error

A write is any call that changes something in the directory: a file opened for writing, a part of an HDF5 file, a line
of the metrics, an fsync, a rename, a removal, a new folder.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import sys
from pathlib import Path

FIRED = ".fired"  # a file of this suffix beside the directory shows that there was such a write
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link")


class Fault:
    """Counts the writes to ``out``, and does ``action`` before number ``number`` (0: never): kill, or an errno's name.

    An error stays, as that of a full disk does: what a thread could not write is tried again.
    """

    def __init__(self, action: str, number: int, out: Path):
        self.action, self.number, self.out = action, number, str(out)
        self.count = itertools.count(1)
        self.seen = 0

    def step(self, path: object, removes: bool = False) -> None:
        if not os.fsdecode(path).startswith(self.out) or os.fsdecode(path).endswith(FIRED):
            return
        self.seen = number = next(self.count)
        later = self.action != "kill" and 0 < self.number < number and not removes
        if number != self.number and not later:
            return
        Path(self.out + FIRED).touch()
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        code = getattr(errno, self.action)
        raise OSError(code, os.strerror(code))

    def arm(self) -> None:
        """From here on, in this process."""
        from fedlada_mpi.rundir import metrics
        from fedlada_mpi.support import disk

        sys.addaudithook(self._hook)
        fsync, write, add = os.fsync, disk._Disk.write, metrics.Recorder.add

        def counted_fsync(handle):
            self.step(_path(handle))
            fsync(handle)

        def counted_write(file, data):
            try:
                self.step(_path(file.fileno()))
            except OSError as error:
                file.error = error
            return write(file, data)

        def counted_add(recorder, record):
            with disk.writing(recorder.path):
                self.step(recorder.path)
            add(recorder, record)

        os.fsync, disk._Disk.write, metrics.Recorder.add = counted_fsync, counted_write, counted_add

    def _hook(self, event: str, arguments: tuple) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(path, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self.step(path)
        elif event in CHANGES:
            path, handle = arguments[0], arguments[-1]
            removes = event in ("os.remove", "os.rmdir")
            self.step(f"{_path(handle)}/{os.fsdecode(path)}" if removes and handle >= 0 else path, removes)


def _path(handle: int) -> str:
    return os.readlink(f"/proc/self/fd/{handle}")


def main(argv: list[str]) -> int:
    action, number, rank, out, *arguments = argv
    from fedlada_mpi.mpi import world as ranks
    from fedlada_mpi.run import main as run

    if ranks.MPI.COMM_WORLD.rank == int(rank):
        Fault(action, int(number), Path(out)).arm()
    return run(["--out", out, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
