"""What one client changes in a sum: never more than the clip, whatever it trains on and whatever it sends."""

from __future__ import annotations

import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import slow
from training_runs import make_data

from fedlada_mpi import algorithms
from fedlada_mpi.algorithms import Round, Vectors
from fedlada_mpi.data.owners import Ownership
from fedlada_mpi.mpi import World
from fedlada_mpi.mpi.plan import plan_transport
from fedlada_mpi.privacy import clipping
from fedlada_mpi.privacy.mechanism import Mechanism
from fedlada_mpi.rounds import aggregate
from fedlada_mpi.rounds.aggregate import Part, Sent
from fedlada_mpi.rounds.server import Server
from fedlada_mpi.session.assemble import Session
from fedlada_mpi.session.plan import Request

SIZES = [3, 9, 5, 1]
REFUSED = ("fedpd", "fedsplit", "feddr")
VARIANTS = {"local_adaptivity": dict(correction="local")}
# Every allowed method, and forms of it that send something else.
METHODS = [(name, VARIANTS.get(name, {})) for name in algorithms.names() if name not in REFUSED]
METHODS += [("fedspeed", dict(form="paper")), ("fednova", dict(momentum=0.9)), ("fedlamb", dict(v_start="client"))]
OFTEN = ("fedavg", "scaffold", "fedlada", "mimelite", "local_momentum")
CASES = [case if case[0] in OFTEN else slow(*case) for case in METHODS]
CLOSE = 1 + 1e-6
DP = dict(dp="client", noise_multiplier=1.0, delta=0.01, clip_norm=1.0)


@pytest.fixture(scope="session")
def data(shared_tmp):
    return make_data(shared_tmp / "sensitivity", SIZES)


@contextmanager
def session(data, out, algorithm, left=4, **more):
    """With so many clients left, after a loss of the others."""
    given = dict(algorithm=algorithm, dataset=str(data.shards), clients=len(SIZES), partition="natural", out=str(out))
    given |= dict(model="cnn", local_steps=2, batch_size=4, device="cpu", participation=0.5, **DP)
    resolved, directory = Request({**given, **more}).resolve()
    with World() as world:
        owners = Ownership([np.arange(left)], [False])
        yield Session(world, resolved.config, directory, 0, lambda manifest: owners, report=lambda text: None)


def sums(silo, r: Round, participants: list[int]) -> dict[str, np.ndarray]:
    """What arrives on the root, without noise, in the units in which it is clipped."""
    a = silo.aggregation
    silo.trainer.client_state.vectors = {name: {} for name in silo.algorithm.client_state}
    a.prepare(r, np.empty(0, np.int64))
    silo.trainer.round(silo.s, r, np.array(participants), a)
    found = {name: vector.double().numpy().copy() for name, vector in a.vectors.items()}
    found |= {name: np.array([value]) for name, value in a.scalars.items()}
    return {name: value * a.scales.get(name, 1.0) for name, value in found.items()}


