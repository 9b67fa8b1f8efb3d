"""FedLADA inside the regime of its theorem, on a problem whose constants are known.

    python -m fedlada_mpi.reproduction.regime docs/reproduction/theory/regime.json        a minute on one core

Clients are of two kinds, half each, that want every coordinate at +b or at -b:

    F_i(x) = sum_j psi(x_j - b_i),   psi(u) = sqrt(1 + u^2) - 1,   g = grad F_i(x) + sigma * (+1 or -1)

so that every assumption of the paper holds: L = 1, |g_j| <= 1 + sigma, sigma_l^2 = d sigma^2 and, as the two kinds
disagree most at x = 0, sigma_g^2 = d b^2 / (1 + b^2). Rates are the corollary's, eta_l = c sqrt(1 / (K T)) and
eta * eta_l = c sqrt(S K / T) with eta = K * eta_g, within the theorem's bounds; K is at most (T / S)^(1/3); nothing is
clipped, and v starts a round at v^t. What is measured is the theorem's: the mean of |grad F(z)|^2 over the rounds.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..analysis.groups import Group
from ..analysis.tables import Cell, Column, Table, number
from ..support.inputs import read_json

D, B, SIGMA, START = 10, 1.0, 0.5, 1.0
ALPHA, BETA1, BETA2, EPS_V = 0.5, 0.2, 0.99, 0.5
C, CLIENTS, REPETITIONS = 0.7, 64, 10
MU = 4.0  # of the theorem's second bound: a constant of its proof, which may be any above 0
T, EVERY_S, EVERY_K = 8192, (2, 4, 8), (2, 4, 8)
EVERY_T, S_AND_K = (2048, 4096, 8192, 16384, 32768), 4
T_VALUE = 2.262  # of Student's distribution with 9 degrees of freedom, for 95 %
PARTS = ("all", "late")  # the mean over all rounds, which has the way from the start in it, and over the second half
FILE = "regime.json"
Measured = Mapping[str, Any]  # a cell of the record: problem, s, k, t, and the means of every repetition


@dataclass(frozen=True)
class Problem:
    """Who the clients are: how far apart they want the model, and whether all of them take part."""

    name: str
    b: float
    everyone: bool = False


PROBLEMS = (
    Problem("alike, S of 64 take part", 0.0),
    Problem("two kinds, all S take part", B, everyone=True),
    Problem("two kinds, S of 64 take part", B),
)


@dataclass(frozen=True)
class Rates:
    """The corollary's."""

    local: float  # eta_l
    both: float  # eta * eta_l

    @classmethod
    def of(cls, s: int, k: int, rounds: int) -> Rates:
        return cls(C * math.sqrt(1 / (k * rounds)), C * math.sqrt(s * k / rounds))

    def allowed(self, s: int, k: int, clients: int) -> bool:
        """The conditions of the theorem, with L = 1 and 1 / eps_v for the largest 1 / sqrt(v_hat)."""
        sampled = BETA1 * s * (clients - 1) * (1 + MU) / (32 * (clients - s)) * EPS_V if clients > s else math.inf
        drift = EPS_V / (2 * math.sqrt(2 * ALPHA * (1 - BETA1) * k))
        return self.both <= min(0.25, sampled) and self.local <= drift


def slope(u: np.ndarray) -> np.ndarray:
    """The derivative of psi."""
    return u / np.sqrt(1 + u * u)


