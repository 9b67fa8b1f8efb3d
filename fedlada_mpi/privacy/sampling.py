"""Who takes part in a round, drawn so that nobody can know: samples that are known make nothing private."""

from __future__ import annotations

import os

import numpy as np


def secret_sample(clients: np.ndarray, share: float) -> np.ndarray:
    """Each of the clients with probability ``share``; another sample in every call."""
    bits = np.frombuffer(os.urandom(8 * len(clients)), np.uint64)
    return clients[(bits >> np.uint64(11)).astype(np.float64) < share * 2.0**53]
