"""From the participants' contributions to their mean, for ``--sums exact`` and ``--robust``.

Both need what every participant sends until all of them have trained. Plain sums do not: ``Trainer`` adds them up as
clients finish.

exact    Every coordinate has a grid of its own, of spacing 2^g, from the largest exponent that it has on any rank.
         Contributions are rounded to whole multiples of it, which are integers; their sums are exact, in any order.
clip     v_i * min(1, median_j |v_j| / |v_i|), then sums as above or plain ones
median, trimmed    coordinate by coordinate; every rank computes a slice (mpi/slices.py)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ..algorithms import Algorithm
from ..mpi import World
from ..mpi.slices import over_participants
from ..mpi.transport import Transport
from ..settings import Config, trimmed

BLOCK = {"cpu": 1 << 18, "cuda": 1 << 26}  # values at a time: a CPU's stay in its cache


def wire_type(config: Config, dtype: torch.dtype) -> torch.dtype:
    """What sums of ``dtype`` are reduced in."""
    return GRIDS[dtype].integer if config.sums == "exact" else dtype


class Contributions:
    """What a rank's participants send, a row each, and their numbers: weight, loss, |offset|^2 and the scalars."""

    def __init__(self, names: Sequence[str], size: int, dtype: torch.dtype, device: torch.device):
        self._rows = {name: torch.empty(0, size, dtype=dtype, device=device) for name in names}
        self.clients: list[int] = []
        self.numbers: list[list[float]] = []

    @property
    def bytes_per_client(self) -> int:
        return sum(rows.shape[1] * rows.element_size() for rows in self._rows.values())

    def start(self, count: int) -> None:
        """Forget the last round's; room for ``count`` clients."""
        self.clients, self.numbers = [], []
        for name, rows in self._rows.items():
            if len(rows) < count:
                self._rows[name] = rows.new_empty(0)  # before there are both
                self._rows[name] = rows.new_empty(count, rows.shape[1])

    def rows(self, name: str) -> Tensor:
        return self._rows[name][: len(self.clients)]

    def put(self, name: str, where: slice, sent: Tensor, which: np.ndarray) -> None:
        """The elements ``where`` of the next clients' vectors; in ``sent`` they are the rows ``which``."""
        for target, i in zip(self._rows[name][len(self.clients) :], which, strict=False):
            target[where].copy_(sent[i])

    def add(self, clients: np.ndarray, numbers: np.ndarray) -> None:
        """The clients whose vectors were put, and their numbers, a row for each kind."""
        self.clients += clients.tolist()
        self.numbers += numbers.T.tolist()


