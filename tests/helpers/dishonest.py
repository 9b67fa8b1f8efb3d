"""Secure runs whose server does not follow the protocol, one after another on the same ranks.

    python tests/helpers/dishonest.py model,keys FOLDER --secure --rounds 2 ...

model         one silo is sent another model
participants  only one silo's clients are asked to train
settings      the silos are told that nothing is masked
plan          the silos are told to record single clients
orders        one silo is asked to evaluate something else
keys          one silo gets keys of the server's own in place of the other silos'
names         the same, under names that lead to that silo's own public key, with its own signature
alone         every silo is told that there are no others
honest        it follows the protocol

FOLDER/WAY.npy is what the server sees, and FOLDER/WAY.json the status of every rank and what the first has printed.
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import ExitStack, redirect_stderr
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

VICTIM = 2  # rank


def cheat(way: str, seen: Path, rank: int) -> ExitStack:
    """What is changed until the stack is closed."""
    from fedlada_mpi.rounds.aggregate.secure import SecureSums

    decode = SecureSums._decode

    def kept(self: Any, words: np.ndarray, communicates: bool) -> None:
        if rank == 0:
            np.save(seen, self.rows.cpu().numpy())
        decode(self, words, communicates)

    changes = ExitStack()
    changes.enter_context(patch.object(SecureSums, "_decode", kept))
    if way != "honest":
        changes.enter_context(patch.object(*globals()[f"_{way}"](rank)))
    return changes


def _model(rank: int) -> tuple[Any, str, Any]:
    """As if the server had sent it so: what differs is what this silo has received."""
    from fedlada_mpi.rounds.silo import Silo

    train = Silo.train

    def other(self: Any, *arguments: Any) -> Any:
        if rank == VICTIM:
            self.s.x[0] += 1
        return train(self, *arguments)

    return Silo, "train", other


def _participants(rank: int) -> tuple[Any, str, Any]:
    from fedlada_mpi.rounds.silo import Silo

    sample = Silo.sample

    def few(self: Any, t: int) -> np.ndarray:
        return sample(self, t)[: None if rank else 1]

    return Silo, "sample", few


def _settings(rank: int) -> tuple[Any, str, Any]:
    from fedlada_mpi.session import plan

    make = plan.make

    def open_sums(*arguments: Any) -> Any:
        made = make(*arguments)
        made.settings["secure_neighbours"] = "0"
        return made

    return plan, "make", open_sums


def _plan(rank: int) -> tuple[Any, str, Any]:
    from fedlada_mpi.session import plan

    make = plan.make

    def of_clients(*arguments: Any) -> Any:
        made = make(*arguments)
        made.settings["eval_clients"] = 1
        return made

    return plan, "make", of_clients


def _orders(rank: int) -> tuple[Any, str, Any]:
    """As if the server had sent it so."""
    from fedlada_mpi.mpi.messages import Messages

    broadcast = Messages.broadcast_json

    def ordered(self: Any, message: Any = None) -> Any:
        order = broadcast(self, message)
        if rank == VICTIM and order.get("do") == "round":
            order["evaluate"] = ["train"]
            self.heard.update(json.dumps(order).encode())
        return order

    return Messages, "broadcast_json", ordered


def _names(rank: int) -> tuple[Any, str, Any]:
    """As if the server had sent it so."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    from fedlada_mpi.mpi.messages import Messages

    gather = Messages.allgather_json

    def exchanged(self: Any, item: Any) -> Any:
        items = gather(self, item)
        if rank != VICTIM:
            return items
        if isinstance(item, str) and len(item) == 128:
            return ["", *[item] * (len(items) - 1)]
        if isinstance(item, dict) and "nonce" in item:
            keys = [X25519PrivateKey.generate().public_key().public_bytes_raw().hex() for _ in items]
            names = ["", *("." + "/" * number + item["name"] for number in range(1, len(items)))]
            others = [{**item, "name": name, "key": key} for name, key in zip(names, keys, strict=True)]
            return [item if number == rank else other for number, other in enumerate(others)]
        return items

    return Messages, "allgather_json", exchanged


def _keys(rank: int) -> tuple[Any, str, Any]:
    """As if the server had sent it so: what differs is what this silo has received."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    from fedlada_mpi.mpi.messages import Messages

    gather = Messages.allgather_json

    def exchanged(self: Any, item: Any) -> Any:
        items = gather(self, item)
        if rank == VICTIM and isinstance(item, dict) and "nonce" in item:
            keys = [X25519PrivateKey.generate().public_key().public_bytes_raw().hex() for _ in items]
            others = [{**other, "key": key} for other, key in zip(items, keys, strict=True)]
            return [item if number == rank else other for number, other in enumerate(others)]
        return items

    return Messages, "allgather_json", exchanged


def _alone(rank: int) -> tuple[Any, str, Any]:
    """As if the server had sent it so: each silo has received the server's entry in place of those of all others."""
    from fedlada_mpi.mpi.messages import Messages

    gather = Messages.allgather_json

    def exchanged(self: Any, item: Any) -> Any:
        items = gather(self, item)
        if rank and isinstance(item, dict) and "nonce" in item:
            return [each if number == rank else items[0] for number, each in enumerate(items)]
        return items

    return Messages, "allgather_json", exchanged


def main(ways: str, folder: str, *arguments: str) -> None:
    from mpi4py import MPI

    from fedlada_mpi.run import main as run

    world = MPI.COMM_WORLD
    for way in ways.split(","):
        path = Path(folder, way)
        with cheat(way, path.with_suffix(".npy"), world.rank), redirect_stderr(io.StringIO()) as err:
            status = run([*arguments, "--out", str(path)])
        statuses = world.gather(status)
        if world.rank == 0:
            path.with_suffix(".json").write_text(json.dumps({"statuses": statuses, "err": err.getvalue()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
