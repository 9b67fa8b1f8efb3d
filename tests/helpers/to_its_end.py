"""A program that is waited for, and killed with all that it has started if it takes too long."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

HANGS = -1  # the status of a program that took longer


def run_to_its_end(line: Sequence[str], log: Path, limit: float) -> tuple[int, str]:
    """Its status, and what it printed, which is also in ``log``."""
    with open(log, "w") as file:
        process = subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(limit), log.read_text()
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return HANGS, log.read_text()
