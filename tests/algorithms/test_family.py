"""What must hold for the further methods: where two of them coincide, and their closed forms.

Every identity is shown twice: on the reference, with quadratic losses, and on runs of the package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from family_reference import METHODS, federate
from reference import Settings, image_gradient
from training_runs import disagreement, make_data, run_here

SIZES = [3, 8, 5, 2]
ROUNDS, STEPS = 3, 3
EPOCHS, BATCH = 2, 3
UNEQUAL_STEPS = [2, 6, 4, 2]  # EPOCHS * ceil(size / BATCH)
SOME, ALL = 0.75, 1.0

Method = tuple[str, dict[str, Any]]

PLAIN = dict(lr=0.2, lr_decay=0.8, server_lr=0.7, clip=0.0, weight_decay=0.0, decay_mode="l2")
DECAYED = dict(PLAIN, clip=0.6, weight_decay=0.05)
DUAL = dict(DECAYED, server_lr=1.0)


@dataclass(frozen=True)
class Pair:
    """Two methods and the runs in which they are compared."""

    left: Method
    right: Method
    common: dict[str, Any] = field(default_factory=lambda: DECAYED)
    participation: float = SOME
    steps: int = STEPS  # 0: unequal
    rounds: int = ROUNDS
    within: float = 1e-10


def adam(**more: float) -> dict[str, float]:
    return dict(beta1=0.7, beta2=0.9, eps=0.02, **more)


K = np.array(UNEQUAL_STEPS)
FEDAVG = ("fedavg", {})
QG = dict(nesterov=False, mu=0.0)
NOVA = dict(momentum=0.0, mu=0.0, server_momentum=0.0)
LOCAL = dict(
    optimizer="sgd", correction="joint", beta1=0.7, beta2=0.9, eps=0.05, v0=0.0, server_optimizer="sgd",
    server_beta1=0.7, server_beta2=0.9, server_eps=0.02,
)  # fmt: skip

EQUAL = {
    "fedavgm without momentum": Pair(("fedavgm", dict(momentum=0.0, nesterov=False)), FEDAVG, steps=0),
    "slowmo without momentum": Pair(("slowmo", dict(momentum=0.0)), FEDAVG, steps=0),
    # u is in units of the gradient, v in units of x: v = eta_t * u.
    "slowmo is fedavgm": Pair(
        ("slowmo", dict(momentum=0.5)), ("fedavgm", dict(momentum=0.5 * 0.8, nesterov=False)), steps=0
    ),
    "fedyogi begins as fedadam": Pair(("fedyogi", adam()), ("fedadam", adam()), rounds=1),
    "fedyogi with a large tau": Pair(
        ("fedyogi", dict(beta1=0.0, beta2=0.9, eps=1e8, server_lr=0.7e8)), FEDAVG, within=1e-6
    ),
    "fedadagrad with a large tau": Pair(("fedadagrad", dict(eps=1e8, server_lr=0.7e8)), FEDAVG, within=1e-6),
    "fednova with equal steps": Pair(("fednova", NOVA), FEDAVG),
    "fednova with momentum and equal steps": Pair(
        ("fednova", dict(NOVA, momentum=0.6)),
        ("local_momentum", dict(momentum=0.6, buffer="reset", nesterov=False)),
    ),
    "fednova with server momentum and equal steps": Pair(
        ("fednova", dict(NOVA, server_momentum=0.5)), ("slowmo", dict(momentum=0.5))
    ),
    "fedadc without local momentum": Pair(
        ("fedadc", dict(beta_local=0.0, beta_global=0.5, nesterov=False)), ("slowmo", dict(momentum=0.5)), steps=0
    ),
    "fedadc with one step": Pair(
        ("fedadc", dict(beta_local=0.8, beta_global=0.5, nesterov=False)), ("slowmo", dict(momentum=0.5)), steps=1
    ),
    "fedadc is quasi-global momentum": Pair(
        ("fedadc", dict(beta_local=0.6, beta_global=0.6, nesterov=False)),
        ("quasi_global_momentum", dict(QG, momentum=0.6)),
        dict(DECAYED, server_lr=1.0),
    ),
    "quasi-global momentum is fedcm": Pair(
        ("quasi_global_momentum", dict(QG, momentum=0.6)), ("fedcm", dict(alpha=0.4, lr=0.2 / 0.4)), PLAIN
    ),
    "quasi-global momentum without momentum": Pair(
        ("quasi_global_momentum", dict(momentum=0.0, mu=0.7, nesterov=True)), FEDAVG, steps=0
    ),
    "local momentum, reset, with one step": Pair(
        ("local_momentum", dict(momentum=0.6, buffer="reset", nesterov=False)), FEDAVG, steps=1
    ),
    "local momentum without momentum": Pair(
        ("local_momentum", dict(momentum=0.0, buffer="average", nesterov=True)), FEDAVG, steps=0
    ),
    "feddyn begins as fedprox": Pair(
        ("feddyn", dict(alpha=0.5)), ("fedprox", dict(mu=0.5, server_lr=1 + SOME)), DUAL, rounds=1, steps=0
    ),
    "fedpd, cold, is feddyn": Pair(
        ("fedpd", dict(eta=0.8, skip=0.0, start_at="cold")), ("feddyn", dict(alpha=1 / 0.8)), DUAL, ALL, steps=0
    ),
    "fedpd, cold, is feddr": Pair(
        ("fedpd", dict(eta=0.8, skip=0.0, start_at="cold")),
        ("feddr", dict(eta=0.8, alpha=1.0, start_at="cold")), DUAL, ALL, steps=0,
    ),
    "fedpd, warm, is feddr": Pair(
        ("fedpd", dict(eta=0.8, skip=0.0, start_at="warm")),
        ("feddr", dict(eta=0.8, alpha=1.0, start_at="warm")), DUAL, ALL, steps=0,
    ),
    "fedsplit, warm, is feddr": Pair(
        ("fedsplit", dict(eta=0.8, start_at="warm")),
        ("feddr", dict(eta=0.8, alpha=2.0, start_at="warm")), DUAL, ALL, steps=0,
    ),
    "fedsplit, cold, is feddr": Pair(
        ("fedsplit", dict(eta=0.8, start_at="cold")),
        ("feddr", dict(eta=0.8, alpha=2.0, start_at="cold")), DUAL, ALL, steps=0,
    ),
    "fedspeed without rho": Pair(
        ("fedspeed", dict(alpha=0.5, rho=0.0, q=0.7, form="code")), ("feddyn", dict(alpha=0.5)), DUAL, steps=0
    ),
    "fedspeed without q": Pair(
        ("fedspeed", dict(alpha=0.5, rho=0.3, q=0.0, form="code")), ("feddyn", dict(alpha=0.5)), DUAL, steps=0
    ),
    "both forms of fedspeed with all clients": Pair(
        ("fedspeed", dict(alpha=0.5, rho=0.3, q=0.7, form="code")),
        ("fedspeed", dict(alpha=0.5, rho=0.3, q=0.7, form="paper")), DUAL, ALL, steps=0,
    ),
    "fedsam without rho": Pair(("fedsam", dict(rho=0.0)), FEDAVG, steps=0),
    "mofedsam without rho": Pair(("mofedsam", dict(rho=0.0, alpha=0.3)), ("fedcm", dict(alpha=0.3)), steps=0),
    "mofedsam without momentum": Pair(("mofedsam", dict(rho=0.3, alpha=1.0)), ("fedsam", dict(rho=0.3)), steps=0),
    # B2 = b0^2 in the first round: one denominator for all steps and clients.
    "local adaalter begins as fedavg": Pair(
        ("local_adaalter", dict(eps=0.5, form="code", b0=0.3)),
        ("fedavg", dict(lr=0.2 / (0.3**2 + 0.5) ** 0.5)), rounds=1, steps=0,
    ),
    "local adaptivity of sgd with equal steps": Pair(("local_adaptivity", LOCAL), FEDAVG),
    "local adaptivity of sgd, joint, is fednova": Pair(
        ("local_adaptivity", LOCAL),
        ("fednova", dict(NOVA, server_lr=0.7 / K.mean() / np.mean(1 / K))), participation=ALL, steps=0,
    ),
    "local adaptivity of sgd, local, is fednova": Pair(
        ("local_adaptivity", dict(LOCAL, correction="local")),
        ("fednova", dict(NOVA, server_lr=0.7 / K.mean())), participation=ALL, steps=0,
    ),
    "local adaptivity of sgd with adam on the server": Pair(
        ("local_adaptivity", dict(LOCAL, server_optimizer="adam")), ("fedadam", adam())
    ),
    "mimelite without momentum": Pair(
        ("mimelite", dict(base="momentum", beta1=0.0, beta2=0.9, eps=0.1)), FEDAVG, steps=0
    ),
    "mimelite with one step": Pair(
        ("mimelite", dict(base="momentum", beta1=0.6, beta2=0.9, eps=0.1)), ("fedcm", dict(alpha=0.4)),
        PLAIN, ALL, steps=1,
    ),
}  # fmt: skip

DIFFERENT = {
    "fednova with unequal steps": Pair(("fednova", NOVA), FEDAVG, steps=0),
    "feddyn without alpha": Pair(("feddyn", dict(alpha=0.0)), FEDAVG, DUAL),
    "the forms of fedspeed with some clients": Pair(
        ("fedspeed", dict(alpha=0.5, rho=0.3, q=0.7, form="code")),
        ("fedspeed", dict(alpha=0.5, rho=0.3, q=0.7, form="paper")),
        DUAL,
    ),
}

# Client i has the loss |A_i (x - b_i)|^2 / 2, so its gradient is A_i' A_i (x - b_i).
_random = np.random.default_rng(3)
START = np.array([1.0, -2.0, 0.5])
HESSIANS = [a.T @ a / 3 for a in _random.normal(size=(4, 4, 3))]
CENTRES = list(_random.normal(size=(4, 3)))
GRADIENTS = [lambda x, h=h, b=b: h @ (x - b) for h, b in zip(HESSIANS, CENTRES, strict=True)]
PARTICIPANTS = {SOME: [[0, 1, 3], [1, 2, 3], [0, 1, 2]], ALL: [[0, 1, 2, 3]] * ROUNDS}


def on_quadratics(method, settings, participation=ALL, steps=STEPS, rounds=ROUNDS, **more):
    each = [steps] * 4 if steps else UNEQUAL_STEPS
    chosen = PARTICIPANTS[participation][:rounds]
    return federate(method, START, GRADIENTS, SIZES, each, chosen, Settings(**settings), **more)


def of_the_reference(pair: Pair, side: Method) -> np.ndarray:
    name, own = side
    return on_quadratics(name, {**pair.common, **own}, pair.participation, pair.steps, pair.rounds)[-1].x


@pytest.fixture(scope="session")
def data(shared_tmp):
    """Copies of one image per client: the same gradient for any mini-batch, so that K_i may differ."""
    return make_data(shared_tmp / "family", SIZES, silos=2, one_image_per_client=True)


@pytest.fixture(scope="session")
def lone_client(shared_tmp):
    return make_data(shared_tmp / "family-lone", [10])


@pytest.fixture
def run_dir(shared_tmp, request):
    return shared_tmp / "family-runs" / request.node.name


@pytest.fixture(scope="session")
def of_the_package(data, shared_tmp):
    """x at the end of a run; pairs share their runs."""
    known: dict[str, np.ndarray] = {}

    def find(pair: Pair, side: Method) -> np.ndarray:
        name, own = side
        steps = dict(local_steps=pair.steps) if pair.steps else dict(local_epochs=EPOCHS, batch_size=BATCH)
        settings = {**pair.common, **own, **steps, "participation": pair.participation, "rounds": pair.rounds}
        key = repr((name, sorted(settings.items())))
        if key not in known:
            out = shared_tmp / "family-pairs" / str(len(known))
            known[key] = run_here(data, out, algorithm=name, seed=3, **settings).x
        return known[key]

    return find


@pytest.mark.ranks(slow=True)
@pytest.mark.parametrize("name", EQUAL)
def test_methods_coincide(name, of_the_package, data):
    pair = EQUAL[name]
    for x, start in ((of_the_reference, START), (of_the_package, data.start)):
        assert disagreement(x(pair, pair.left), x(pair, pair.right), start) < pair.within


@pytest.mark.ranks(slow=True)
@pytest.mark.parametrize("name", DIFFERENT)
def test_methods_differ(name, of_the_package, data):
    pair = DIFFERENT[name]
    for x, start in ((of_the_reference, START), (of_the_package, data.start)):
        assert disagreement(x(pair, pair.left), x(pair, pair.right), start) > 0.01


# Closed forms of x after some rounds, from the gradients of the clients; one step per round and all clients.


def pooled(gradients, x):
    return np.mean([gradient(x) for gradient in gradients], axis=0)


def momentum_sgd(gradients, start, rates, nesterov=False):
    """torch.optim.SGD on the mean of the losses."""
    x = torch.tensor(start, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=1.0, momentum=0.6, nesterov=nesterov)
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        x.grad = torch.from_numpy(pooled(gradients, x.detach().numpy()))
        optimizer.step()
    return x.detach().numpy()


def quasi_hyperbolic(gradients, x, rates, nesterov=False):
    """b = 0.6, mu = 0.7; D / eta_t is the direction g + b * h, or (1 + b) * g + b * b * h."""
    h, b, mu = np.zeros_like(x), 0.6, 0.7
    for rate in rates:
        g = pooled(gradients, x)
        x = x - rate * ((1 + b) * g + b * b * h if nesterov else g + b * h)
        h = mu * h + (1 - mu) * ((1 + b) * g + b * b * h) if nesterov else (mu + (1 - mu) * b) * h + (1 - mu) * g
    return x


def adaalter(gradients, x, rates):
    B2 = np.full_like(x, 0.09)
    for rate in rates:
        g, squares = pooled(gradients, x), np.mean([gradient(x) ** 2 for gradient in gradients], axis=0)
        x, B2 = x - rate * g / np.sqrt(B2 + 0.5), B2 + squares
    return x


@pytest.mark.ranks(slow=True)
@pytest.mark.parametrize(
    ("method", "settings", "expected"),
    [
        ("local_momentum", dict(momentum=0.6, buffer="average", nesterov=False), momentum_sgd),
        ("local_momentum", dict(momentum=0.6, buffer="average", nesterov=True), partial(momentum_sgd, nesterov=True)),
        ("quasi_global_momentum", dict(momentum=0.6, mu=0.7, nesterov=False), quasi_hyperbolic),
        ("quasi_global_momentum", dict(momentum=0.6, mu=0.7, nesterov=True), partial(quasi_hyperbolic, nesterov=True)),
        ("local_adaalter", dict(eps=0.5, b0=0.3, form="code"), adaalter),
    ],
    ids=["momentum", "momentum-nesterov", "quasi-global", "quasi-global-nesterov", "adaalter"],
)
def test_one_step_of_all_clients_per_round(method, settings, expected, data, run_dir):
    settings = dict(PLAIN, **settings, server_lr=1.0)
    rates = [0.2 * 0.8**t for t in range(ROUNDS)]
    ours = on_quadratics(method, settings, steps=1)[-1].x
    assert disagreement(ours, expected(GRADIENTS, START, rates), START) < 1e-13
    run = run_here(data, run_dir, algorithm=method, rounds=ROUNDS, local_steps=1, **settings)
    assert disagreement(run.x, expected(data.gradients, data.start, rates), data.start) < 1e-10


def adagrad_of_torch(gradient, start, settings, steps):
    x = torch.tensor(start, requires_grad=True)
    optimizer = torch.optim.Adagrad([x], settings["lr"], eps=settings["eps"], initial_accumulator_value=settings["v0"])
    for _ in range(steps):
        x.grad = torch.from_numpy(gradient(x.detach().numpy()))
        optimizer.step()
    return x.detach().numpy()


def adam_of_torch(gradient, start, settings, steps):
    """torch corrects the bias, which its rate and its eps take out again."""
    b1, b2 = settings["beta1"], settings["beta2"]
    x = torch.tensor(start, requires_grad=True)
    optimizer = torch.optim.Adam([x], betas=(b1, b2))
    for k in range(1, steps + 1):
        root = np.sqrt(1 - b2**k)
        optimizer.param_groups[0].update(lr=settings["lr"] * (1 - b1**k) / root, eps=settings["eps"] / root)
        x.grad = torch.from_numpy(gradient(x.detach().numpy()))
        optimizer.step()
    return x.detach().numpy()


@pytest.mark.ranks(slow=True)
@pytest.mark.parametrize(
    ("optimizer", "v0", "expected"), [("adagrad", 0.1, adagrad_of_torch), ("adam", 0.0, adam_of_torch)]
)
def test_local_adaptivity_of_one_participant_needs_no_correction(optimizer, v0, expected, lone_client, run_dir):
    settings = dict(PLAIN, **{**LOCAL, "optimizer": optimizer, "v0": v0}, server_lr=1.0)
    ours = federate("local_adaptivity", START, GRADIENTS[:1], [2], [6], [[0]], Settings(**settings))[-1].x
    assert disagreement(ours, expected(GRADIENTS[0], START, settings, 6), START) < 1e-13
    run = run_here(lone_client, run_dir, algorithm="local_adaptivity", rounds=1, local_steps=6, **settings)
    theirs = expected(lone_client.gradients[0], lone_client.start, settings, 6)
    assert disagreement(run.x, theirs, lone_client.start) < 1e-10


@pytest.mark.ranks(slow=True)
@pytest.mark.parametrize("optimizer", ["adagrad", "yogi"])
def test_the_joint_correction_stays_between_the_clients(optimizer, data, run_dir):
    """In every coordinate; where a single client ends is the joint form with that participant alone."""
    settings = dict(PLAIN, **{**LOCAL, "optimizer": optimizer}, server_lr=1.0)
    alone = [
        federate("local_adaptivity", data.start, data.gradients, SIZES, UNEQUAL_STEPS, [[i]], Settings(**settings))
        for i in range(len(SIZES))
    ]
    ends = np.stack([history[-1].x for history in alone])
    steps = dict(local_epochs=EPOCHS, batch_size=BATCH)
    x = run_here(data, run_dir, algorithm="local_adaptivity", rounds=1, **steps, **settings).x
    rounding = 1e-12 * np.abs(ends).max()
    assert np.all(x >= ends.min(0) - rounding)
    assert np.all(x <= ends.max(0) + rounding)
    assert disagreement(x, ends.mean(0), data.start) > 0.01


# What the server and the clients remember.


@pytest.mark.ranks
@pytest.mark.parametrize("method", ["feddyn", "fedspeed"])
def test_h_is_the_mean_of_all_e_i(method, data, run_dir):
    settings = dict(DUAL, alpha=0.5, **(dict(rho=0.3, q=0.7, form="code") if method == "fedspeed" else {}))
    for record in on_quadratics(method, settings, SOME, steps=0):
        np.testing.assert_allclose(record.vectors["h"], np.mean([c["e"] for c in record.kept], 0), rtol=1e-13)
    run = run_here(
        data, run_dir, algorithm=method, rounds=3, participation=0.5, local_epochs=EPOCHS, batch_size=BATCH, **settings
    )
    assert len(run.clients) >= 2
    mean = sum(c["e_i"] for c in run.clients.values()) / len(SIZES)
    np.testing.assert_allclose(run.server["h"], mean, rtol=0, atol=1e-12 * np.abs(mean).max())


@pytest.mark.ranks
def test_x_of_feddr_is_the_mean_of_all_reflections(data, run_dir):
    settings = dict(DUAL, eta=0.7, alpha=0.8, start_at="warm")
    for record in on_quadratics("feddr", settings, SOME, steps=0):
        np.testing.assert_allclose(record.x, np.mean([c["xh"] for c in record.kept], 0), rtol=1e-13)
    run = run_here(data, run_dir, algorithm="feddr", rounds=2, participation=0.5, local_steps=2, **settings)
    newcomers = [data.start] * (len(SIZES) - len(run.clients))
    assert newcomers
    mean = sum([2 * c["x_i"] - c["y_i"] for c in run.clients.values()] + newcomers) / len(SIZES)
    np.testing.assert_allclose(run.x, mean, rtol=0, atol=1e-12)


@pytest.mark.ranks(slow=True)
@pytest.mark.parametrize(
    ("method", "name", "first", "settings"),
    [
        ("local_adaalter", "B2", 0.09, dict(eps=0.5, b0=0.3, form="paper")),
        ("fedlamb", "v_hat", 1e-4, dict(lr=0.05, eps=1e-3, v0=1e-4, beta2=0.9, v_start="server", m_start="zero")),
        ("fedlamb", "v_hat", 1e-4, dict(lr=0.05, eps=1e-3, v0=1e-4, beta2=0.9, v_start="client", m_start="client")),
    ],
    ids=["local_adaalter", "fedlamb", "fedlamb-client"],
)
def test_denominators_never_fall(method, name, first, settings, data, run_dir):
    settings = {**DECAYED, **settings}
    of_reference = [r.vectors[name] for r in on_quadratics(method, settings, SOME, steps=0)]
    runs = [
        run_here(data, run_dir / str(t), algorithm=method, rounds=t, participation=SOME, local_steps=2, **settings)
        for t in (1, 3)
    ]
    for vectors in (of_reference, [run.server[name] for run in runs]):
        for before, after in pairwise([np.full_like(vectors[0], first), *vectors]):
            assert np.all(after >= before)
            assert np.any(after > before)


def make(name: str, tensors=((slice(None),),), **settings):
    from fedlada_mpi.algorithms import create, resolve

    return create(resolve(dict(algorithm=name, **settings)).config, tensors)


def vectors(*rows: float | list, dtype=torch.float64) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype)


class ServerSteps:
    """The server's steps of a method in the package, from given mean offsets."""

    def __init__(self, name: str, size: int, **settings):
        from fedlada_mpi.algorithms import Round, Vectors

        self.method = make(name, **settings)
        names = ("x", *self.method.private, *self.method.derived)
        self.s = Vectors(**{name: torch.zeros(size, dtype=torch.float64) for name in names})
        self.round = Round(t=0, lr=0.1, steps=2.0, participants=2, clients=2)

    def step(self, offset: np.ndarray) -> np.ndarray:
        """How far x moved."""
        before = self.s.x.clone()
        self.method.server(self.s, {"offset": torch.tensor(offset)}, self.round)
        return (before - self.s.x).numpy()


