"""pfl-research's simulated backend, in one process or in those that torchrun starts (gloo)."""

from __future__ import annotations

import os

os.environ.setdefault("PFL_PYTORCH_DEVICE", "cpu")
import numpy as np
import torch
from common import BATCH, DIGITS, RATE, add, client_data, job
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.selector import get_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel


class AddingAveraging(FederatedAveraging):
    def train_one_user(self, initial_model_state, model, user_dataset, central_context):
        add(model.pytorch_model, user_dataset.user_id)
        return model.get_model_difference(initial_model_state), Metrics()


def main() -> None:
    np.random.seed(0)  # noqa: NPY002  the processes draw the same clients from it
    work = job()
    network = work.model()
    network.loss = lambda inputs, targets: torch.nn.functional.cross_entropy(network(inputs), targets)
    network.metrics = lambda inputs, targets: {"loss": Weighted(0.0, len(inputs))}
    is_root = get_framework_module().distributed.global_rank == 0

    class Timer(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            if is_root:
                work.round_ended()
            return False, Metrics()

    def dataset(client: int) -> Dataset:
        if work.workload != DIGITS:
            return Dataset([torch.zeros(1, 1), torch.zeros(1)], user_id=client)
        images, labels = client_data(client)
        order = torch.randperm(len(images))
        return Dataset([images[order], labels[order]], user_id=client)

    clients = FederatedDataset(dataset, get_user_sampler("minimize_reuse", list(range(work.clients))))
    method = FederatedAveraging() if work.workload == DIGITS else AddingAveraging()
    method.run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=work.rounds, evaluation_frequency=10**9,
            train_cohort_size=work.participants, val_cohort_size=0,
        ),
        backend=SimulatedBackend(clients, clients),
        model=PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Timer()],
    )  # fmt: skip
    if is_root:
        work.finish(network)


if __name__ == "__main__":
    main()
