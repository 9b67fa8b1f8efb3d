"""Exact sums and robust means against exact fractions, numpy and the reference, on the ranks that the test has."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranks import SIZE, is_root
from reference import Settings, federate
from training_runs import arguments, disagreement, make_data, run_here

from fedlada_mpi import algorithms
from fedlada_mpi.algorithms import resolve
from fedlada_mpi.algorithms.fedavg import FedAvg
from fedlada_mpi.mpi import World, slices
from fedlada_mpi.mpi.plan import plan_transport
from fedlada_mpi.rounds import aggregate
from fedlada_mpi.rounds.aggregate import Part, Sent, wire_type
from fedlada_mpi.rounds.aggregate.grid import GRIDS
from fedlada_mpi.rounds.aggregate.robust import mean_of_middle
from fedlada_mpi.run import main

CPU = torch.device("cpu")
COMMON = settings(derandomize=True, deadline=None, max_examples=60, database=None)
F32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
SMALL = 2.0**-149


@st.composite
def columns(draw, elements=F32):
    """A coordinate of some participants, their weights, and where they are divided among ranks."""
    values = draw(st.lists(elements, min_size=1, max_size=30))
    weights = draw(st.lists(st.integers(1, 10**6), min_size=len(values), max_size=len(values)))
    cuts = draw(st.lists(st.integers(0, len(values)), max_size=4))
    return values, weights, sorted(cuts)


def on_grid(dtype, values, weights, cuts):
    """The sum and the grid's spacing, as ranks get it that have the values between ``cuts``."""
    grid = GRIDS[dtype]
    rows = torch.tensor(values, dtype=dtype)[:, None]
    k = max(0, int(np.ceil(np.log2(sum(weights)))))
    bounds = [0, *cuts, len(values)]
    parts = [(rows[a:b], np.array(weights[a:b], float)) for a, b in pairwise(bounds)]
    exponents = torch.stack([grid.exponents(part) for part, _ in parts]).amax(0)
    total = torch.zeros(1, dtype=grid.integer)
    for part, mine in parts:
        one = torch.empty_like(total)
        grid.whole(part, mine, exponents, k, one)
        total += one
    result = torch.empty(1, dtype=dtype)
    grid.real(total, exponents, k, result)
    return result, Fraction(2) ** (int(exponents) - grid.bias + k - grid.bits)


@pytest.mark.parametrize("dtype", GRIDS)
@COMMON
@given(columns())
@example(([1.0, SMALL, -1.0], [1, 1, 1], [1]))
@example(([SMALL] * 30, [10**6] * 30, []))
@example(([2.0**126 * (1 - 2.0**-24)] * 30, [1] * 30, [0, 15, 30]))
@example(([0.0, -0.0], [1, 1], [1]))
def test_sums_on_the_grid(dtype, column):
    """The same bits however they are divided; a contribution is off by half a unit of the grid, and its product with a
    weight, like the result, by a rounding of the type."""
    values, weights, cuts = column
    result, unit = on_grid(dtype, values, weights, cuts)
    order = np.random.default_rng(0).permutation(len(values))
    shuffled, _ = on_grid(dtype, *(np.array(each)[order].tolist() for each in (values, weights)), [])
    if max(map(abs, values)) >= 2.0**126 and dtype == torch.float32:
        assert not result.isfinite().any()
        assert not shuffled.isfinite().any()
        return
    assert torch.equal(result, shuffled)
    exact = sum(Fraction(v) * w for v, w in zip(values, weights, strict=True))
    rounding = Fraction(torch.finfo(dtype).eps)
    products = sum(abs(Fraction(v) * w) for v, w in zip(values, weights, strict=True)) * rounding
    if not np.isfinite(float(result)):
        assert abs(exact) > Fraction(torch.finfo(dtype).max) * (1 - rounding)
        return
    allowed = len(values) * unit / 2 + products + abs(exact) * rounding + Fraction(torch.finfo(dtype).tiny) * rounding
    assert abs(Fraction(float(result)) - exact) <= allowed


