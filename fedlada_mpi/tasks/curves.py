"""Metrics of rankings, of all predictions at once: the area under the ROC curve, and Harrell's C-index.

Ties count one half, as in scikit-learn and lifelines. NaN where there is nothing to compare, or where a score is NaN.
"""

from __future__ import annotations

import numpy as np


def ranks(values: np.ndarray) -> np.ndarray:
    """Places 0, 1, ... of the values in ascending order; equal values share one (dense ranks)."""
    return np.unique(values, return_inverse=True)[1].reshape(values.shape)


def area_under_curve(scores: np.ndarray, positive: np.ndarray) -> float:
    """The probability that a positive example has a higher score than a negative one: ``scores`` and bool [n]."""
    positives = int(np.count_nonzero(positive))
    negatives = len(positive) - positives
    if not positives or not negatives or np.isnan(scores).any():
        return float("nan")
    place = ranks(scores)
    above = np.bincount(place, positive).astype(np.int64)
    below = np.bincount(place, ~positive).astype(np.int64)
    # Twice the number of pairs in order: whole numbers, so that the result does not depend on the order of the rows.
    pairs = int(above @ (2 * (np.cumsum(below) - below) + below))
    return pairs / (2 * positives * negatives)


def mean_defined(values: list[float]) -> float:
    """The mean of those that are not NaN; NaN if none is."""
    defined = [value for value in values if not np.isnan(value)]
    return float(np.mean(defined)) if defined else float("nan")


def concordance(times: np.ndarray, events: np.ndarray, risks: np.ndarray) -> float:
    """Harrell's C-index: the share of comparable pairs in which the one with the earlier event has the higher risk.

    A pair is comparable if the earlier time is that of an event; at equal times, if one had its event and the other
    was censored, who is taken to have lived longer.
    """
    if not len(times) or np.isnan(risks).any():
        return float("nan")
    events = np.asarray(events).astype(bool)
    # The latest first, the censored before the events of the same time: who is comparable with an event stands before
    # all events of its time.
    order = np.lexsort((events, -np.asarray(times, np.float64)))
    times, events, place = times[order], events[order], ranks(risks)[order]
    new = np.r_[True, (times[1:] != times[:-1]) | (events[1:] != events[:-1])]
    start = np.maximum.accumulate(np.where(new, np.arange(len(times)), 0))
    before, own = start[events], place[events]
    comparable = int(before.sum())
    if not comparable:
        return float("nan")
    lower, equal = _count_before(place, before, own)
    return (2 * lower + equal) / (2 * comparable)


def _count_before(place: np.ndarray, before: np.ndarray, own: np.ndarray) -> tuple[int, int]:
    """Over all queries: how many of the first ``before`` of ``place`` are lower than ``own``, and how many equal.

    A prefix is made of one block of 2^level for every bit of its length; blocks are sorted, level by level, and the
    queries look up where they stand in theirs: O(n log^2 n) in a few calls of numpy.
    """
    lower = equal = 0
    count, span = len(place), int(place.max()) + 1
    for level in range(count.bit_length()):
        queries = (before >> level) & 1 == 1
        if not queries.any():
            continue
        block, value = (before[queries] >> level) - 1, own[queries]
        keys = np.sort((np.arange(count) >> level) * span + place)
        first = np.searchsorted(keys, block * span + value, "left")
        last = np.searchsorted(keys, block * span + value, "right")
        lower += int((first - (block << level)).sum())
        equal += int((last - first).sum())
    return lower, equal
