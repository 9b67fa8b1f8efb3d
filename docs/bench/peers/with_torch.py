"""No framework: a loop over the clients in one process, with one model and a running sum."""

from __future__ import annotations

import random

import torch
from common import add_to_flat, flat, job, load_flat


def main() -> None:
    work, draw = job(), random.Random(0)
    model = work.model()
    x = flat(model)
    total = torch.empty_like(x)
    for _ in range(work.rounds):
        total.zero_()
        for client in draw.sample(range(work.clients), work.participants):
            load_flat(model, x)
            work.work(model, client)
            add_to_flat(total, model)
        torch.div(total, work.participants, out=x)
        work.round_ended()
    load_flat(model, x)
    work.finish(model)


if __name__ == "__main__":
    main()
