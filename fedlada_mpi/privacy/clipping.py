"""The bound on what one client adds to a sum, and how it follows the clients' norms (Andrew et al., 2021)."""

from __future__ import annotations

import math

import numpy as np

MARGIN = 2.0**-20  # of the bound, for the rounding of products in float32
SMALLEST = 2.0**-100  # factor that float32 has all its digits for, with a smaller number that it is multiplied by
QUANTILE, RATE = 0.5, 0.2  # the share of norms that the bound is led to, and how fast


def factors(norms: np.ndarray, clip: float) -> np.ndarray:
    """That contributions of these norms are multiplied by, so that none is longer than ``clip``.

    Of a client that has diverged beyond any use, nothing is sent.
    """
    most = clip * (1 - MARGIN)
    found = most / np.maximum(norms, most)
    return np.where(found < SMALLEST, 0.0, found)


def within(norms: np.ndarray, clip: float) -> float:
    """The sum of a half for every norm up to ``clip``, and minus a half for every other one."""
    return float(np.where(norms <= clip, 0.5, -0.5).sum())


def next_clip(clip: float, share: float) -> float:
    """Where about ``share`` of the norms were within ``clip``."""
    return clip * math.exp(-RATE * (share - QUANTILE))
