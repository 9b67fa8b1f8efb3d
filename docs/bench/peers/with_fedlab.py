"""FedLab, ``standalone`` in one process, or in ``WAY`` processes: a server, and others with a share of clients each.

The processes exchange models by torch.distributed (gloo). Digits are learnt by FedLab's own serial trainer.
"""

from __future__ import annotations

import logging
import os

import numpy as np
import torch
import torch.multiprocessing
from common import BATCH, MOVING, RATE, Job, add, client_set, job
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.client.manager import PassiveClientManager
from fedlab.core.network import DistNetwork
from fedlab.core.server.manager import SynchronousServerManager
from fedlab.core.standalone import StandalonePipeline


class ClientSets:
    """Data of the clients from ``first`` on; for ``moving`` the number of the client itself."""

    def __init__(self, work: Job, first: int):
        self.work, self.first = work, first

    def get_dataloader(self, client: int, batch_size: int):
        if self.work.workload == MOVING:
            return self.first + client
        return torch.utils.data.DataLoader(client_set(self.first + client), batch_size, shuffle=True)


class AddingTrainer(SGDSerialClientTrainer):
    def train(self, model_parameters, client):
        self.set_model(model_parameters)
        add(self._model, client)
        return [self.model_parameters]


def trainer(work: Job, clients: int, first: int = 0) -> SGDSerialClientTrainer:
    made = (AddingTrainer if work.workload == MOVING else SGDSerialClientTrainer)(work.model(), clients)
    made.setup_dataset(ClientSets(work, first))
    made.setup_optim(1, BATCH, RATE)
    return made


def handler(work: Job) -> SyncServerHandler:
    class TimedHandler(SyncServerHandler):
        def global_update(self, buffer):
            super().global_update(buffer)
            work.round_ended()

    return TimedHandler(work.model(), work.rounds, work.participants / work.clients)


def process(rank: int, work: Job, size: int, port: int) -> None:
    logging.disable(logging.INFO)
    network = DistNetwork(("127.0.0.1", port), size, rank)
    if rank == 0:
        server = handler(work)
        SynchronousServerManager(network, server).run()
        work.finish(server.model)
    else:
        shares = np.array_split(np.arange(work.clients), size - 1)
        own = shares[rank - 1]
        PassiveClientManager(network, trainer(work, len(own), int(own[0]))).run()


def main() -> None:
    logging.disable(logging.INFO)
    work = job()
    if work.way == "standalone":
        server = handler(work)
        pipeline = StandalonePipeline(server, trainer(work, work.clients))
        pipeline.evaluate = lambda: None
        pipeline.main()
        work.finish(server.model)
    else:
        size = int(work.way)
        torch.multiprocessing.spawn(process, (work, size, 20000 + os.getpid() % 20000), nprocs=size)


if __name__ == "__main__":
    main()
