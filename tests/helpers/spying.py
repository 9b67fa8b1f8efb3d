"""Runs whose ranks record everything that leaves them, in the order in which it does.

    python tests/helpers/spying.py '[{"where": "a", "records": "1", "fixed": true, "words": ["--rounds", "2"]}, ...]'

Runs follow each other in the same processes, as starting these costs more than they do. Each takes place in the
directory WHERE, and leaves RECORDS/rank-N.pickle there, lists of ``Sent``. A run with ``fixed`` keys has the same
secrets as all others that have them; one with a ``leak`` tells what it should not.

A spy stands in for every communicator and every window, as its own subclass of mpi4py's, so that no call can pass it:
what is not known to be silent is recorded, and a call whose buffers the spy cannot tell is an error. A shared window is
recorded when others may read it. Besides, a rank may write to files, sockets and the console, which are recorded too.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

# Calls that send nothing of this rank's but its presence.
SILENT = {
    *("Free", "Get_group", "Get_rank", "Get_size", "Ibarrier", "Barrier", "Irecv", "Recv", "Abort", "Set_errhandler"),
    *("Revoke", "Is_revoked", "Get_failed", "Ack_failed", "Get_errhandler"),
}
MAKERS = ("Dup", "Split", "Split_type", "Shrink")  # of communicators, which are spied on, too
# Calls with buffers: the place of what is sent among the arguments.
SENDERS = {
    "Gather": 0, "Gatherv": 0, "Allgather": 0, "Allgatherv": 0, "Alltoall": 0, "Alltoallv": 0, "Reduce": 0,
    "Allreduce": 0, "Send": 0, "Isend": 0, "Agree": 0,
}  # fmt: skip
PADDED = "messages.allgather_json messages.limited messages.gather"
WINDOW = {"Allocate_shared", "Lock_all", "Unlock_all", "Shared_query", "Sync", "Free"}


@dataclass(frozen=True)
class Sent:
    """What left a rank."""

    call: str
    kind: str  # of its elements
    content: bytes
    by: str  # the functions of the package, the innermost last

    @property
    def words(self) -> np.ndarray:
        return np.frombuffer(self.content, np.uint64)


class Records:
    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.windows: dict[int, bytes] = {}  # what they have shown, by handle

    def clear(self) -> None:
        self.sent.clear()
        self.windows.clear()

    def add(self, call: str, value: Any) -> None:
        if isinstance(value, (tuple, list)):  # with counts or a type
            value = value[0]
        array, by = np.ascontiguousarray(value), _callers()
        if PADDED in by and array.size > 1:  # with blanks, to the length of the longest, which may be the root's
            self.sent.append(Sent(call, "text", bytes(array.astype(np.uint8)).rstrip(), by))
        else:
            self.sent.append(Sent(call, str(array.dtype), array.tobytes(), by))

    def note(self, call: str, text: str) -> None:
        self.sent.append(Sent(call, "text", text.encode(), _callers()))


RECORDS = Records()


def _callers() -> str:
    codes = [frame.f_code for frame, _ in traceback.walk_stack(None) if "fedlada_mpi" in frame.f_code.co_filename]
    return " ".join(f"{Path(code.co_filename).stem}.{code.co_name}" for code in reversed(codes[:8]))


def arm(before: Callable[[str], None] = lambda name: None) -> None:
    """Spy on all that MPI is asked for from now on; before the package is imported. ``before`` is told of each call."""
    from mpi4py import MPI

    def spied(name: str) -> Any:
        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            before(name)
            if name == "Bcast":
                root = options.get("root", arguments[1] if len(arguments) > 1 else 0)
                if self.rank == root:
                    RECORDS.add(name, arguments[0])
            elif name in SILENT:
                pass
            elif name in SENDERS:
                in_place = isinstance(arguments[0], type(MPI.IN_PLACE)) and arguments[0] == MPI.IN_PLACE
                RECORDS.add(name, arguments[1 if in_place else SENDERS[name]])
            else:
                raise AssertionError(f"{name}: the spy does not know what this call sends; teach it, or do without")
            return getattr(MPI.Intracomm, name)(self, *arguments, **options)

        return call

    def made(name: str) -> Any:
        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            before(name)
            comm = getattr(MPI.Intracomm, name)(self, *arguments, **options)
            return comm if comm == MPI.COMM_NULL else Spy(comm)

        return call

    def refused(name: str) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise AssertionError(f"{name}: the spy does not know what this call sends; teach it, or do without")

        return call

    def calls(kind: type) -> list[str]:
        named = [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))]
        return [name for name in named if name not in ("py2f", "f2py", "toint", "fromint", "fromhandle")]

    others = [name for name in calls(MPI.Intracomm) if name not in MAKERS]
    body = {**{name: spied(name) for name in others}, **{name: made(name) for name in MAKERS}}
    Spy = type("Spy", (MPI.Intracomm,), body)
    real_window = MPI.Win

    def sync(self: Any) -> None:
        before("Sync")
        group = self.Get_group()
        if group.rank:  # into the first segment, others add what they could also add up themselves
            memory, _ = self.Shared_query(group.rank)
            content = np.frombuffer(memory, np.uint8)
            if content.tobytes() != RECORDS.windows.get(self.handle):
                RECORDS.windows[self.handle] = content.tobytes()
                RECORDS.add("window", content)
        real_window.Sync(self)

    kept = {"Get_group", "Call_errhandler", "Get_errhandler", "Set_errhandler"}
    body = {name: refused(name) for name in calls(real_window) if name not in WINDOW | kept}
    MPI.Win = type("SpyWindow", (real_window,), {**body, "Sync": sync})
    MPI.COMM_WORLD = Spy(MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank:
        _watch_files()


def _watch_files() -> None:
    """What a silo writes elsewhere than to MPI."""
    import h5py

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(path, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                RECORDS.note("file", os.fsdecode(path))
        elif event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
            RECORDS.note("socket", str(arguments[1:]))

    sys.addaudithook(hook)
    opened = h5py.File.__init__

    def noted(self: Any, name: Any, mode: str = "r", *more: Any, **options: Any) -> None:
        if mode != "r" and isinstance(name, (str, bytes, os.PathLike)):
            RECORDS.note("file", os.fsdecode(name))
        opened(self, name, mode, *more, **options)

    h5py.File.__init__ = noted
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        write = stream.write

        def printed(text: str, write: Any = write) -> int:
            RECORDS.note("printed", text)
            return write(text)

        stream.write = printed


@contextmanager
def fixed_keys(rank: int) -> Iterator[None]:
    """Secrets that depend on the rank, on who draws them and on how many it has drawn before, and on nothing else."""
    from cryptography.hazmat.primitives.asymmetric import ed25519, x25519

    from fedlada_mpi.privacy import masks

    counts: Counter[str] = Counter()

    def draw(length: int) -> bytes:
        purpose = sys._getframe(1).f_globals["__name__"]
        counts[purpose] += 1
        return hashlib.shake_256(f"{rank} {purpose} {counts[purpose]}".encode()).digest(length)

    with ExitStack() as patches:
        patches.enter_context(patch.object(os, "urandom", draw))
        # From the second round on, runs with other data have other models, and would have other masks.
        patches.enter_context(patch.object(masks, "received_digest", lambda *_: bytes(32)))
        for kind in (x25519.X25519PrivateKey, ed25519.Ed25519PrivateKey):
            made = classmethod(lambda cls, kind=kind: kind.from_private_bytes(draw(32)))
            patches.enter_context(patch.object(kind, "generate", made))
        yield


@contextmanager
def leaking(way: str) -> Iterator[None]:
    """At the end of every round, let the silos show a number that depends on their images, and on nothing else."""
    from mpi4py import MPI

    from fedlada_mpi.rounds.silo import Silo

    report = Silo.report

    def telling(self: Any, order: Any) -> Any:
        inputs, _ = self.trainer.data.examples.take(slice(0, 1))
        number = np.array([float(inputs.double().flatten()[:8].sum())])
        if way == "Gather":
            self.world.gather(number)
        elif way == "Reduce":  # as masked sums do, without the mask
            words = number.astype(np.int64).view(np.uint64)
            self.world.comm.Reduce(words, np.empty_like(words) if self.world.rank == 0 else None, MPI.SUM)
        elif way == "print" and self.world.rank:
            print(number)
        return report(self, order)

    with patch.object(Silo, "report", telling):
        yield


def spied(run: Mapping[str, Any], rank: int) -> int:
    from fedlada_mpi.run import main

    os.chdir(run["where"])
    RECORDS.clear()
    with ExitStack() as changes:
        if run.get("fixed", True):
            changes.enter_context(fixed_keys(rank))
        if run.get("leak"):
            changes.enter_context(leaking(run["leak"]))
        status = main(run["words"])
    Path(run["records"]).mkdir(exist_ok=True)
    records = [(sent.call, sent.kind, sent.content, sent.by) for sent in RECORDS.sent]
    Path(run["records"], f"rank-{rank}.pickle").write_bytes(pickle.dumps(records))
    return status


def main(runs: Sequence[Mapping[str, Any]]) -> int:
    arm()
    from mpi4py import MPI

    return max(spied(run, MPI.COMM_WORLD.rank) for run in runs)


def read(folder: Path, ranks: int) -> list[list[Sent]]:
    """By rank."""
    return [[Sent(*sent) for sent in pickle.loads((folder / f"rank-{r}.pickle").read_bytes())] for r in range(ranks)]


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
