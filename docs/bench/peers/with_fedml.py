"""FedML's simulations, in one process (``sp``) or with a rank for the server and for every participant (``mpi``).

Its classes are called directly: ``fedml.init`` logs in to a platform, and what is reported there is left out.
"""

from __future__ import annotations

import copy
import os
import sys
from types import SimpleNamespace

os.environ["WANDB_MODE"] = "disabled"
import torch
from common import BATCH, IMAGES, MOVING, RATE, Job, add, client_set, job
from fedml.ml.trainer.my_model_trainer_classification import ModelTrainerCLS
from torch.utils.data import DataLoader, TensorDataset


class AddingTrainer(ModelTrainerCLS):
    def train(self, train_data, device, args):
        ((client,),) = train_data
        add(self.model, int(client))


class NoReports:
    """In place of the module that reports to the platform."""

    def __getattr__(self, name):
        return self

    def __call__(self, *arguments, **named):
        return None


def loader(work: Job, client: int) -> DataLoader:
    if work.workload == MOVING:
        return DataLoader(TensorDataset(torch.tensor([client])), 1)
    return DataLoader(client_set(client), BATCH, shuffle=True)


def settings(work: Job) -> SimpleNamespace:
    return SimpleNamespace(
        client_num_in_total=work.clients, client_num_per_round=work.participants, comm_round=work.rounds, epochs=1,
        batch_size=BATCH, client_optimizer="sgd", learning_rate=RATE, weight_decay=0.0, momentum=0.0,
        frequency_of_the_test=10**9, dataset="digits", model="cnn", enable_wandb=False, using_mlops=False,
        backend="MPI" if work.way == "mpi" else "sp", training_type="simulation", federated_optimizer="FedAvg",
        rank=0, run_id="0", is_mobile=0, comm=None, process_id=0, worker_num=1, scenario="horizontal",
        enable_attack=False, enable_defense=False, enable_dp=False, enable_fhe=False, enable_contribution=False,
        config_version="release", random_seed=0,
    )  # fmt: skip


def in_one_process(work: Job, model: torch.nn.Module, data: list) -> None:
    from fedml.simulation.sp.fedavg import fedavg_api

    class TimedAPI(fedavg_api.FedAvgAPI):
        def _aggregate(self, w_locals):
            aggregated = super()._aggregate(w_locals)
            work.round_ended()
            return aggregated

        def _local_test_on_all_clients(self, round_idx):
            pass

    fedavg_api.mlops = NoReports()
    if work.workload == MOVING:
        fedavg_api.create_model_trainer = AddingTrainer
    api = TimedAPI(settings(work), torch.device("cpu"), data, model)
    # The parameters that the first round starts from are those of the one model that all clients train, so that each
    # client would start from the result of the one before. Later rounds have their own.
    trainer, start = api.model_trainer, copy.deepcopy(model.state_dict())

    def start_of_first_round():
        del trainer.get_model_params
        return start

    trainer.get_model_params = start_of_first_round
    api.train()
    work.finish(api.model_trainer.model)


def on_ranks(work: Job, model: torch.nn.Module, data: list) -> None:
    from fedml.simulation.mpi.fedavg.FedAVGAggregator import FedAVGAggregator
    from fedml.simulation.mpi.fedavg.FedAvgAPI import FedML_FedAvg_distributed
    from mpi4py import MPI

    comm, args, aggregate = MPI.COMM_WORLD, settings(work), FedAVGAggregator.aggregate
    args.comm, args.process_id, args.rank, args.worker_num = comm, comm.rank, comm.rank, comm.size
    for name, module in list(sys.modules.items()):
        if name.startswith("fedml.simulation.mpi.fedavg") and hasattr(module, "mlops"):
            module.mlops = NoReports()

    def timed(self):
        aggregated = aggregate(self)
        work.round_ended()
        if len(work.ended) == work.rounds:
            model.load_state_dict(aggregated)
            work.finish(model)
        return aggregated

    FedAVGAggregator.aggregate = timed
    FedAVGAggregator.test_on_server_for_all_clients = lambda self, round_idx: None
    trainer = AddingTrainer(model, args) if work.workload == MOVING else None
    FedML_FedAvg_distributed(args, comm.rank, comm.size, comm, torch.device("cpu"), data, model, client_trainer=trainer)


def main() -> None:
    work = job()
    clients = range(work.clients)
    loaders = {client: loader(work, client) for client in clients}
    sizes, tests = dict.fromkeys(clients, IMAGES), dict.fromkeys(clients)
    data = [IMAGES * work.clients, 0, None, None, sizes, loaders, tests, 10]
    (on_ranks if work.way == "mpi" else in_one_process)(work, work.model(), data)


if __name__ == "__main__":
    main()