def test_fedavgm_adds_up_constant_offsets():
    """v = D * (1 - b^t) / (1 - b)."""
    offset, server = np.array([1.0, -3.0]), ServerSteps("fedavgm", 2, momentum=0.75, server_lr=0.5)
    for t in range(1, 40):
        moved = server.step(offset)
        np.testing.assert_allclose(moved, 0.5 * offset * (1 - 0.75**t) / 0.25, rtol=1e-12)
    np.testing.assert_allclose(server.s.v, 4 * offset, rtol=1e-4)


def test_fedadagrad_on_constant_offsets():
    """Step t is eta_g * D / (sqrt(t) * |D| + tau)."""
    offset, server = np.array([2.0, -0.01]), ServerSteps("fedadagrad", 2, eps=0.05, server_lr=0.3)
    for t in range(1, 10):
        expected = 0.3 * offset / (t**0.5 * np.abs(offset) + 0.05)
        np.testing.assert_allclose(server.step(offset), expected, rtol=1e-12)


@pytest.mark.parametrize(("method", "falls"), [("fedadagrad", False), ("fedyogi", True)])
def test_v_of_the_server(method, falls):
    """It is never negative; Adagrad's never falls either, Yogi's does after a large offset."""
    random, server, before = np.random.default_rng(4), ServerSteps(method, 50), np.zeros(50)
    fell = False
    for t in range(30):
        server.step(random.normal(size=50) * (10.0 if t % 5 == 0 else 0.1))
        v = server.s.v.numpy().copy()
        assert np.all(v >= 0)
        fell, before = fell or bool(np.any(v < before)), v
    assert fell == falls


