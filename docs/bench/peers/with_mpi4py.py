"""No framework: Bcast of the flat parameters, a loop over a rank's clients, and Reduce of their sum."""

from __future__ import annotations

import random

import torch
from common import add_to_flat, flat, job, load_flat
from mpi4py import MPI


def main() -> None:
    work, draw, comm = job(), random.Random(0), MPI.COMM_WORLD
    model = work.model()
    x = flat(model)
    total, received = torch.empty_like(x), torch.empty_like(x)
    for _ in range(work.rounds):
        participants = draw.sample(range(work.clients), work.participants)
        comm.Bcast(x.numpy())
        total.zero_()
        for client in participants[comm.rank :: comm.size]:
            load_flat(model, x)
            work.work(model, client)
            add_to_flat(total, model)
        comm.Reduce(total.numpy(), received.numpy())
        if comm.rank == 0:
            torch.div(received, work.participants, out=x)
            work.round_ended()
    if comm.rank == 0:
        load_flat(model, x)
        work.finish(model)


if __name__ == "__main__":
    main()
