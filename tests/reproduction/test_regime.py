"""The experiment inside the theorem's regime: its steps, its rates, its fits and its record."""

from itertools import pairwise

import numpy as np
import pytest
from reference import Settings, federate
from repository import ROOT

from fedlada_mpi.reproduction import regime
from fedlada_mpi.support.inputs import read_json

CELLS = read_json(ROOT / "docs/reproduction/theory" / regime.FILE)["cells"]
ALIKE, EVERYONE, SAMPLED = regime.PROBLEMS


def test_its_steps_are_the_algorithms():
    """Four clients of two kinds without noise, against the float64 version that the methods are tested with."""
    s, k, rounds = 4, 3, 5
    rates = regime.Rates.of(s, k, rounds)
    settings = Settings(
        lr=rates.local, server_lr=rates.both / (k * rates.local), alpha=regime.ALPHA, beta1=regime.BETA1,
        beta2=regime.BETA2, eps_v=regime.EPS_V, v_init="server",
    )  # fmt: skip
    gradients = [lambda x, b=b: regime.slope(x - b) for b in (1.0, -1.0, 1.0, -1.0)]
    start = np.full(regime.D, regime.START)
    history = federate("fedlada", start, gradients, [1] * s, [k] * s, [range(s)] * rounds, settings)
    everything, _, x = regime.simulate([(ALIKE, 2), (EVERYONE, s)], k, rounds, repetitions=2, sigma=0.0)
    np.testing.assert_allclose(x[1], [history[-1].x] * 2, rtol=1e-12)
    points = [start, start, *(one.x for one in history[:-1])]
    z = [(new - (1 - regime.ALPHA) * old) / regime.ALPHA for old, new in pairwise(points)]
    squared = [np.sum(((regime.slope(p - 1) + regime.slope(p + 1)) / 2) ** 2) for p in z]
    np.testing.assert_allclose(everything[1], np.mean(squared), rtol=1e-12)


def test_every_cell_is_within_the_theorem():
    assert len(CELLS) == 3 * (9 + 4)
    for cell in CELLS:
        (problem,) = (p for p in regime.PROBLEMS if p.name == cell["problem"])
        s, k, rounds = cell["s"], cell["k"], cell["t"]
        clients = s if problem.everyone else regime.CLIENTS
        assert regime.Rates.of(s, k, rounds).allowed(s, k, clients), cell
        assert k**3 * s <= rounds
        assert k > regime.BETA1 / (1 - regime.BETA1)  # C > 0
    assert not regime.Rates.of(2, 8, 512).allowed(2, 8, regime.CLIENTS)


def test_the_record_is_what_the_code_measures():
    found, late, _ = regime.simulate([(problem, 4) for problem in regime.PROBLEMS], 4, 2048)
    for i, problem in enumerate(regime.PROBLEMS):
        (cell,) = (c for c in CELLS if c["problem"] == problem.name and c["t"] == 2048)
        np.testing.assert_allclose(found[i], cell["all"], rtol=1e-6)
        np.testing.assert_allclose(late[i], cell["late"], rtol=1e-6)


def test_exponents_of_known_powers():
    """|grad F|^2 = S^-0.5 K^0.25 (1 +- a hundredth that is the same in all cells): the powers, with no spread."""
    noise = np.linspace(0.99, 1.01, 10)
    cells = [{"s": s, "k": k, "all": s**-0.5 * k**0.25 * noise} for s in (2, 4, 8) for k in (2, 4)]
    (s, s_half), (k, k_half) = regime.exponents(cells, ("s", "k"), "all")
    assert (s, k) == pytest.approx((-0.5, 0.25))
    assert max(s_half, k_half) < 1e-12
    bent = [{"t": t, "all": [1.0 / t, 1.0]} for t in (10, 100)]  # powers -1 and 0: mean -0.5, sd 0.707
    assert regime.exponents(bent, ("t",), "all") == [pytest.approx((-0.5, regime.T_VALUE * 0.5))]
