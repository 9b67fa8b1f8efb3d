"""No framework: a loop over the clients in one process, with one model and a running sum."""

from __future__ import annotations

import random

import torch
from common import flat, job, load_flat


def main() -> None:
    work, draw = job(), random.Random(0)
    model = work.model()
    x = flat(model)
    for _ in range(work.rounds):
        total = torch.zeros_like(x)
        for client in draw.sample(range(work.clients), work.participants):
            load_flat(model, x.clone())
            work.work(model, client)
            total += flat(model)
        x = total.div_(work.participants)
        work.round_ended()
    load_flat(model, x)
    work.finish(model)


if __name__ == "__main__":
    main()
