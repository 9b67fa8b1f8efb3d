"""What the tests know about each method: one entry per method."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tiers import on_two_with_all, slow

Settings = dict[str, Any]


@dataclass(frozen=True)
class Case:
    settings: Settings
    server: tuple[str, ...]  # what the server must remember between rounds, in addition to x
    # Vectors per participant and round: down and up, as they travel, and as the paper charges them.
    traffic: tuple[int, int, int]
    variations: tuple[Settings, ...]  # changes that change the maths
    unequal: tuple[Settings, ...] = ({},)  # changes that are followed with unequal numbers of local steps
    requires: Settings = field(default_factory=dict)  # settings that all methods have, and this one cannot change


SGD = dict(lr=0.2, lr_decay=0.8, server_lr=0.7, weight_decay=0.05, clip=0.6)
FEDADAM = dict(SGD, server_lr=0.1, beta1=0.7, beta2=0.9, eps=0.02)
ADAPTIVE = dict(
    lr=0.02, lr_decay=0.8, server_lr=0.7, weight_decay=0.5, decay_mode="decoupled", clip=0.6, beta1=0.7, beta2=0.9,
    v_init="zero",
)  # fmt: skip

OF_ALL = (
    dict(clip=0.0), dict(lr_decay=1.0), dict(weight_decay=0.0), dict(weighting="size"), dict(server_lr=1.3),
    dict(weight_decay=0.5, decay_on="weights"),
)  # fmt: skip
INSIDE = dict(weight_decay=0.5, decay_mode="inside")
OF_ADAM = (dict(beta1=0.0), dict(beta2=0.5))
OF_ADAPTIVE = (
    *OF_ADAM, dict(decay_mode="l2"), dict(v_init="server"), dict(decay_mode="l2", v_init="server"), dict(eps_v=0.1),
    dict(eps=0.05), dict(bias_correction=True), dict(bias_correction=True, v_init="server"),
    dict(v_max=False, v_init="server", eps=0.05), dict(v_max=False, eps=0.05, bias_correction=True),
    dict(v_init="fresh", eps=0.05), dict(v_init="fresh", eps=0.05, bias_correction=True, correct_after_max=True),
    dict(bias_correction=True, correct_after_max=True),
)  # fmt: skip

PAPER = {
    "fedavg": Case(SGD, server=(), traffic=(1, 1, 1), variations=OF_ALL),
    "fedprox": Case(dict(SGD, mu=0.5), server=(), traffic=(1, 1, 1), variations=(*OF_ALL, dict(mu=2.0))),
    "scaffold": Case(dict(SGD, alpha=1.0), server=("c",), traffic=(2, 2, 2), variations=(*OF_ALL, dict(alpha=0.4))),
    "fedcm": Case(
        dict(SGD, alpha=0.3), server=("g_a",), traffic=(1, 1, 2), variations=(*OF_ALL, INSIDE, dict(alpha=0.9))
    ),
    "fedadam": Case(
        FEDADAM, server=("m", "v"), traffic=(1, 1, 1), variations=(*OF_ALL, *OF_ADAM, dict(eps=0.3), dict(v0=0.1))
    ),
    "fedadam_amended": Case(
        dict(FEDADAM, alpha=0.3),
        server=("m", "v", "g_a"),
        traffic=(2, 1, 2),
        variations=(*OF_ALL, *OF_ADAM, dict(eps=0.3), dict(v0=0.1), INSIDE, dict(alpha=0.9)),
    ),
    "localadam": Case(ADAPTIVE, server=("v",), traffic=(2, 2, 2), variations=(*OF_ALL, *OF_ADAPTIVE)),
    "fedlada": Case(
        dict(ADAPTIVE, alpha=0.3),
        server=("v", "g_a"),
        traffic=(2, 2, 2),
        variations=(*OF_ALL, *OF_ADAPTIVE, INSIDE, dict(alpha=0.9)),
        unequal=({}, dict(bias_correction=True)),
    ),
}

# All at once.
PLAIN = dict(clip=0.0, lr_decay=1.0, weight_decay=0.0)
FREE = dict(PLAIN, server_lr=1.3)
DECOUPLED = dict(decay_mode="decoupled")
DUAL = dict(SGD, server_lr=1.0)
UNIFORM = dict(weighting="uniform", server_lr=1.0)
EVERYONE = dict(UNIFORM, participation=1.0)

FAMILY = {
    "fedavgm": Case(
        dict(SGD, momentum=0.6, nesterov=False),
        server=("v",),
        traffic=(1, 1, 1),
        variations=(FREE, dict(nesterov=True)),
    ),
    "slowmo": Case(dict(SGD, momentum=0.5), server=("u",), traffic=(1, 1, 1), variations=(FREE,)),
    "fedyogi": Case(FEDADAM, server=("m", "v"), traffic=(1, 1, 1), variations=(FREE, dict(v0=0.1))),
    "fedadagrad": Case(
        dict(SGD, server_lr=0.1, eps=0.02), server=("v",), traffic=(1, 1, 1), variations=(FREE, dict(v0=0.1))
    ),
    "fednova": Case(
        dict(SGD, momentum=0.5, mu=0.0, server_momentum=0.4),
        server=("u",),
        traffic=(1, 1, 1),
        variations=(FREE, DECOUPLED, dict(momentum=0.0, mu=0.5), dict(server_momentum=0.0)),
        unequal=({}, dict(momentum=0.0), dict(momentum=0.0, mu=0.5)),
    ),
    "feddyn": Case(
        dict(DUAL, alpha=0.5),
        server=("h",),
        traffic=(1, 1, 1),
        variations=(PLAIN,),
        requires=UNIFORM,
    ),
    "fedpd": Case(
        dict(DUAL, eta=0.7, skip=0.55, start_at="warm"),
        server=(),
        traffic=(1, 1, 1),
        variations=(PLAIN, dict(start_at="cold"), dict(skip=0.0)),
        requires=EVERYONE,
    ),
    "fedadc": Case(
        dict(SGD, beta_local=0.6, beta_global=0.4, nesterov=False),
        server=("u",),
        traffic=(1, 1, 2),
        variations=(FREE, dict(nesterov=True), dict(nesterov=True, decay_mode="decoupled")),
    ),
    "local_momentum": Case(
        dict(SGD, momentum=0.6, buffer="average", nesterov=False),
        server=("u",),
        traffic=(2, 2, 2),
        variations=(FREE, DECOUPLED, dict(nesterov=True), dict(buffer="reset")),
    ),
    "quasi_global_momentum": Case(
        dict(SGD, momentum=0.6, mu=0.7, nesterov=True),
        server=("h",),
        traffic=(1, 1, 2),
        variations=(FREE, DECOUPLED, dict(nesterov=False), dict(mu=0.0)),
    ),
    "local_adaalter": Case(
        dict(SGD, eps=0.5, form="paper", b0=0.3),
        server=("B2",),
        traffic=(2, 2, 2),
        variations=(FREE, DECOUPLED, dict(form="code")),
    ),
    "fedlamb": Case(
        dict(
            lr=0.05,
            lr_decay=0.8,
            server_lr=0.7,
            weight_decay=0.5,
            decay_mode="decoupled",
            clip=0.6,
            beta1=0.7,
            beta2=0.9,
            eps=1e-3,
            v0=1e-4,
            v_start="server",
            m_start="zero",
        ),
        server=("v_hat",),
        traffic=(2, 2, 2),
        variations=(FREE, dict(decay_mode="l2"), dict(m_start="client"), dict(v_start="client")),
        unequal=({}, dict(m_start="client", v_start="client")),
    ),
    "local_adaptivity": Case(
        dict(
            SGD,
            lr=0.05,
            optimizer="adagrad",
            correction="joint",
            beta1=0.7,
            beta2=0.9,
            eps=0.05,
            v0=0.01,
            server_optimizer="sgd",
            server_beta1=0.6,
            server_beta2=0.8,
            server_eps=0.03,
        ),
        server=(),
        traffic=(1, 2, 2),
        variations=(
            FREE,
            DECOUPLED,
            dict(optimizer="sgd"),
            dict(optimizer="adam"),
            dict(optimizer="yogi"),
            dict(correction="local"),
            dict(server_optimizer="adam", server_lr=0.1),
        ),
        unequal=({}, dict(optimizer="adam"), dict(optimizer="sgd", correction="local")),
    ),
    "fedsam": Case(dict(SGD, rho=0.3), server=(), traffic=(1, 1, 1), variations=(FREE, dict(rho=0.0))),
    "mofedsam": Case(dict(SGD, rho=0.3, alpha=0.3), server=("g_a",), traffic=(1, 1, 2), variations=(FREE, INSIDE)),
    "fedspeed": Case(
        dict(DUAL, alpha=0.5, rho=0.3, q=0.7, form="code"),
        server=("h",),
        traffic=(1, 1, 1),
        variations=(PLAIN, dict(q=1.0)),
        unequal=({}, dict(form="paper")),
        requires=UNIFORM,
    ),
    "mimelite": Case(
        dict(SGD, base="momentum", beta1=0.6, beta2=0.9, eps=0.5),
        server=("m",),
        traffic=(2, 2, 2),
        variations=(
            FREE,
            DECOUPLED,
            dict(base="adam"),
            dict(base="adam", v0=1.0),
            dict(weight_decay=0.5, decay_on="weights"),
        ),
    ),
    "feddr": Case(
        dict(DUAL, eta=0.7, alpha=0.8, start_at="warm"),
        server=("x0",),
        traffic=(1, 1, 1),
        variations=(PLAIN, dict(start_at="cold"), dict(alpha=1.5)),
        requires=UNIFORM,
    ),
    "fedsplit": Case(
        dict(DUAL, eta=0.7, start_at="warm"),
        server=(),
        traffic=(1, 1, 1),
        variations=(PLAIN, dict(start_at="cold")),
        requires=EVERYONE,
    ),
}

CASES = PAPER | FAMILY
# For tests that are worth their time for the paper's methods whenever tests run, for the further ones with --all.
BY_TIER = [name if name in PAPER else slow(name) for name in CASES]
# The same, where the paper's methods run on ranks, too, with --all.
BY_TIER_AND_RANKS = [on_two_with_all(name) if name in PAPER else slow(name) for name in CASES]
