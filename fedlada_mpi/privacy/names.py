"""The names of the silos, by which they know each other's keys and files."""

from __future__ import annotations

import os
import re

from ..settings import Config
from ..support.errors import UserError, shortened

VARIABLE = "FEDLADA_SILO"  # in the environment of a rank: its own name
ALLOWED = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # as the name of a file


def silo_names(config: Config, silos: int) -> list[str]:
    """Of the silos on ranks 1 to ``silos``, as the settings have them."""
    if not config.silos:
        return [f"silo_{number:04d}" for number in range(1, silos + 1)]
    names = [check_name(name.strip(), "--silos") for name in config.silos.split(",")]
    if len(names) != silos:
        raise UserError(f"--silos: got {len(names)} names, expected {silos}, one for every rank but 0")
    return names


def own_name(config: Config, silo: int, silos: int) -> str:
    """Of this process, which is silo ``silo`` from 0 on, or as its environment says."""
    own = os.environ.get(VARIABLE, "")
    return check_name(own, VARIABLE) if own else silo_names(config, silos)[silo]


def check_name(name: str, where: str) -> str:
    if not ALLOWED.fullmatch(name):
        raise UserError(f"{where}: got {shortened(name)}, expected a name of letters, digits, _, . and -")
    return name
