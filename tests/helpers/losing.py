"""A secure run in which silos are killed before the n-th call of MPI since their first round, and what is sent is kept.

    python tests/helpers/losing.py LOG '{"2": 17}' --secure --rounds 4 ...       rank 2, at its 17th call

LOG/rank-N.jsonl has a line for every stream of masks that the rank used ("key"), for every sum that it began to send
("sent": the round, a digest of what it was computed from, the silos, and how many calls there were before), and goes on
where the same rank is started again.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import spying

NOT_COUNTED = ("Get_rank", "Get_size", "Get_group", "Free", "Get_failed", "Ack_failed", "Is_revoked")


class Log:
    def __init__(self, folder: Path, rank: int, number: int):
        """``number``: of the call before which this rank is killed; 0: none."""
        folder.mkdir(exist_ok=True, parents=True)
        self.path, self.number, self.calls, self.counts = folder / f"rank-{rank}.jsonl", number, 0, False

    def write(self, **entry: Any) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(entry) + "\n")

    def call(self, name: str) -> None:
        """Before a call of MPI."""
        if not self.counts or name in NOT_COUNTED:
            return
        self.calls += 1
        if self.calls == self.number:
            self.write(killed=name, call=self.calls)
            os.kill(os.getpid(), signal.SIGKILL)


def keep(log: Log) -> None:
    """From now on, write down every stream and every sum, and count calls from the first round on."""
    from fedlada_mpi.privacy import masks
    from fedlada_mpi.privacy.agreement import Epoch
    from fedlada_mpi.rounds.aggregate.secure import SecureSums

    streams, reduce, prepare = Epoch.streams, SecureSums.reduce, SecureSums.prepare
    inputs: dict[str, Any] = {}

    def logged_streams(self: Epoch, what: str, number: int, received: bytes) -> Any:
        found = streams(self, what, number, received)
        for key, _ in found:
            log.write(key=hashlib.sha256(key).hexdigest(), what=what, number=number)
        return found

    def logged_reduce(self: Any, *arguments: Any) -> None:
        log.write(sent=inputs, calls=log.calls)
        reduce(self, *arguments)

    def counting(self: Any, r: Any, participants: Any) -> None:
        log.counts = True
        received = [getattr(self.secure.s, name).cpu() for name in self.algorithm.down]
        digest = masks.received_digest(received, [asdict(r), participants.tolist()]).hex()
        inputs.update(round=r.t + 1, digest=digest, silos=list(self.masks.epoch.silos))
        prepare(self, r, participants)

    Epoch.streams = logged_streams
    SecureSums.reduce, SecureSums.prepare = logged_reduce, counting


def main(argv: list[str]) -> None:
    folder, kills, *arguments = argv
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    log = Log(Path(folder), rank, json.loads(kills).get(str(rank), 0))
    spying.arm(log.call)
    from departing import hurry

    from fedlada_mpi.run import command

    hurry()
    keep(log)
    command(arguments)


def entries(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """By rank, without lines that a kill has cut off."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        lines = path.read_text().splitlines()
        found[int(path.stem.removeprefix("rank-"))] = [json.loads(line) for line in lines if line.endswith("}")]
    return found


def keys_used_twice(folder: Path) -> list[str]:
    """By one silo: its two uses would show the difference of what they masked."""
    wrong = []
    for rank, lines in entries(folder).items():
        keys = [line["key"] for line in lines if "key" in line]
        if len(keys) != len(set(keys)):
            wrong.append(f"rank {rank} used {len(keys) - len(set(keys))} of {len(keys)} keys again")
    return wrong


def sums_that_tell(folder: Path) -> list[str]:
    """Sums of the same inputs with different silos: they differ by what single silos have sent."""
    silos: dict[str, set[tuple[str, ...]]] = {}
    for lines in entries(folder).values():
        for sent in (line["sent"] for line in lines if "sent" in line):
            silos.setdefault(f"round {sent['round']} of {sent['digest'][:8]}", set()).add(tuple(sent["silos"]))
    return [f"{what}: {sorted(sets)}" for what, sets in silos.items() if len(sets) > 1]


if __name__ == "__main__":
    main(sys.argv[1:])