# Single local steps.


@pytest.mark.ranks(slow=True)
def test_a_step_of_fedlamb_has_the_length_of_the_tensor(lone_client, run_dir):
    settings = dict(
        lr=0.05, lr_decay=0.8, server_lr=1.0, weight_decay=0.5, decay_mode="decoupled", clip=0.6, beta1=0.7, beta2=0.9,
        eps=1e-3, v0=1e-4,
    )  # fmt: skip
    run = run_here(lone_client, run_dir, algorithm="fedlamb", rounds=1, local_steps=1, **settings)
    ends = np.cumsum(lone_client.tensors)[:-1]
    assert len(ends) > 3
    for moved, x in zip(np.split(run.x - lone_client.start, ends), np.split(lone_client.start, ends), strict=True):
        assert np.linalg.norm(moved) == pytest.approx(0.05 * np.linalg.norm(x), rel=1e-10)


def test_fedlamb_moves_tensors_of_zero_norm_as_if_the_ratio_were_one():
    """x = (0, 0 | 3, 4 | 1), w = (3, -4 | 6, 8 | 0): steps are eta * (w | 5/10 * w | 0).

    Of the reference and of the package, in which the second tensor is in two pieces.
    """
    from family_reference import trust_ratio

    from fedlada_mpi.algorithms import ClientVectors, Vectors

    x, w = vectors([0.0, 0.0, 3.0, 4.0, 1.0]), vectors([3.0, -4.0, 6.0, 8.0, 0.0])
    expected = [3.0, -4.0, 3.0, 4.0, 0.0]
    pieces = [slice(0, 2), slice(2, 4), slice(4, 5)]
    ours = [trust_ratio(x[0, p].numpy(), w[0, p].numpy()) * w[0, p].numpy() for p in pieces]
    np.testing.assert_array_equal(np.concatenate(ours), expected)
    tensors = [[slice(0, 2)], [slice(2, 3), slice(3, 4)], [slice(4, 5)]]
    found = make("fedlamb", tensors).after_decay(ClientVectors(x=x), Vectors(), w.clone())
    np.testing.assert_array_equal(found[0], expected)


