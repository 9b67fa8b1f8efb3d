"""FedAvg (McMahan et al., 2017): local SGD, and the server applies the mean offset.

client   x = x - eta_t * g
server   x^{t+1} = x^t - eta_g * mean(x^t - x_{i,K})
"""

from .base import Algorithm


class FedAvg(Algorithm):
    name, label, year, colour = "fedavg", "FedAvg", 2017, "#5a5a5a"
    tuned = {"": dict(weight_decay=0.002)}
