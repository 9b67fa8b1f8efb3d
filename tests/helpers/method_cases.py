"""What the tests know about each method: one entry per method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Settings = dict[str, Any]


@dataclass(frozen=True)
class Case:
    settings: Settings
    server: tuple[str, ...]  # what the server must remember between rounds, in addition to x
    # Vectors per participant and round: down and up, as they travel, and as the paper charges them.
    traffic: tuple[int, int, int]
    variations: tuple[Settings, ...] = ()  # changes that change the maths, in addition to those of all methods


SGD = dict(lr=0.2, lr_decay=0.8, server_lr=0.7, weight_decay=0.05, clip=0.6)
FEDADAM = dict(SGD, server_lr=0.1, beta1=0.7, beta2=0.9, eps=0.02)
ADAPTIVE = dict(
    lr=0.02, lr_decay=0.8, server_lr=0.7, weight_decay=0.5, decay_mode="decoupled", clip=0.6, beta1=0.7, beta2=0.9,
    v_init="zero",
)  # fmt: skip

OF_ALL = (dict(clip=0.0), dict(lr_decay=1.0), dict(weight_decay=0.0), dict(weighting="size"), dict(server_lr=1.3))
OF_ADAM = (dict(beta1=0.0), dict(beta2=0.5))
OF_ADAPTIVE = (
    *OF_ADAM, dict(decay_mode="l2"), dict(v_init="server"), dict(decay_mode="l2", v_init="server"), dict(eps_v=0.1)
)  # fmt: skip

CASES = {
    "fedavg": Case(SGD, server=(), traffic=(1, 1, 1)),
    "fedprox": Case(dict(SGD, mu=0.5), server=(), traffic=(1, 1, 1), variations=(dict(mu=2.0),)),
    "scaffold": Case(dict(SGD, alpha=1.0), server=("c",), traffic=(2, 2, 2), variations=(dict(alpha=0.4),)),
    "fedcm": Case(dict(SGD, alpha=0.3), server=("g_a",), traffic=(1, 1, 2), variations=(dict(alpha=0.9),)),
    "fedadam": Case(FEDADAM, server=("m", "v"), traffic=(1, 1, 1), variations=(*OF_ADAM, dict(eps=0.3))),
    "fedadam_amended": Case(
        dict(FEDADAM, alpha=0.3),
        server=("m", "v", "g_a"),
        traffic=(2, 1, 2),
        variations=(*OF_ADAM, dict(eps=0.3), dict(alpha=0.9)),
    ),
    "localadam": Case(ADAPTIVE, server=("v",), traffic=(2, 2, 2), variations=OF_ADAPTIVE),
    "fedlada": Case(
        dict(ADAPTIVE, alpha=0.3),
        server=("v", "g_a"),
        traffic=(2, 2, 2),
        variations=(*OF_ADAPTIVE, dict(alpha=0.9)),
    ),
}
