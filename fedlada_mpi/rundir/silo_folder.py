"""What a run keeps in the directory of a silo, and nowhere else: the state of its clients, and its own results.

    SILO/runs/NAME-ID/run.json         which data of the silo it was begun with
    SILO/runs/NAME-ID/checkpoint/      what its clients keep across rounds (``silo_state``)
    SILO/runs/NAME-ID/metrics.jsonl    loss and metrics on its own examples, one line for each evaluation
    SILO/log.txt                       why its data was refused, which other ranks are not told
    SILO/sums.jsonl                    with which silos it has added up what they agree on

NAME is that of the run's own directory, and ID another one for each run that is begun.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from ..support import disk
from ..support.errors import PublicError
from ..support.inputs import read_bytes, read_json
from . import silo_state
from .checkpoint import State
from .files import to_json, write_atomically

RUNS, RUN, METRICS, SUMS = "runs", "run.json", "metrics.jsonl", "sums.jsonl"


class SiloFolder:
    """Of one run; the server has none, and its methods do nothing.

    >>> folder = SiloFolder(Path("/secure/berlin/runs/photos-1a2b3c4d"), digest=manifest.digest)
    >>> folder.save(50, state)
    """

    def __init__(self, path: Path | None, digest: str = ""):
        """``digest``: of the silo's data."""
        self.path, self.digest = path, digest

    def save(self, t: int, state: State) -> None:
        """What clients keep after round ``t``."""
        if self.path is not None and state:
            silo_state.save(self.path, t, state)

    def load(self, t: int, like: Tensor, state: State, clients: set[int]) -> None:
        """What clients kept after round ``t``, as vectors like this one; refused if the silo's data is another."""
        if self.path is None:
            return
        try:
            begun_with = read_json(self.path / RUN)["data"]
        except (OSError, ValueError, LookupError, TypeError):
            raise PublicError(
                f"--resume: {self.path} has nothing of this run: put it back, or begin another run"
            ) from None
        if begun_with != self.digest:
            raise PublicError(
                f"--resume: the data in {self.path.parent.parent} has changed since the run began: put back what it "
                "was, or begin another run"
            )
        if state and not silo_state.load(self.path, t, like, state, clients):
            raise PublicError(f"--resume: {self.path} has not kept what its clients need: begin another run")

    def begin(self, start: int) -> None:
        """Forget the results of rounds after ``start``, which are done again."""
        if self.path is None:
            return
        with disk.writing(self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.parent.chmod(0o700)
        path, known = self.path / METRICS, []
        if path.exists():
            for line in read_bytes(path).decode(errors="replace").splitlines():
                try:
                    record = json.loads(line)
                    if record["round"] <= start:
                        known.append(line)
                except (ValueError, TypeError, LookupError):  # a line that was not finished
                    continue
        write_atomically(self.path / RUN, json.dumps({"data": self.digest}) + "\n")
        write_atomically(path, "".join(f"{line}\n" for line in known))

    def record(self, values: Mapping[str, Any]) -> None:
        """The silo's own results of a round."""
        if self.path is None:
            return
        path = self.path / METRICS
        with disk.writing(path), path.open("a") as file:
            file.write(to_json(values) + "\n")


def log_error(path: Path, message: str) -> bool:
    """Tell the silo why its data was refused; whether that could be written."""
    try:
        disk.append_line(path, f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {message}".encode())
    except OSError:
        return False
    return True


def added_up_with_others(silo: Path, data: str, silos: str) -> bool:
    """Note with whom the silo adds up sums of its data; whether it has done so with others before.

    Both sums together show what the silos have that took part in one of them only.
    """
    path, known = silo / SUMS, set()
    try:
        for line in read_bytes(path).splitlines() if path.exists() else ():
            with suppress(ValueError, LookupError, TypeError):
                entry = json.loads(line)
                known |= {entry["silos"]} if entry["data"] == data else set()
        if silos not in known:
            disk.append_line(path, json.dumps({"data": data, "silos": silos}).encode())
    except OSError as error:
        raise PublicError(
            f"{path}: cannot be written ({error.strerror}): the silo must note with whom it adds up"
        ) from None
    return bool(known - {silos})
