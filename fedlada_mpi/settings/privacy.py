"""What ``--secure`` and ``--silo-dir`` ask of the other settings: what shows a single silo or client is refused."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from ..support.errors import UserError, shortened

FEWEST_SILOS = 3  # of two, each learns the other's sum by taking away its own

# The value that each of these must have, and what another one would show.
REQUIRED: dict[str, tuple[Any, str]] = {
    "robust": ("none", "takes the vectors of single clients"),
    "adopt": (False, "lets others read the data of a silo"),
    "server_trains": (False, "makes the server a silo, which sees the sum of the others"),
    "eval_clients": (0, "records single clients"),
    "diagnose": (0, "adds up gradients that are not masked"),
    "profile": ("none", "times what single silos do"),
    "wire": ("fp32", "rounds what has to be exact"),
    "sums": ("exact", "depends on the number of ranks"),
}


def check_secure(values: Mapping[str, Any], by_hand: Set[str]) -> None:
    """Refuse what ``--secure`` contradicts, and its own settings without it."""
    if not values["secure"]:
        names = ("secure_neighbours", "secure_range", "silo_keys", *([] if values["silo_dir"] else ["silos"]))
        for name in names:
            if name in by_hand:
                raise UserError(f"--{name.replace('_', '-')} has no effect without --secure: add it, or leave this out")
        return
    _refuse_others(values, REQUIRED, "--secure")
    if values["min_silos"] < FEWEST_SILOS and neighbours(values["secure_neighbours"]) != 0:
        raise UserError(f"--min-silos: got {values['min_silos']}, expected at least {FEWEST_SILOS} with --secure")
    neighbours(values["secure_neighbours"])


# The value that each of these must have where silos have their own data, and what another one needs.
OWN_DATA: dict[str, tuple[Any, str]] = {
    "adopt": (False, "lets others read the data of a silo"),
    "server_trains": (False, "gives the server data"),
    "eval_clients": (0, "records single clients"),
    "diagnose": (0, "needs the sizes of all clients"),
    "profile": ("none", "writes to --out from every rank"),
    "validation": (0.0, "needs examples that belong to no silo"),
    "robust": ("none", "takes the vectors of single clients"),
}


def check_own_data(values: Mapping[str, Any]) -> None:
    """Refuse what ``--silo-dir`` contradicts."""
    if values["silo_dir"]:
        _refuse_others(values, OWN_DATA, "--silo-dir")


def _refuse_others(values: Mapping[str, Any], required: Mapping[str, tuple[Any, str]], by: str) -> None:
    """Refuse a setting that has another value than the one that ``by`` requires."""
    for name, (expected, why) in required.items():
        if values[name] != expected:
            option = f"--{name.replace('_', '-')}"
            given = option if expected is False else f"{option} {values[name]}"
            raise UserError(f"{given} {why}, which {by} does not allow: leave one of them out")


def neighbours(setting: str) -> int | None:
    """The number that ``--secure-neighbours`` gives; None where it depends on that of the silos."""
    if setting in ("auto", "all"):
        return None
    if not setting.isdecimal() or int(setting) == 1:
        raise UserError(f"--secure-neighbours: got {shortened(setting)}, expected all, a number from 2 on, or 0")
    return int(setting)
