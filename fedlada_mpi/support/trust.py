"""Which code this user has run by name on this machine.

Who names code on a command line, in Python or in settings of their own wants it to run. The record of a run names code,
too, and may be somebody else's: what is not known here runs only with ``--trust``. An empty file per digest, in the
user's state directory, keeps what is known; any number of processes may write them, and where none can be written or
found, the code is not known.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .code_digest import Code, Files, changed, of_settings
from .errors import UserError


def check(
    settings: Mapping[str, Any], recorded: Container[str], where: object, allowed: bool, before: Code | None = None
) -> None:
    """Refuse code that only the record ``where`` names, unless it is known or ``allowed``; all other is known from now.

    ``recorded`` has the settings that the record names, ``before`` the code that the run in it began with, where it is
    to go on. None of the code is run.
    """
    code = of_settings(settings)
    for setting, files in code.items():
        name = settings[setting]
        mark = _folder() / _digest(name, files)
        if setting not in recorded or allowed:
            with suppress(OSError):
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()
        elif files and not os.path.exists(mark):
            names = changed(before or {}, {setting: files})
            began = f" ({', '.join(names)} changed since the run began)" if names else ""
            raise UserError(
                f"{where} names code, {setting} {name}, that you have not run by name on this machine as it is"
                f"{began}: read it, then add --trust{' --accept-changed-code' * bool(names)}"
            )


def _digest(name: str, files: Files) -> str:
    """Of the code and of what is taken from it."""
    return hashlib.sha256(repr((name.rpartition(":")[2], sorted(files.items()))).encode()).hexdigest()


def _folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # as the specification of these variables has it
        state = os.path.expanduser("~/.local/state")
    # Where there is no home, it stays relative.
    return Path(state if os.path.isabs(state) else os.devnull, "fedlada_mpi", "known_code")
