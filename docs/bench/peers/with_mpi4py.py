"""No framework: Bcast of the flat parameters, a loop over a rank's clients, and Reduce of their sum."""

from __future__ import annotations

import random

import numpy as np
import torch
from common import flat, job, load_flat
from mpi4py import MPI


def main() -> None:
    work, draw, comm = job(), random.Random(0), MPI.COMM_WORLD
    model = work.model()
    x = flat(model).numpy()
    received = np.empty_like(x)
    for _ in range(work.rounds):
        participants = draw.sample(range(work.clients), work.participants)
        comm.Bcast(x)
        total = torch.zeros(len(x))
        for client in participants[comm.rank :: comm.size]:
            load_flat(model, torch.from_numpy(x).clone())
            work.work(model, client)
            total += flat(model)
        comm.Reduce(total.numpy(), received)
        if comm.rank == 0:
            np.divide(received, work.participants, out=x)
            work.round_ended()
    if comm.rank == 0:
        load_flat(model, torch.from_numpy(x))
        work.finish(model)


if __name__ == "__main__":
    main()
