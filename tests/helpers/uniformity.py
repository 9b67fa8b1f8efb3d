"""Whether bytes look random."""

from __future__ import annotations

import numpy as np

# chi-square of 256 byte values over its 255 degrees of freedom: 1 with a deviation of 0.09 if all are equally likely.
LOWEST, HIGHEST = 0.6, 1.4


def chi_square(content: bytes) -> float:
    counts = np.bincount(np.frombuffer(content, np.uint8), minlength=256)
    expected = len(content) / 256
    return float(((counts - expected) ** 2).sum() / expected / 255)


def lag_correlation(content: bytes) -> float:
    """Of every byte with the next one."""
    values = np.frombuffer(content, np.uint8).astype(float)
    return float(np.corrcoef(values[:-1], values[1:])[0, 1])


def looks_random(content: bytes) -> bool:
    # Four standard deviations of a correlation that is 0.
    return LOWEST < chi_square(content) < HIGHEST and abs(lag_correlation(content)) < 4 / np.sqrt(len(content))
