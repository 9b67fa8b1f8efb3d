"""APPFL over its MPI communicator: rank 0 serves, the others have the clients, one or several each.

``WAY`` is ``default``, or ``lean``: without the garbage collections that APPFL does at every step unless it is told
``optimize_memory: false``. Its synchronous scheduler draws no clients: ``digits`` has the first four of them alone.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
from appfl.agent import ClientAgent, ServerAgent
from appfl.comm.mpi import MPIClientCommunicator, MPIServerCommunicator
from common import BATCH, MOVING, RATE, Job, job
from mpi4py import MPI
from omegaconf import OmegaConf

PARTS = str(Path(__file__).parent / "appfl_parts.py")


def serve(work: Job, lean: dict[str, bool], logs: dict[str, str]) -> None:
    moving = work.workload == MOVING
    training = {
        "trainer": "VanillaTrainer", "mode": "epoch", "num_local_epochs": 1, "optim": "SGD", "optim_args": {"lr": RATE},
        "loss_fn": "CrossEntropyLoss", "do_validation": False, "do_pre_validation": False, "train_batch_size": BATCH,
        "metric_path": PARTS, "metric_name": "metric", **lean,
    }  # fmt: skip
    if moving:
        training |= {"trainer": "AddingTrainer", "trainer_path": PARTS}
    server = {
        "num_clients": work.participants, "scheduler": "SyncScheduler", "aggregator": "FedAvgAggregator",
        "scheduler_kwargs": {"same_init_model": True, **lean}, "device": "cpu", "num_global_epochs": work.rounds,
        "aggregator_kwargs": {"client_weights_mode": "equal", **lean}, **lean, **logs,
    }  # fmt: skip
    clients = {
        "train_configs": training,
        "model_configs": {"model_path": PARTS, "model_name": "resnet" if moving else "CNN"},
        "comm_configs": {"compressor_configs": {"enable_compression": False}},
    }
    config = OmegaConf.create({"client_configs": clients, "server_configs": server})
    agent = ServerAgent(server_agent_config=config)
    aggregator = agent.scheduler.aggregator
    aggregate = aggregator.aggregate

    def timed(*arguments: Any, **named: Any) -> Any:
        aggregated = aggregate(*arguments, **named)
        work.round_ended()
        return aggregated

    aggregator.aggregate = timed
    MPIServerCommunicator(MPI.COMM_WORLD, agent, logger=agent.logger, **lean).serve()
    work.finish(aggregator.model)


def client_agent(work: Job, client: int, lean: dict[str, bool], logs: dict[str, str]) -> ClientAgent:
    config = {
        "client_id": f"Client{client}",
        "train_configs": {"device": "cpu", **lean, **logs},
        "data_configs": {
            "dataset_path": PARTS,
            "dataset_name": f"{work.workload}_data",
            "dataset_kwargs": {"client_id": client},
        },
        **lean,
    }
    return ClientAgent(client_agent_config=OmegaConf.create(config))


def train(work: Job, lean: dict[str, bool], logs: dict[str, str]) -> None:
    comm = MPI.COMM_WORLD
    shares = np.array_split(np.arange(work.participants), comm.size - 1)
    agents = {f"Client{client}": client_agent(work, int(client), lean, logs) for client in shares[comm.rank - 1]}
    link = MPIClientCommunicator(comm, server_rank=0, client_ids=list(agents), **lean)
    config = link.get_configuration()
    for agent in agents.values():
        agent.load_config(copy.deepcopy(config))
    start = link.get_global_model(init_model=True)
    for agent in agents.values():
        agent.load_parameters(start)
    sizes = {name: {"sample_size": agent.get_sample_size(), "sync": True} for name, agent in agents.items()}
    link.invoke_custom_action(action="set_sample_size", kwargs=sizes)
    while True:
        models, about = {}, {}
        for name, agent in agents.items():
            agent.train()
            models[name] = agent.get_parameters()
            if isinstance(models[name], tuple):
                models[name], about[name] = models[name]
        received, status = link.update_global_model(models, kwargs=about)
        if all(each["status"] == "DONE" for each in status.values()):
            break
        for agent in agents.values():
            agent.load_parameters(received)
    link.invoke_custom_action(action="close_connection")


def main() -> None:
    work = job()
    lean = {"optimize_memory": False} if work.way == "lean" else {}
    logs = {"logging_output_dirname": os.environ["PEERS_FOLDER"], "logging_output_filename": "log"}
    (serve if MPI.COMM_WORLD.rank == 0 else train)(work, lean, logs)


if __name__ == "__main__":
    main()