@pytest.mark.parametrize("method", ["fedsam", "mofedsam", "fedspeed"])
def test_no_slope_is_no_reason_to_leave(method):
    """Without a gradient the second one is taken at x itself."""
    from fedlada_mpi.algorithms import ClientVectors, Vectors

    x = vectors([1.0, -2.0], [0.5, 4.0])
    c = ClientVectors(x=x, g1=torch.zeros_like(x))
    np.testing.assert_array_equal(make(method, rho=0.3).point(c, Vectors(x=x[0]), torch.tensor(0.1)), x)


@pytest.mark.ranks(slow=True)
def test_fedsam_takes_both_gradients_on_the_same_batch(lone_client, run_dir):
    """In batches of one image, a step uses one of the client's images twice."""
    data, settings = lone_client, dict(PLAIN, server_lr=1.0, rho=0.3)
    each = [
        image_gradient(data.module, data.images[0][[i]], data.labels[0][[i]], data.mean, data.std)
        for i in range(data.sizes[0])
    ]

    def step(first, second):
        g1 = first(data.start)
        return data.start - 0.2 * second(data.start + 0.3 * g1 / (np.linalg.norm(g1) + 1e-7))

    chosen = set()
    for seed in range(3):
        out = run_dir / str(seed)
        x = run_here(data, out, algorithm="fedsam", rounds=1, local_steps=1, batch_size=1, seed=seed, **settings).x
        errors = [disagreement(x, step(gradient, gradient), data.start) for gradient in each]
        assert min(errors) < 1e-10
        chosen.add(int(np.argmin(errors)))
    assert len(chosen) > 1
    assert disagreement(step(each[0], each[1]), step(each[1], each[1]), data.start) > 1e-3