def distance(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    return math.sqrt(sum(float(np.square(one[name] - other[name]).sum()) for name in one))


@pytest.mark.parametrize(("method", "more"), CASES)
def test_neighbouring_data_sets(method, more, data, out):
    reached = []

    @settings(derandomize=True, deadline=None, max_examples=8, database=None)
    @given(
        lr=st.sampled_from([1e-3, 0.1, 10.0, 1e6, 1e20, 1e38]),
        clip=st.floats(1e-3, 1e3),
        removed=st.integers(0, len(SIZES) - 1),
        scale=st.sampled_from([1e-3, 1.0, 1e4]),
    )
    def check(lr, clip, removed, scale):
        draws = torch.Generator().manual_seed(1)
        for name, vector in vars(silo.s).items():
            vector.copy_(torch.rand(len(vector), generator=draws) * scale * (0.1 if name == "x" else 1.0))
            if name == "x":
                vector.mul_(one.network.layout.real)
        silo.aggregation.clip = clip
        r = Round(t=0, lr=lr, steps=2.0, participants=2.0, clients=len(SIZES))
        everybody = list(range(len(SIZES)))
        changed = distance(sums(silo, r, everybody), sums(silo, r, [c for c in everybody if c != removed]))
        assert changed <= clip * CLOSE
        reached.append(changed / clip)

    with session(data, out, method, **more) as one:
        silo = one.silo
        check()
    assert max(reached) > 0.99  # the bound is a clip, not a coincidence


@contextmanager
def collector(name: str, size: int):
    config = algorithms.resolve(dict(algorithm=name, clients=10, participation=0.5, **DP)).config
    method = algorithms.create(config)
    with World() as world:
        transport = plan_transport(world, size, torch.float32, torch.device("cpu"), "auto", "fp32")
        a = aggregate.create(world, config, method, transport, torch.float32)
        s = Vectors(**{name: torch.zeros(size) for name in (*method.down, *method.derived)})
        a.protect(Mechanism.of(config, 1.0), s, torch.ones(size))
        yield a


def sent(rows: dict[str, np.ndarray], tail: dict[str, np.ndarray]) -> Sent:
    """Of clients with a row each, and a common one behind it."""
    count = len(next(iter(rows.values())))
    parts = [
        Part(slice(0, 3), {name: torch.from_numpy(v) for name, v in rows.items()}, np.arange(count), False),
        Part(slice(3, 5), {name: torch.from_numpy(v)[None] for name, v in tail.items()}, np.zeros(count, int), True),
    ]
    ones = np.ones(count)
    return Sent(np.arange(count), ones, 1e30 * ones, 1e30 * ones, {}, parts)


F32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(derandomize=True, deadline=None, max_examples=100, database=None)
@given(st.lists(st.lists(F32, min_size=10, max_size=10), min_size=2, max_size=5), st.floats(1e-6, 1e6))
def test_any_numbers(values, clip):
    """The first client with the others and without them: SCAFFOLD sends two vectors."""
    table = np.array(values, np.float32)
    r = Round(t=0, lr=0.1, steps=10.0, participants=5.0, clients=10)
    with collector("scaffold", 5) as a:
        a.clip = clip
        found = []
        for clients in (table, table[1:]):
            a.begin(len(clients))
            a.prepare(r, np.empty(0, np.int64))
            rows = {"offset": clients[:, :3].copy(), "dc": clients[:, 3:6].copy()}
            a.add(sent(rows, {"offset": table[0, 6:8].copy(), "dc": table[0, 8:].copy()}))
            found.append({name: vector.double().numpy().copy() for name, vector in a.vectors.items()})
            assert a.loss == a.norms2 == 0
    largest = max(1.0, *(np.linalg.norm(vector) / clip for vector in found[0].values()))
    assert distance(*found) <= clip * (1 + largest * 1e-6)


def test_means_do_not_know_how_many_take_part():
    """By hand: (3, 4) is clipped to norm 1, (0.3, 0.4) is not; they are divided by q m = 5, however many there are."""
    with collector("fedavg", 5) as a:
        a._release = lambda: None
        a.clip = 1.0
        for rows, expected in (
            ([[3.0, 4.0, 0.0]], [0.12, 0.16]),
            ([[3.0, 4.0, 0.0], [0.3, 0.4, 0.0]], [0.18, 0.24]),
            ([[0.0, 0.0, 0.0]] * 3, [0.0, 0.0]),
        ):
            a.begin(len(rows))
            a.prepare(Round(0, 0.1, 10.0, 5.0, 10), np.empty(0, np.int64))
            a.add(sent({"offset": np.array(rows, np.float32)}, {"offset": np.zeros(2, np.float32)}))
            means = a.means(weight=123.0, participants=len(rows))["offset"]
            np.testing.assert_allclose(means[:2], expected, rtol=3e-6)


@pytest.mark.parametrize("more", [{}, dict(secure=True, secure_neighbours="0")], ids=["plain", "secure"])
def test_means_are_over_the_clients_that_are_left(more, data, out):
    """Three of four, half of whom are expected; adaptive counts have the same denominator."""
    with session(data, out, "fedavg", left=3, adaptive_clip=True, **more) as one:
        a = one.silo.aggregation
        a.vectors["offset"].fill_(3.0)
        a.within, a._release = 0.75, lambda: None
        assert torch.allclose(a.means(1.0, 1)["offset"], torch.full_like(a.vectors["offset"], 3 / 1.5))
        assert a.share_within == 0.75 / 1.5 + 0.5
        assert one.silo.budget.mechanism.expected == 1.5
        assert Server(one.silo).described(0, None).participants == 1.5


def test_second_moments_are_sent_as_changes():
    """v_hat of (2, 3) clients over v = 1, and nothing below eps_v^2: the mean of one client of five is a fifth."""
    config = algorithms.resolve(dict(algorithm="localadam", clients=10, participation=0.5, **DP)).config
    method = algorithms.create(config)
    with World() as world:
        transport = plan_transport(world, 2, torch.float32, torch.device("cpu"), "auto", "fp32")
        a = aggregate.create(world, config, method, transport, torch.float32)
        s = Vectors(x=torch.zeros(2), v=torch.tensor([1.0, 2.0]))
        a.protect(Mechanism.of(config, 1.0), s, torch.ones(2))
        a._release = lambda: None
        a.clip = 100.0
        a.begin(1)
        a.prepare(Round(0, 0.1, 10.0, 5.0, 10), np.empty(0, np.int64))
        rows = {"offset": torch.zeros(1, 2), "v_hat": torch.tensor([[6.0, -20.0]])}
        none = np.zeros(1)
        a.add(Sent(np.arange(1), none + 1, none, none, {}, [Part(slice(None), rows, np.arange(1), False)]))
        assert rows["v_hat"].tolist() == [[6.0, -20.0]]  # the client's own, which it may keep
        mean = a.means(1.0, 1)["v_hat"]
        np.testing.assert_allclose(mean, [1 + (6 - 1) / 5, config.hyper["eps_v"] ** 2], rtol=3e-6)


def test_clipping_by_hand():
    np.testing.assert_allclose(clipping.factors(np.array([0.0, 0.5, 2.0, 8.0]), 2.0), [1, 1, 1, 0.25], rtol=2e-6)
    assert clipping.within(np.array([0.0, 2.0, 2.1, 9.0, 1.0]), 2.0) == 0.5
    assert clipping.next_clip(2.0, 0.5) == 2.0
    assert clipping.next_clip(2.0, 1.0) == pytest.approx(2 * math.exp(-0.1))
    assert clipping.next_clip(2.0, 0.0) == pytest.approx(2 * math.exp(0.1))


def test_adaptive_noise_by_hand():
    """1 / z^2 is the sum over what is released: vectors, and half-counts with noise of their own."""
    mechanism = Mechanism(share=0.1, clients=10_000, noise=1.0, adaptive=True)
    assert mechanism.bit_deviation == 50
    assert mechanism.vector_noise == pytest.approx((1 - 1 / 100**2) ** -0.5)
    few = Mechanism(share=0.2, clients=50, noise=1.5, adaptive=True)
    assert few.bit_deviation == 1.5
    assert few.vector_noise**-2 + (2 * few.bit_deviation) ** -2 == pytest.approx(1.5**-2)
    assert Mechanism(0.2, 50, 1.5).vector_noise == 1.5


def test_methods_that_use_the_number_of_steps_say_so():
    """r.steps is a mean over participants, unless --local-steps gives it."""
    import inspect

    for name in algorithms.names():
        cls = algorithms.find(name)
        hooks = [inspect.getsource(getattr(cls, hook)) for hook in ("server", "derive", "dp_scalars")]
        used = any("r.steps" in hook for hook in hooks)
        assert used <= cls.dp.fixed_steps, name
