"""The paper's settings by data set, and which values are not the paper's.

A method's own values are in its class: ``presets`` and, for ``--preset tuned`` and
``closest``, what differs from them as ``tuned`` and ``closest``.
"""

from __future__ import annotations

from typing import Any

# The paper's experimental set-up; "digits" is ours, sized for a laptop.
_PAPER = dict(
    model="resnet18", rounds=1500, clients=100, participation=0.1, batch_size=50, dirichlet=0.6, augment="paper"
)  # fmt: skip
# Data with owners, who are the clients, and who all take part.
_OWNERS = dict(rounds=50, participation=1.0, partition="natural", local_epochs=1, eval_every=10)
PRESETS: dict[str, dict[str, Any]] = {
    "digits": dict(model="cnn", rounds=60, clients=50, participation=0.2, batch_size=10, dirichlet=0.3,
                   local_epochs=5, crop_padding=1, eval_every=10),
    "cifar10": dict(_PAPER, local_epochs=5, crop_padding=4),
    "cifar100": dict(_PAPER, local_epochs=2, crop_padding=4),
    "tinyimagenet": dict(_PAPER, local_epochs=2, crop_padding=8),
    "randhie": dict(_OWNERS, task="regression", loss="poisson", model="linear", clients=6, batch_size=32, lr=0.005),
    "dd": dict(_OWNERS, task="survival", model="linear", clients=22, batch_size=8),
    "shakespeare": dict(_OWNERS, task="next-token", model="causal_cnn", clients=10, batch_size=16, local_steps=10,
                        eval_train_every=0, lr=0.3),
    "digit-masks": dict(_OWNERS, task="segmentation", model="fcn", clients=10, batch_size=16),
    "digit-mosaics": dict(_OWNERS, task="multilabel", model="mlp", clients=10, batch_size=16, lr=0.5),
}  # fmt: skip


# Values that the paper does not state, and that we chose: the setting, the method and the data set ("": any).
NOT_IN_PAPER = (
    ("clip", "", ""),
    ("smu_mu", "", ""),
    ("mu", "fedprox", ""),
    ("alpha", "fedcm", "cifar100"),
    ("alpha", "fedcm", "tinyimagenet"),
    ("alpha", "fedadam_amended", "cifar100"),
    ("alpha", "fedadam_amended", "tinyimagenet"),
)


def not_in_paper(name: str, algorithm: str) -> list[str]:
    """The data sets on which the paper states no value of a method's setting, [""] for all of them."""
    return [dataset for setting, method, dataset in NOT_IN_PAPER if setting == name and method in ("", algorithm)]
