"""Records of version 0.1.0, in which every run has the settings of all methods, whether its own read them or not.

Some of these names have a meaning for other methods since: 0.1.0 wrote FedAdam's ``eps`` for FedLADA, too, which has
one of its own now. And its model ``lenet`` is ``lenet3`` since.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ADAM = {"beta1", "beta2", "eps"}
_LOCAL_ADAM = {"beta1", "beta2", "eps_v", "v_init"}
_READ: dict[str, set[str]] = {
    "fedavg": set(),
    "fedprox": {"mu"},
    "scaffold": {"alpha"},
    "fedcm": {"alpha"},
    "fedadam": _ADAM,
    "fedadam_amended": {"alpha", *_ADAM},
    "localadam": _LOCAL_ADAM,
    "fedlada": {"alpha", *_LOCAL_ADAM},
}
_OF_ALL = frozenset[str]().union(*_READ.values())


def is_of_0_1(record: Mapping[str, Any]) -> bool:
    """Whether version 0.1.0 wrote these settings."""
    return record.keys() >= _OF_ALL and "task" not in record


def own_settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by today's names, without those that the run's method did not read."""
    read = _READ.get(str(record.get("algorithm")))
    if read is None or not is_of_0_1(record):
        return dict(record)
    own = {name: value for name, value in record.items() if name not in _OF_ALL - read}
    return own | ({"model": "lenet3"} if own.get("model") == "lenet" else {})
