"""Inputs of the metrics whose values scikit-learn and lifelines gave: seeded, so that both sides see the same."""

from __future__ import annotations

import numpy as np


def classes(seed: int = 0, rows: int = 200, count: int = 4, digits: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Logits, rounded so that some are equal, and classes of which the first is frequent."""
    rng = np.random.RandomState(seed)
    targets = np.minimum(rng.randint(0, 2 * count, rows), rng.randint(0, count, rows))
    outputs = rng.randn(rows, count) + np.eye(count)[targets]
    return np.round(outputs, digits), targets


def labels(seed: int = 1, rows: int = 150, count: int = 5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.RandomState(seed)
    targets = (rng.rand(rows, count) < np.linspace(0.1, 0.6, count)).astype(np.uint8)
    return np.round(rng.randn(rows, count) + targets, 1), targets


def numbers(seed: int = 2, rows: int = 120, columns: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.RandomState(seed)
    targets = 100 + rng.randn(rows, columns) * [1, 2, 5]
    return targets + rng.randn(rows, columns), targets


def counts(seed: int = 3, rows: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """The log of a mean, and counts with many zeros."""
    rng = np.random.RandomState(seed)
    outputs = rng.randn(rows, 1) * 0.8
    return outputs, rng.poisson(np.exp(outputs[:, 0] + 0.3 * rng.randn(rows)))


def lifetimes(seed: int = 4, rows: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Risks and [event, time], both with ties."""
    rng = np.random.RandomState(seed)
    risks = np.round(rng.randn(rows, 1), 1)
    times = np.ceil(8 * rng.exponential(np.exp(-risks[:, 0])))
    return risks, np.stack([(rng.rand(rows) < 0.6).astype(float), times], 1)


def masks(seed: int = 5, rows: int = 12, count: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Logits [n, K, 6, 5] and classes; some examples lack a class, one has background only, some pixels are 255."""
    rng = np.random.RandomState(seed)
    targets = rng.randint(0, count, (rows, 6, 5)) * (rng.rand(rows, 6, 5) < 0.4)
    targets[:6][targets[:6] == 3] = 0
    targets[0] = 0
    outputs = rng.randn(rows, count, 6, 5) + 2 * np.eye(count)[targets].transpose(0, 3, 1, 2)
    outputs[0, 1:] -= 100
    outputs[1:4, 3] -= 100
    targets[rng.rand(rows, 6, 5) < 0.1] = 255
    return outputs, targets.astype(np.uint8)


def tokens(seed: int = 6, rows: int = 10, length: int = 7, size: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Logits [n, T, V] and the next tokens, -1 from some place on; the last row has none at all."""
    rng = np.random.RandomState(seed)
    targets = rng.randint(0, size, (rows, length))
    outputs = rng.randn(rows, length, size) + np.eye(size)[targets]
    targets[np.arange(length) >= rng.randint(1, length + 1, rows)[:, None]] = -1
    targets[-1] = -1
    return outputs, targets