def test_small_coordinates_are_as_accurate_as_large_ones():
    """Of vectors such as v_hat, whose elements span many powers of two."""
    rows = torch.tensor([[1e-16, 1.0, 1e-30, 3e4]] * 10) * torch.arange(1, 11)[:, None]
    grid, k = GRIDS[torch.float32], 4
    whole, result = torch.empty(4, dtype=torch.int32), torch.empty(4)
    grid.whole(rows, np.ones(10), grid.exponents(rows), k, whole)
    grid.real(whole, grid.exponents(rows), k, result)
    np.testing.assert_allclose(result.double(), rows.double().sum(0), rtol=2.0**-24)


@COMMON
@given(st.integers(1, 40), st.integers(0, 3), st.data())
def test_middle_against_numpy(count, width, data):
    cut = data.draw(st.integers(0, (count - 1) // 2))
    values = np.array(data.draw(st.lists(F32, min_size=count * width, max_size=count * width)), np.float32)
    values = values.reshape(count, width)
    ordered = np.sort(values.astype(float), axis=0)[cut : count - cut]
    with np.errstate(over="ignore"):
        expected = (ordered.cumsum(0)[-1] / len(ordered)).astype(np.float32)
    assert mean_of_middle(torch.from_numpy(values), cut).tolist() == expected.tolist()


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("piece", [1, 64, 1 << 22])
def test_slices(piece, dtype, monkeypatch):
    """Ranks with 0, 1, 2, ... rows (alone: 3), in many pieces and in one; and the bytes of it."""
    monkeypatch.setattr(slices, "VALUES", piece)
    size, counts = 37, list(range(SIZE)) if SIZE > 1 else [3]
    table = np.random.default_rng(1).normal(size=(sum(counts), size)).astype(str(dtype).removeprefix("torch."))
    with World() as world:
        first = sum(counts[: world.rank])
        mine = torch.from_numpy(table[first : first + counts[world.rank]])
        result = torch.full((size,), torch.nan, dtype=dtype)
        slices.over_participants(world, mine, counts, lambda values: values.amin(0), result)
        if world.rank == 0:
            assert result.tolist() == table.min(0).tolist()
        if SIZE == 1:
            assert world.bytes_moved == 0
        elif piece == 1 << 22:
            own = np.diff(np.arange(SIZE + 1) * size // SIZE)
            moved = sum(n * (size - k) for n, k in zip(counts, own, strict=True)) + size - own[0]
            assert world.bytes_moved == moved * dtype.itemsize


def reference_mean(robust: str, rows: np.ndarray, weights: np.ndarray, trim: float) -> np.ndarray:
    if robust == "median":
        return np.median(rows, axis=0)
    if robust == "trimmed":
        cut = int(trim * len(rows))
        return np.sort(rows, axis=0)[cut : len(rows) - cut].mean(axis=0)
    if robust == "clip":
        norms = np.sqrt((rows**2).sum(axis=1))
        rows = rows * np.minimum(1, np.median(norms) / norms)[:, None]
    return (weights[:, None] * rows).sum(axis=0) / weights.sum()


@pytest.mark.ranks
@pytest.mark.parametrize("robust", ["none", "clip", "median", "trimmed"])
@pytest.mark.parametrize("sums", ["fast", "exact"])
@pytest.mark.parametrize("weighting", ["uniform", "size"])
@pytest.mark.parametrize("algorithm", ["fedlada", "fednova"])
def test_means_against_numpy(algorithm, weighting, sums, robust):
    """Two vectors of every participant (or one, and a scalar), one of them with a silo that sends a thousandfold."""
    if (sums, robust) == ("fast", "none") or (weighting == "size" and robust in ("median", "trimmed")):
        return
    trim = {"trim": 0.3} if robust == "trimmed" else {}
    given = dict(algorithm=algorithm, robust=robust, sums=sums, weighting=weighting, precision="fp64", **trim)
    config = resolve(given).config
    method, size, clients = algorithms.create(config), 101, np.array([3, 5, 8, 13, 21, 34, 40])
    draw = np.random.default_rng(2)
    rows = {name: draw.normal(size=(7, size)) * np.logspace(-9, 3, size) for name in method.up}
    rows[method.up[0]][4] *= 1000
    weights = draw.integers(1, 99, 7).astype(float) if weighting == "size" else np.ones(7)
    numbers = np.stack([weights, *draw.normal(size=(2 + len(method.scalars), 7))])
    with World() as world:
        transport = plan_transport(world, size, wire_type(config, torch.float64), CPU, "auto")
        sums = aggregate.create(world, config, method, transport, torch.float64)
        mine = np.flatnonzero(np.arange(7) % SIZE == world.rank)
        vectors = {name: torch.from_numpy(rows[name]) for name in method.up}
        scalars = dict(zip(method.scalars, numbers[3:, mine], strict=True))
        part = Part(slice(None), vectors, mine, shared=False)
        for _ in range(2):  # the second round has nothing left of the first
            sums.begin(len(mine))
            sums.add(Sent(clients[mine], *numbers[:3, mine], scalars, [part]))
            before = world.bytes_moved
            sums.reduce(clients, communicates=True)
            moved = world.bytes_moved - before
        transport.close()
        # The table of numbers moves, too, but no vector of a robust mean does in one piece.
        tolerance = dict(rel=0.05) if robust in ("median", "trimmed") else dict(abs=0)
        assert moved == pytest.approx(sums.bytes_moved(7), **tolerance)
        if not is_root():
            return
        means = sums.means(weights.sum(), 7)
        for name in method.up:
            expected = reference_mean(robust, rows[name], weights, 0.3)
            tolerance = 1e-14 * np.abs(rows[name]).max(axis=0)
            assert (np.abs(means[name].numpy() - expected) <= tolerance).all()
        for name, values in zip(method.scalars, numbers[3:], strict=True):
            expected = reference_mean(robust, values[:, None], weights, 0.3)
            assert float(means[name]) == pytest.approx(expected.item(), rel=1e-12)
        assert sums.loss == pytest.approx(numbers[1].sum(), rel=1e-12)


SIZES = [3, 4, 5, 6, 7]
SGD = dict(lr=0.2, lr_decay=1.0, weight_decay=0.05, clip=0.6)


@pytest.fixture(scope="session")
def data(shared_tmp):
    return make_data(shared_tmp / "sums", SIZES, silos=3)


@pytest.fixture
def bad(monkeypatch):
    """FedAvg and LocalAdam in which client 2 sends what the test says, on whatever rank it is."""

    def install(spoil):
        for base in (FedAvg, algorithms.find("localadam")):

            class Bad(base):
                name = f"bad_{base.name}"

                def begin(self, c, s, r):
                    super().begin(c, s, r)
                    self.steps = c.steps.squeeze(1)

                def finish(self, c, s, r):
                    sent = super().finish(c, s, r)
                    sent["offset"][self.steps == SIZES[2]] = spoil
                    return sent

            monkeypatch.setitem(algorithms._built_in(), f"bad_{base.name}", Bad)

    return install


ONE_STEP_PER_IMAGE = dict(batch_size=1, local_epochs=1)  # so that the number of steps shows who it is


@pytest.mark.ranks(slow=True)
@pytest.mark.parametrize("robust", ["median", "trimmed", "clip"])
@pytest.mark.parametrize("sums", ["fast", "exact"])
@pytest.mark.parametrize("algorithm", ["fedavg", "localadam"])
def test_runs_against_the_reference(algorithm, sums, robust, data, out):
    """Every client alone in the reference, then numpy's mean, in three rounds; and the distances from that."""
    steps, more = 3, {"trim": 0.3} if robust == "trimmed" else {}
    run = run_here(data, out, algorithm=algorithm, sums=sums, robust=robust, rounds=3, local_steps=steps, **SGD, **more)
    settings = Settings(**SGD, decay_mode="decoupled" if algorithm == "localadam" else "l2")
    x, start = data.start, {}
    for record in run.metrics:
        alone = [
            federate(algorithm, x, data.gradients, SIZES, [steps] * 5, [[i]], settings, start or None)[-1]
            for i in range(5)
        ]
        offsets = np.stack([x - each.x for each in alone])
        new = x - reference_mean(robust, offsets, np.ones(5), 0.3)
        consistency = np.mean([np.sum((each.x - new) ** 2) for each in alone])
        assert record["consistency"] == pytest.approx(consistency, rel=1e-9)
        x = new
        if algorithm == "localadam":
            hats = np.stack([each.vectors["v"] for each in alone])
            start = {"v": reference_mean(robust, hats, np.ones(5), 0.3)}
    assert disagreement(run.x, x, data.start) < 1e-9


@pytest.mark.ranks
@pytest.mark.parametrize("robust", ["median", "trimmed", "clip"])
def test_a_silo_that_sends_nonsense(robust, data, out, bad):
    """1e6 in every coordinate throws the plain mean off, and none of the others."""
    bad(1e6)
    more = {"trim": 0.2} if robust == "trimmed" else {}
    common = dict(algorithm="bad_fedavg", rounds=2, **ONE_STEP_PER_IMAGE, **SGD)
    robustly = run_here(data, out, robust=robust, **common, **more)
    plainly = run_here(data, out.with_name(f"{out.name}-plain"), **common)
    travelled = [np.linalg.norm(run.x - data.start) for run in (robustly, plainly)]
    assert travelled[0] < 10 < 1e6 < travelled[1]


@pytest.mark.ranks
@pytest.mark.parametrize("robust", ["median", "trimmed", "clip"])
@pytest.mark.parametrize("algorithm", ["bad_fedavg", "bad_localadam"])
def test_a_silo_that_sends_nan_is_left_out_and_named(algorithm, robust, data, out, bad, capsys):
    bad(torch.nan)
    more = {"trim": 0.25} if robust == "trimmed" else {}
    run = run_here(data, out, algorithm=algorithm, robust=robust, rounds=2, **ONE_STEP_PER_IMAGE, **SGD, **more)
    assert [record["nonfinite"] for record in run.metrics] == [[2], [2]]
    assert np.isfinite(run.x).all()
    if is_root():
        assert "note: round 1: left out client 2, whose result is not finite\n" in capsys.readouterr().out


@pytest.mark.ranks
def test_a_resumed_run_keeps_the_choice(data, out, bad):
    bad(torch.nan)
    given = dict(algorithm="bad_fedavg", robust="median", **ONE_STEP_PER_IMAGE, **SGD)
    run_here(data, out, rounds=1, **given)
    assert main([*arguments(data, out, dict(given, rounds=2)), "--resume"]) == 0
    assert main([*arguments(data, out, dict(given, rounds=3, sums="exact")), "--resume"]) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(robust="median", weighting="size"), "--robust median has no weights: got --weighting size, expected"),
        (dict(robust="median", participation=0.04), "--robust median: got 2 participants in a round, expected"),
        (dict(robust="trimmed", participation=0.1), "--trim 0.1 of 5 participants leaves out none: expected"),
        (dict(trim=0.2), "--trim has no effect on --robust none, only on trimmed: leave it out"),
        (dict(robust="clip", on_nonfinite="stop"), "--robust clip leaves clients out whose result is not finite: got"),
        (dict(robust="clip", algorithm="scaffold"), "--robust: got clip, expected none for scaffold"),
        (dict(robust="clip", algorithm="fedspeed"), "--robust: got clip, expected none for fedspeed"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(Exception, match=r"^--") as caught:
        resolve(settings)
    assert str(caught.value).startswith(message)


def test_robust_means_leave_out_what_is_not_finite():
    assert resolve(dict(robust="median")).config.on_nonfinite == "skip"
    assert resolve({}).config.on_nonfinite == "stop"
    recorded = resolve(dict(robust="trimmed", trim=0.2)).config
    assert resolve({}, recorded.record(), recorded=True).config == recorded
