"""fedlada_mpi.train, on the ranks that it is started on. Without evaluation and checkpoints, which the others do not do
either; records of every round are written as always."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from common import BATCH, DIGITS, IMAGES, RATE, STEP, Job, job, pixels

import fedlada_mpi
from fedlada_mpi.rounds.trainer import Trainer
from fedlada_mpi.support.launcher import launched_processes


def data(work: Job) -> fedlada_mpi.Data:
    if work.workload == DIGITS:
        (images, labels), (tests, test_labels) = pixels("train"), pixels("test")
        each = IMAGES
    else:  # of a size at which every parameter of ResNet-18 has a gradient, so that none is left out
        images, labels = np.zeros((work.clients, 64, 64, 3), np.uint8), np.arange(work.clients)
        tests, test_labels, each = images, labels, 1
    channels = images.shape[3]
    return fedlada_mpi.Data(
        train_images=images, train_labels=labels, clients=np.repeat(np.arange(work.clients), each),
        test_images=tests, test_labels=test_labels, mean=[0.0] * channels, std=[1.0] * channels,
    )  # fmt: skip


def add_instead_of_training() -> None:
    """Local steps of ``moving``: no batches, no gradients."""
    begin = Trainer._begin

    def begin_and_note(self: Trainer, parts: Any, r: Any, clients: np.ndarray, steps: Any) -> None:
        begin(self, parts, r, clients, steps)
        self.client_steps = torch.from_numpy(clients + 1).float().unsqueeze(1) * STEP

    def step(self: Trainer, parts: Any, batch: Any) -> None:
        ((c, _),) = parts
        c.x.add_(self.client_steps)

    Trainer._begin, Trainer._step = begin_and_note, step


def main() -> None:
    work = job()
    if work.workload != DIGITS:
        add_instead_of_training()
    run = fedlada_mpi.train(
        algorithm="fedavg", model=work.model(), data=data(work), rounds=work.rounds, local_epochs=1, batch_size=BATCH,
        participation=work.participants / work.clients, lr=RATE, lr_decay=1.0, clip=0.0, weight_decay=0.0,
        augment="none", server_trains=launched_processes() > 1, device="cpu", eval_every=0, checkpoint_every=0,
        data_dir=os.environ["PEERS_FOLDER"], out=os.environ["PEERS_FOLDER"] + "/run", overwrite=True, quiet=True,
        on_round=lambda record: work.round_ended(),
    )  # fmt: skip
    if work.ended:  # on the root
        work.finish(run.model.module)


if __name__ == "__main__":
    main()
