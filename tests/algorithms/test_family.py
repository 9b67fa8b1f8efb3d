"""What must hold for the further methods: where two of them coincide, and their closed forms.

Every identity is shown twice: on the reference, with quadratic losses, and on runs of the package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from family_reference import METHODS, federate
from reference import Settings
from training_runs import Run, disagreement, make_data, run_here

SIZES = [3, 8, 5, 2]
ROUNDS, STEPS = 4, 3
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
        ("fedpd", dict(eta=0.8, skip=0.0, start="cold")), ("feddyn", dict(alpha=1 / 0.8)), DUAL, ALL, steps=0
    ),
    "fedpd, cold, is feddr": Pair(
        ("fedpd", dict(eta=0.8, skip=0.0, start="cold")),
        ("feddr", dict(eta=0.8, alpha=1.0, start="cold")), DUAL, ALL, steps=0,
    ),
    "fedpd, warm, is feddr": Pair(
        ("fedpd", dict(eta=0.8, skip=0.0, start="warm")),
        ("feddr", dict(eta=0.8, alpha=1.0, start="warm")), DUAL, ALL, steps=0,
    ),
    # The package takes alpha < 2.
    "fedsplit, warm, is feddr": Pair(
        ("fedsplit", dict(eta=0.8, start="warm")),
        ("feddr", dict(eta=0.8, alpha=2 - 1e-12, start="warm")), DUAL, ALL, steps=0,
    ),
    "fedsplit, cold, is feddr": Pair(
        ("fedsplit", dict(eta=0.8, start="cold")),
        ("feddr", dict(eta=0.8, alpha=2 - 1e-12, start="cold")), DUAL, ALL, steps=0,
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
PARTICIPANTS = {SOME: [[0, 1, 3], [1, 2, 3], [0, 1, 2], [0, 2, 3]], ALL: [[0, 1, 2, 3]] * ROUNDS}


def on_quadratics(method, settings, participation=ALL, steps=STEPS, rounds=ROUNDS, **more):
    each = [steps] * 4 if steps else UNEQUAL_STEPS
    chosen = PARTICIPANTS[participation][:rounds]
    return federate(method, START, GRADIENTS, SIZES, each, chosen, Settings(**settings), **more)


def of_the_reference(pair: Pair, side: Method) -> np.ndarray:
    name, own = side
    return on_quadratics(name, {**pair.common, **own}, pair.participation, pair.steps, pair.rounds)[-1].x


@pytest.mark.parametrize("name", EQUAL)
def test_methods_coincide_in_the_reference(name):
    pair = EQUAL[name]
    left, right = (of_the_reference(pair, side) for side in (pair.left, pair.right))
    assert disagreement(left, right, START) < min(pair.within, max(1e-13, 1e-4 * pair.within)) or (
        pair.within > 1e-10 and disagreement(left, right, START) < pair.within
    )


@pytest.mark.parametrize("name", DIFFERENT)
def test_methods_differ_in_the_reference(name):
    pair = DIFFERENT[name]
    left, right = (of_the_reference(pair, side) for side in (pair.left, pair.right))
    assert disagreement(left, right, START) > 0.01
