"""Which rank owns which clients: contiguous runs of them, as even in images as whole clients allow.

    owned = owned_clients(manifest, ranks=3)
    shard = read_clients(manifest, owned[0])

Clients are taken in the order of the files, so that a rank reads one range of each file that it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .manifest import Manifest


def owned_clients(manifest: Manifest, ranks: int, silo_per_rank: bool = False) -> list[np.ndarray]:
    """The clients of each rank; with ``silo_per_rank`` whole files of them, each of one rank alone."""
    if silo_per_rank:
        return [_joined(manifest, silos) for silos in np.array_split(np.arange(manifest.silos), ranks)]
    clients = _joined(manifest, np.arange(manifest.silos))
    ends = even_runs(manifest.sizes[clients], ranks)
    return np.split(clients, ends[:-1])


@dataclass(frozen=True)
class Ownership:
    """Which clients each rank trains, by rank."""

    clients_of: list[np.ndarray]
    only_serves: list[bool]  # whether a rank is there to serve, and has no clients for that reason

    def mask(self, clients: int) -> np.ndarray:
        """Of each of ``clients``, whether a rank trains it."""
        owned = np.zeros(clients, bool)
        owned[np.concatenate(self.clients_of)] = True
        return owned


def shared_out(manifest: Manifest, ranks: int, servers: int = 0, silo_per_rank: bool = False) -> Ownership:
    """All clients, shared out among all ranks but the first ``servers``."""
    nobody: list[np.ndarray] = [np.empty(0, np.int64)] * servers
    owned = owned_clients(manifest, ranks - servers, silo_per_rank)
    return Ownership([*nobody, *owned], [rank < servers for rank in range(ranks)])


def _joined(manifest: Manifest, silos: np.ndarray) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *(manifest.client_ids[silo] for silo in silos)])


def even_runs(sizes: np.ndarray, runs: int) -> list[int]:
    """The ends of ``runs`` contiguous runs whose largest sum of ``sizes`` is the least possible.

    Within that bound every run takes its share of what is left, rounded up, so that equal sizes are divided as
    ``np.array_split`` does. No run is empty unless there are more runs than sizes.
    """
    sums, count = np.concatenate([[0], np.cumsum(sizes)]), len(sizes)
    least, most = max(-(-int(sums[-1]) // runs), int(sizes.max())), int(sums[-1])
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if _enough(sums, middle, runs) else (middle + 1, most)
    needed = _runs_needed(sums, most)
    ends, start = [], 0
    for left in range(runs, 1, -1):
        share = sums[start] - (sums[start] - sums[-1]) // left
        end = min(int(np.searchsorted(sums, share)), _furthest(sums, start, most))
        # What stays must fit into the other runs, and leave none of them empty.
        while needed[end] > left - 1:
            end += 1
        start = max(min(end, count - left + 1), min(start + 1, count))
        ends.append(start)
    return [*ends, count]


def _furthest(sums: np.ndarray, start: int, most: int) -> int:
    """Where the longest run from ``start`` ends whose sum is up to ``most``; ``sums`` are those up to each place."""
    return int(np.searchsorted(sums, sums[start] + most, "right")) - 1


def _enough(sums: np.ndarray, most: int, runs: int) -> bool:
    """Whether ``runs`` runs of sums up to ``most`` hold all."""
    start = 0
    for _ in range(runs):
        start = _furthest(sums, start, most)
    return start == len(sums) - 1


def _runs_needed(sums: np.ndarray, most: int) -> np.ndarray:
    """How many runs of sums up to ``most`` hold all from each place on."""
    following = np.searchsorted(sums, sums + most, "right") - 1
    needed = np.zeros(len(sums), np.int64)
    for place in range(len(sums) - 2, -1, -1):
        needed[place] = needed[following[place]] + 1
    return needed