def simulate(
    cells: Sequence[tuple[Problem, int]], k: int, rounds: int, repetitions: int = REPETITIONS, sigma: float = SIGMA
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All cells (problem, S) at once: the mean of |grad F(z)|^2 over all rounds and over the second half, both [cell,
    repetition], and the last x, [cell, repetition, d]."""
    rng = np.random.default_rng([k, rounds])
    most = max(s for _, s in cells)
    present = np.array([[i < s for i in range(most)] for _, s in cells])[:, None, :, None]
    share = present / np.array([s for _, s in cells])[:, None, None, None]
    rates = [Rates.of(s, k, rounds) for _, s in cells]
    lr = np.array([rate.local for rate in rates])[:, None, None, None]
    server_lr = np.array([rate.both / (k * rate.local) for rate in rates])[:, None, None, None]
    b = np.array([problem.b for problem, _ in cells])[:, None, None, None]
    everyone = np.array([problem.everyone for problem, _ in cells])[:, None, None]
    shape = (len(cells), repetitions, most, D)
    x = np.full((len(cells), repetitions, 1, D), START)
    before, g_a, v_t = x, np.zeros_like(x), np.full_like(x, EPS_V**2)
    total, late = np.zeros(shape[:2]), np.zeros(shape[:2])
    for t in range(rounds):
        z = (x - (1 - ALPHA) * before) / ALPHA
        squared = np.square((slope(z - b) + slope(z + b)) / 2).sum((2, 3))
        total += squared
        late += squared if t >= rounds // 2 else 0
        drawn = rng.random((*shape[:2], CLIENTS)).argsort(-1)[:, :, :most]
        kinds = np.where(np.where(everyone, np.arange(most), drawn) % 2, -b[..., 0], b[..., 0])[..., None]
        noise = sigma * (2.0 * rng.integers(0, 2, (k, *shape), np.int8) - 1)
        y = np.broadcast_to(x, shape)
        m, v_hat = np.zeros(shape), np.broadcast_to(v_t, shape)
        v = v_hat
        for step in range(k):
            g = slope(y - kinds) + noise[step]
            m = BETA1 * m + (1 - BETA1) * g
            v = BETA2 * v + (1 - BETA2) * g * g
            v_hat = np.maximum(v, v_hat)
            y = y - lr * (ALPHA * m / np.sqrt(v_hat) + (1 - ALPHA) * g_a)
        offset = ((x - y) * share).sum(2, keepdims=True)
        v_t = (v_hat * share).sum(2, keepdims=True)
        g_a, before, x = offset / (k * lr), x, x - server_lr * offset
    return total / rounds, late / (rounds - rounds // 2), x[:, :, 0]


def measure() -> dict[str, Any]:
    """The record: every cell's means of |grad F(z)|^2, one for each repetition."""
    record: list[dict[str, Any]] = []
    for k in EVERY_K:
        record += _measured([(problem, s) for problem in PROBLEMS for s in EVERY_S], k, T)
    for rounds in EVERY_T:
        if rounds != T:
            record += _measured([(problem, S_AND_K) for problem in PROBLEMS], S_AND_K, rounds)
    return {"cells": record}


def _measured(cells: Sequence[tuple[Problem, int]], k: int, rounds: int) -> list[dict[str, Any]]:
    found = dict(zip(PARTS, simulate(cells, k, rounds)[:2], strict=True))
    return [
        {"problem": problem.name, "s": s, "k": k, "t": rounds}
        | {part: [float(f"{value:.8g}") for value in means[i]] for part, means in found.items()}
        for i, (problem, s) in enumerate(cells)
    ]


def exponents(cells: Sequence[Measured], names: Sequence[str], part: str) -> list[tuple[float, float]]:
    """The powers of the named quantities in a fit of every repetition: their means, and half of the 95 % interval."""
    design = np.array([[1.0, *(math.log(cell[name]) for name in names)] for cell in cells])
    fits = np.linalg.lstsq(design, np.log([cell[part] for cell in cells]), rcond=None)[0][1:]
    half = T_VALUE * fits.std(axis=1, ddof=1) / math.sqrt(fits.shape[1])
    return list(zip(fits.mean(axis=1).tolist(), half.tolist(), strict=True))


def records(groups: Sequence[Group]) -> list[Measured]:
    """The cells of a record in the folder of any run."""
    folders = dict.fromkeys(run.path.parent for one in groups for run in one.runs)
    return [cell for folder in folders if (folder / FILE).is_file() for cell in read_json(folder / FILE)["cells"]]


def split(cells: Sequence[Measured], problem: str) -> tuple[list[Measured], list[Measured]]:
    """The cells of a problem that differ in S and K, and those that differ in T."""
    own = [cell for cell in cells if cell["problem"] == problem]
    return [c for c in own if c["t"] == T], [c for c in own if c["s"] == c["k"] == S_AND_K]


def tables(groups: Sequence[Group]) -> list[Table]:
    """The exponents and the cells behind them; none without a record."""
    cells = records(groups)
    return [_exponents(cells), _cells(cells)] if cells else []


def _exponents(cells: Sequence[Measured]) -> Table:
    heads = [f"{name}, {part}" for part in ("all rounds", "second half") for name in ("S", "K", "T")]
    rows = [[Cell("the corollary"), *(Cell("−0.50", -0.5) for _ in heads)]]
    for problem in PROBLEMS:
        grid, lengths = split(cells, problem.name)
        found = [fit for p in PARTS for fit in (*exponents(grid, ("s", "k"), p), *exponents(lengths, ("t",), p))]
        rows.append([Cell(problem.name), *(Cell(f"{number(mean, 2)} ± {half:.2f}", mean) for mean, half in found)])
    notes = [
        f"Powers of S, K and T in the mean of |∇F(z)|², fitted to {REPETITIONS} repetitions, with 95 % intervals: S "
        f"and K from {len(EVERY_S)} × {len(EVERY_K)} cells with T = {T:,}, T from {len(EVERY_T)} lengths with S = K = "
        f"{S_AND_K}. The second half of the rounds is without the way from the start."
    ]
    columns = [Column("Clients", numeric=False), *map(Column, heads)]
    return Table("regime", "Speed-up inside the theorem's regime", columns, rows, notes=notes, section="diagnostics")


def _cells(cells: Sequence[Measured]) -> Table:
    columns = [*map(Column, ("S", "K", "T", "η_l", "η_g"))]
    columns += [Column(part, problem.name) for problem in PROBLEMS for part in ("all rounds", "second half")]
    rows = []
    for s, k, rounds in dict.fromkeys((cell["s"], cell["k"], cell["t"]) for cell in cells):
        rates = Rates.of(s, k, rounds)
        row = [Cell(f"{n:,}", float(n)) for n in (s, k, rounds)]
        row += [Cell(f"{rate:.2g}", rate) for rate in (rates.local, rates.both / (k * rates.local))]
        for problem in PROBLEMS:
            (cell,) = (c for c in cells if (c["problem"], c["s"], c["k"], c["t"]) == (problem.name, s, k, rounds))
            for part in PARTS:
                mean, std = float(np.mean(cell[part])), float(np.std(cell[part], ddof=1))
                row.append(Cell(f"{1000 * mean:.2f} ± {1000 * std:.2f}", mean, std, REPETITIONS))
        rows.append(row)
    notes = ["Means of 1,000 |∇F(z)|² and standard deviations over the repetitions."]
    return Table(
        "regime_cells", "|∇F(z)|² inside the theorem's regime", columns, rows, notes=notes, section="diagnostics"
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(measure(), indent=None, separators=(",", ":")) + "\n")
