"""The order of tests for several processes: long ones first, so that none of them begins when all others are done."""

from __future__ import annotations

from collections.abc import Sequence

LONG = ("tests/suite/", "tests/gpu/test_kernels.py")
# They share one cluster, for which they mostly wait: in one process, behind its long tests.
CLUSTER = "tests/slurm/"


def long_first(names: Sequence[str], processes: int) -> list[int]:
    """Places of the tests in a new order, of which pytest-xdist gives every process an equal part from left to right.

    Each part begins with its share of the long tests; what a process has not begun, idle ones take from the end.
    """
    long, cluster, rest = [], [], []
    for place, name in enumerate(names):
        (long if name.startswith(LONG) else cluster if name.startswith(CLUSTER) else rest).append(place)
    rest = cluster + rest
    cuts = [len(rest) * part // processes for part in range(processes + 1)]
    return [p for i in range(processes) for p in (*long[i::processes], *rest[cuts[i] : cuts[i + 1]])]
