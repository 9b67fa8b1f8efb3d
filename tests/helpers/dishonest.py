"""A secure run whose server does not follow the protocol.

    python tests/helpers/dishonest.py WAY SEEN --secure --rounds 2 ...      SEEN: where it keeps the sums that it gets

model         one silo is sent another model
participants  only one silo's clients are asked to train
settings      the silos are told that nothing is masked
keys          one silo gets a key of the server's own in place of every other silo's
honest        it follows the protocol
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

VICTIM = 2  # rank


def cheat(way: str, seen: str, rank: int) -> None:
    from fedlada_mpi.rounds.aggregate.secure import SecureSums

    decode = SecureSums._decode

    def kept(self: Any, words: np.ndarray, communicates: bool) -> None:
        if rank == 0:
            np.save(seen, self.rows.cpu().numpy())
        decode(self, words, communicates)

    SecureSums._decode = kept
    globals()[f"_{way}"](rank)


def _honest(rank: int) -> None:
    pass


def _model(rank: int) -> None:
    """As if the server had sent it so: what differs is what this silo has received."""
    from fedlada_mpi.rounds.silo import Silo

    train = Silo.train

    def other(self: Any, *arguments: Any) -> Any:
        if rank == VICTIM:
            self.s.x[0] += 1
        return train(self, *arguments)

    Silo.train = other


def _participants(rank: int) -> None:
    from fedlada_mpi.rounds.silo import Silo

    sample = Silo.sample

    def few(self: Any, t: int) -> np.ndarray:
        return sample(self, t)[: None if rank else 1]

    Silo.sample = few


def _settings(rank: int) -> None:
    from fedlada_mpi.session import plan

    make = plan.make

    def open_sums(*arguments: Any) -> Any:
        made = make(*arguments)
        made.settings["secure_neighbours"] = "0"
        return made

    plan.make = open_sums


def _keys(rank: int) -> None:
    """As if the server had sent it so: what differs is what this silo has received."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    from fedlada_mpi.mpi.messages import Messages

    gather = Messages.allgather_json
    own = X25519PrivateKey.generate().public_key().public_bytes_raw().hex()

    def exchanged(self: Any, item: Any) -> Any:
        items = gather(self, item)
        if rank == VICTIM and isinstance(item, dict) and "nonce" in item:
            return [item if number == rank else {**other, "key": own} for number, other in enumerate(items)]
        return items

    Messages.allgather_json = exchanged


def main(argv: list[str]) -> int:
    way, seen, *arguments = argv
    from mpi4py import MPI

    from fedlada_mpi.run import main as run

    cheat(way, seen, MPI.COMM_WORLD.rank)
    return run(arguments)


if __name__ == "__main__":
    Path(sys.argv[2]).unlink(missing_ok=True)
    sys.exit(main(sys.argv[1:]))