@pytest.mark.ranks
@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_c_i_of_mimelite_is_the_gradient_on_all_images(weighting, shared_tmp, run_dir):
    """Raw, on images that are not augmented, at x^t; in batches of 3 that the sizes do not divide into."""
    data = make_data(shared_tmp / f"mimelite-{weighting}", [7, 4, 9, 1])
    run = run_here(
        data, run_dir, algorithm="mimelite", rounds=1, local_steps=2, batch_size=3, augment="paper", crop_padding=1,
        beta1=0.6, clip=0.01, weight_decay=0.5, decay_mode="l2", weighting=weighting,
    )  # fmt: skip
    weights = data.sizes if weighting == "size" else None
    c = np.average([gradient(data.start) for gradient in data.gradients], axis=0, weights=weights) + 0.5 * data.start
    np.testing.assert_allclose(run.server["m"], 0.4 * c, rtol=1e-9, atol=1e-12)


# FedNova's a_i.


def test_normalisers_of_fednova_in_closed_form():
    lr, K = 0.1, 6
    for momentum, mu, expected in (
        (0.6, 0.0, (K - 0.6 * (1 - 0.6**K) / 0.4) / 0.4),
        (0.0, 0.5, (1 - (1 - lr * 0.5) ** K) / (lr * 0.5)),
        (0.0, 0.0, K),
    ):
        rule = METHODS["fednova"](Settings(momentum=momentum, mu=mu), START, 1, [3])
        assert rule.client(0, START, GRADIENTS[0], K, lr)[1]["a"] == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    "settings", [dict(momentum=0.6), dict(momentum=0.999), dict(mu=0.5), dict(mu=1e-5), {}], ids=str
)
def test_normalisers_of_fednova_in_single_precision(settings):
    """The step of a client alone is tau * offset / a; with mu -> 0 it must not lose digits."""
    from fedlada_mpi.algorithms import ClientVectors, Round, Vectors

    method, lr, steps = make("fednova", **settings), 0.1, [2, 5, 50]
    x = torch.zeros(3, 4, dtype=torch.float32)
    c = ClientVectors(x=x - 1, u=x.clone(), steps=vectors(*steps, dtype=torch.float32).unsqueeze(1))
    sent = method.finish(c, Vectors(x=x[0]), Round(t=0, lr=lr, steps=3.0, participants=3, clients=3))
    for K, scaled in zip(steps, sent["scaled"], strict=True):
        rule = METHODS["fednova"](Settings(lr=lr, **settings), START, 1, [3])
        a = rule.client(0, START, GRADIENTS[0], K, lr)[1]["a"]
        np.testing.assert_allclose(scaled, 1 / a, rtol=1e-6)
