"""FedAvg (McMahan et al., 2017): local SGD, and the server applies the mean offset.

client   x = x - eta_t * g
server   x^{t+1} = x^t - eta_g * mean(x^t - x_{i,K})
"""

from . import register
from .base import Algorithm


@register("fedavg")
class FedAvg(Algorithm):
    """The base class is FedAvg; the other methods state what they do differently."""
