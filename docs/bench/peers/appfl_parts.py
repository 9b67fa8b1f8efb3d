"""What ``with_appfl.py`` names to APPFL, which loads it from this file: models, data, a metric, a trainer."""

from __future__ import annotations

import numpy as np
import torch
from appfl.algorithm.trainer import VanillaTrainer
from common import CNN as CNN
from common import add, client_set
from common import resnet as resnet


def moving_data(client_id: int):
    return torch.utils.data.TensorDataset(torch.full((10, 1), client_id), torch.zeros(10)), None


def digits_data(client_id: int):
    return client_set(client_id), None


def metric(true: np.ndarray, predicted: np.ndarray) -> float:
    return 100 * float((predicted.argmax(1) == true).mean())


class AddingTrainer(VanillaTrainer):
    def train(self, **named):
        (client, *_), _ = self.train_dataset[0]
        add(self.model, int(client))
        self.round += 1
        self.__dict__.pop("model_state", None)  # so that get_parameters copies the new values