class KeptSums:
    """Sums over the contributions that all ranks keep; ``vectors`` is where the root gets them."""

    def __init__(
        self, world: World, config: Config, algorithm: Algorithm, transport: Transport, vectors: dict[str, Tensor]
    ):
        self.world, self.config, self.algorithm = world, config, algorithm
        self.transport, self.vectors = transport, vectors
        size, device, dtype = transport.size, transport.device, vectors[algorithm.up[0]].dtype
        self.kept = Contributions(algorithm.up, size, dtype, device)
        self.grid = GRIDS[dtype] if config.sums == "exact" else None
        self.by_coordinate = config.robust in ("median", "trimmed")
        on_grid = self.grid is not None and not self.by_coordinate
        self.integers = torch.zeros(len(algorithm.up) if on_grid else 0, size, dtype=transport.dtype, device=device)
        self.columns: dict[int, int] = {}  # in the table, by participant
        self.table = np.zeros((0, 0))

    @property
    def divides(self) -> bool:
        """Whether the results are sums; otherwise they are means already."""
        return not self.by_coordinate

    def bytes_moved(self, participants: int) -> int:
        """By the ranks of a round with so many participants."""
        a, t, ranks = self.algorithm, self.transport, self.world.size
        if self.by_coordinate:
            return len(a.up) * (participants + 1) * t.bytes_per_vector // ranks
        exponents = 2 * t.bytes_per_vector * self.grid.exponent.itemsize // t.dtype.itemsize if self.grid else 0
        return len(a.up) * (t.bytes_rounded + exponents)

    def share(self, participants: np.ndarray) -> None:
        """Every participant's numbers, on all ranks; those of clients that are left out are zero."""
        self.columns = {client: i for i, client in enumerate(participants.tolist())}
        self.table = self._by_participant(self.kept.numbers, 3 + len(self.algorithm.scalars))

    def _by_participant(self, numbers: Sequence[Sequence[float]], rows: int) -> np.ndarray:
        """Numbers of this rank's clients as columns of a table of all participants, added up over the ranks."""
        table = np.zeros((rows, len(self.columns)))
        for client, column in zip(self.kept.clients, numbers, strict=True):
            table[:, self.columns[client]] = column
        return self.world.allreduce_sum(table)

    @property
    def included(self) -> np.ndarray:
        return self.table[0] > 0

    @property
    def loss(self) -> float:
        return float(self.table[1].sum())

    @property
    def offset_norm2(self) -> float:
        return float((self.table[0] * self.table[2]).sum())

    def _weights(self, name: str, weights: np.ndarray) -> np.ndarray:
        return (weights > 0).astype(float) if name in self.algorithm.uniform else weights

    def scalars(self) -> dict[str, float]:
        """The sums of the scalars, or their robust means."""
        found = {}
        for name, values in zip(self.algorithm.scalars, self.table[3:], strict=True):
            if self.by_coordinate:
                found[name] = float(self._center()(torch.from_numpy(values[self.included])[:, None]))
            else:
                factors = self._factors(np.abs(values)) if self.config.robust == "clip" else 1.0
                found[name] = float((values * self._weights(name, self.table[0]) * factors).sum())
        return found

    def reduce(self) -> None:
        """Of all participants' vectors, in the root's ``vectors``."""
        if not self.included.any():
            return
        if self.by_coordinate:
            counts = np.zeros(self.world.size)
            counts[self.world.rank] = len(self.kept.clients)
            everywhere = self.world.allreduce_sum(counts).astype(int).tolist()
            for name, vector in self.vectors.items():
                over_participants(self.world, self.kept.rows(name), everywhere, self._center(), vector)
            return
        own = np.array([row[0] for row in self.kept.numbers])
        weights = {name: self._weights(name, own) * self._clipped(name) for name in self.vectors}
        if self.grid is None:
            for name, vector in self.vectors.items():
                vector.zero_()
                for row, weight in zip(self.kept.rows(name), weights[name], strict=True):
                    vector.add_(row, alpha=float(weight))
            self.transport.reduce(list(self.vectors.values()))
        else:
            self._reduce_on_grid(self.grid, weights)

    def _reduce_on_grid(self, grid: Grid, weights: dict[str, np.ndarray]) -> None:
        exponents = torch.stack([grid.exponents(self.kept.rows(name)) for name in self.vectors]).cpu()
        self.world.allreduce_max(exponents.numpy())
        exponents = exponents.to(self.transport.device)
        # A power of two that no sum of weights exceeds, clipped or not.
        totals = [self._weights(name, self.table[0]).sum() for name in self.vectors]
        bits = [max(0, math.ceil(math.log2(total))) for total in totals]
        for i, name in enumerate(self.vectors):
            grid.whole(self.kept.rows(name), weights[name], exponents[i], bits[i], self.integers[i])
        self.transport.reduce(list(self.integers))
        if self.world.rank == 0:
            for i, vector in enumerate(self.vectors.values()):
                grid.real(self.integers[i], exponents[i], bits[i], vector)

    def _clipped(self, name: str) -> np.ndarray:
        """The factors of this rank's clients."""
        if self.config.robust != "clip":
            return np.ones(len(self.kept.clients))
        rows = self.kept.rows(name)
        norms = [[float(torch.linalg.vector_norm(row, dtype=torch.float64))] for row in rows]
        factors = self._factors(self._by_participant(norms, 1)[0])
        return factors[[self.columns[client] for client in self.kept.clients]]

    def _factors(self, norms: np.ndarray) -> np.ndarray:
        """That clip the participants' norms to their median."""
        median = np.median(norms[self.included])
        return np.divide(median, norms, out=np.ones_like(norms), where=norms > median)

    def _center(self) -> Callable[[Tensor], Tensor]:
        count = int(self.included.sum())
        if self.config.robust == "median":
            return lambda values: mean_of_middle(values, (count - 1) // 2)
        return lambda values: mean_of_middle(values, trimmed(self.config.trim, count))

    def spread(self, moved: Tensor) -> float:
        """The weighted sum of |offset_i - moved|^2 on the root, 0 elsewhere."""
        far, block = [], BLOCK[moved.device.type]
        for row in self.kept.rows("offset"):
            pieces = zip(row.split(block), moved.split(block), strict=True)
            far.append([sum(float((a.double() - b.double()).square_().sum()) for a, b in pieces)])
        weighted = self.table[0] * self._by_participant(far, 1)[0]
        return float(weighted.sum()) if self.world.rank == 0 else 0.0


def mean_of_middle(values: Tensor, cut: int) -> Tensor:
    """Of the rows of ``values``, without the ``cut`` smallest and largest in each column."""
    # In columns on a CPU, numpy sorts three times as fast.
    ordered = values.sort(dim=0).values if values.is_cuda else torch.from_numpy(np.sort(values.numpy(), axis=0))
    ordered = ordered[cut : len(values) - cut]
    total = ordered[0].double()
    for row in ordered[1:]:  # one by one: the order in which torch adds up depends on the shape
        total += row
    return (total / len(ordered)).to(values.dtype)


class Grid:
    """Floats as whole numbers of the same width.

    E is the biased exponent of a coordinate's largest |v|, so that |v| < 2^(E - bias). Weights w add up to at most 2^k.
    Then n = round(w * v / 2^g) with g = E - bias + k - bits adds up to at most 2^bits, and half a unit per participant.
    """

    def __init__(self, integer: torch.dtype, exponent: torch.dtype, mantissa: int, bias: int):
        self.integer, self.exponent, self.mantissa, self.bias = integer, exponent, mantissa, bias
        self.bits = integer.itemsize * 8 - 2
        powers = np.arange(2 * bias + 1) - bias
        # The inverse of the two largest exponents is not a normal number: such sums are not finite.
        self.up = torch.from_numpy(np.append(np.ldexp(1.0, -powers), [0.0, 0.0]))
        self.down = torch.from_numpy(np.append(np.ldexp(1.0, powers), [np.inf, np.inf]))

    def exponents(self, rows: Tensor) -> Tensor:
        """Of the largest element of every column; 0 without rows."""
        found = torch.zeros(rows.shape[1], dtype=self.exponent, device=rows.device)
        if len(rows):
            for part in _blocks(rows):
                largest = rows[:, part].abs().amax(0)
                found[part] = (largest.view(self.integer) >> self.mantissa).to(self.exponent)
        return found

    def whole(self, rows: Tensor, weights: np.ndarray, exponents: Tensor, k: int, result: Tensor) -> None:
        """The sum of the weighted rows, into the integers ``result``."""
        factors = torch.from_numpy(np.ldexp(weights, self.bits - k)).to(rows.device, rows.dtype).unsqueeze(1)
        powers = self.up.to(rows.device, rows.dtype)
        result.zero_()
        if len(rows):
            for part in _blocks(rows):
                scaled = rows[:, part] * powers.index_select(0, exponents[part].int())
                torch.sum(scaled.mul_(factors).round_().to(self.integer), 0, dtype=self.integer, out=result[part])

    def real(self, whole: Tensor, exponents: Tensor, k: int, result: Tensor) -> None:
        """The integers ``whole`` as what they stand for, into ``result``."""
        powers = self.down.to(whole.device)
        for part in _blocks(whole.unsqueeze(0)):
            values = whole[part].double().mul_(math.ldexp(1.0, k - self.bits))
            result[part] = values.mul_(powers.index_select(0, exponents[part].int()))


GRIDS = {
    torch.float32: Grid(torch.int32, torch.uint8, mantissa=23, bias=126),
    torch.float64: Grid(torch.int64, torch.int16, mantissa=52, bias=1022),
}


def _blocks(rows: Tensor) -> Iterator[slice]:
    """Columns of ``rows`` to work on at a time."""
    step = max(1, BLOCK[rows.device.type] // len(rows))
    return (slice(first, first + step) for first in range(0, rows.shape[1], step))
