"""Gaussian noise from bits that nobody can repeat: AES-256 in counter mode, with a key of the operating system.

Noise never comes from ``--seed``, and is fresh in every round, also in one that is done again.
"""

from __future__ import annotations

import math
import os

import numpy as np
import torch
from torch import Tensor

from .library import require_cryptography

BLOCK = 1 << 18  # numbers at a time
FINE = 2.0**-32  # of the deviation: the grid that sums are rounded to before they get noise


class Noise:
    """A stream of its own.

    >>> Noise().normal(3).shape
    (3,)
    """

    def __init__(self) -> None:
        require_cryptography("--dp")
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import CTR

        self._stream = Cipher(AES(os.urandom(32)), CTR(bytes(16))).encryptor()

    def normal(self, count: int) -> np.ndarray:
        """Independent N(0, 1) in double, by Box and Muller."""
        pairs = -(-count // 2)
        bits = np.frombuffer(self._stream.update(bytes(16 * pairs)), np.uint64).reshape(2, pairs)
        uniform = ((bits >> np.uint64(11)).astype(np.float64) + 1) * 2.0**-53  # in (0, 1]
        radius, angle = np.sqrt(-2 * np.log(uniform[0])), 2 * math.pi * uniform[1]
        return np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))[:count]

    def whole(self, count: int, deviation: float) -> np.ndarray:
        """N(0, deviation^2), rounded to integers, which may be added to integers as shares of the noise."""
        found = np.empty(count, np.int64)
        for first in range(0, count, BLOCK):
            part = found[first : first + BLOCK]
            part[:] = np.rint(self.normal(len(part)) * deviation)
        return found

    def add_to(self, vector: Tensor, deviation: float, where: Tensor | None = None) -> None:
        """N(0, deviation^2) to every element, or to those at which ``where`` is one.

        Sum and noise are whole multiples of a power of two, as the last bits of a floating-point sum would tell what
        was added (Mironov, 2012).
        """
        spacing = 2.0 ** math.floor(math.log2(deviation)) * FINE
        for first in range(0, len(vector), BLOCK):
            part = slice(first, first + BLOCK)
            total = vector[part].double().cpu().div_(spacing).round_()
            noise = torch.from_numpy(np.rint(self.normal(len(total)) * (deviation / spacing)))
            if where is not None:
                noise *= where[part].cpu()
            vector[part] = total.add_(noise).mul_(spacing).to(vector.device, vector.dtype)

    def added(self, number: float, deviation: float) -> float:
        """The same of a single number."""
        vector = torch.tensor([number], dtype=torch.float64)
        self.add_to(vector, deviation)
        return float(vector)
