"""APPFL, its agents in one process, or on ranks: the first serves, the others have the clients, one or several each.

``WAY`` is ``lean``, or ``default`` with the garbage collections that APPFL does at every step unless it is told
``optimize_memory: false``. In one process the loop over clients is the user's, who draws them; over MPI, all clients
take part in every round, so that ``digits`` has the first four of them alone.
"""

from __future__ import annotations

import copy
import os
import random
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from appfl.agent import ClientAgent, ServerAgent
from appfl.comm.mpi import MPIClientCommunicator, MPIServerCommunicator
from common import BATCH, MOVING, RATE, Job, job
from mpi4py import MPI
from omegaconf import OmegaConf

PARTS = str(Path(__file__).parent / "appfl_parts.py")


def server_agent(work: Job, lean: dict[str, bool], logs: dict[str, str]) -> ServerAgent:
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
    return agent


def in_one_process(work: Job, lean: dict[str, bool], logs: dict[str, str]) -> None:
    server, draw = server_agent(work, lean, logs), random.Random(0)
    clients = [client_agent(work, client, lean, logs) for client in range(work.clients)]
    for client in clients:
        client.load_config(copy.deepcopy(server.get_client_configs()))
        server.set_sample_size(client.get_id(), client.get_sample_size())
    x = server.get_parameters(serial_run=True)
    while not server.training_finished():
        futures = []
        for client in draw.sample(clients, work.participants):
            client.load_parameters(x)
            client.train()
            futures.append(update(client, server))
        x = futures[-1].result()
    work.finish(server.scheduler.aggregator.model)


def update(client: ClientAgent, server: ServerAgent) -> Future:
    sent = client.get_parameters()
    model, about = sent if isinstance(sent, tuple) else (sent, {})
    return server.global_update(client_id=client.get_id(), local_model=model, blocking=False, **about)


def serve(work: Job, lean: dict[str, bool], logs: dict[str, str]) -> None:
    agent = server_agent(work, lean, logs)
    MPIServerCommunicator(MPI.COMM_WORLD, agent, logger=agent.logger, **lean).serve()
    work.finish(agent.scheduler.aggregator.model)


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
    comm = MPI.COMM_WORLD
    (in_one_process if comm.size == 1 else serve if comm.rank == 0 else train)(work, lean, logs)


if __name__ == "__main__":
    main()
