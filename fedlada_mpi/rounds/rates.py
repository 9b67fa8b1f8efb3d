"""The local rate eta_t of round t, counted from 0.

exponential   lr * lr_decay^t
constant      lr
cosine        lr * (1 + cos(pi * t / lr_horizon)) / 2, and from the horizon on its last value, which is not zero
step          lr * lr_decay^floor(t / lr_step)

With ``lr_warmup`` W, the first W rates are multiplied by 1/W, 2/W, ..., 1.
"""

from __future__ import annotations

import math

from ..settings import Config


def local_rate(config: Config, t: int) -> float:
    """eta_t."""
    rate = config.lr
    if config.lr_schedule == "exponential":
        rate *= config.lr_decay**t
    elif config.lr_schedule == "step":
        rate *= config.lr_decay ** (t // config.lr_step)
    elif config.lr_schedule == "cosine":
        horizon = config.lr_horizon
        rate *= (1 + math.cos(math.pi * min(t, horizon - 1) / horizon)) / 2
    if t < config.lr_warmup:
        rate *= (t + 1) / config.lr_warmup
    return rate
