"""What a run keeps in the directory of a silo, and nowhere else: the state of its clients, and its own results.

    SILO/runs/NAME-ID/round_000050.h5    what its clients keep across rounds, with the checkpoint after that round
    SILO/runs/NAME-ID/metrics.jsonl      loss and metrics on its own examples, one line for each evaluation
    SILO/errors.log                      why its data was refused, which other ranks are not told

NAME is that of the run's own directory, and ID another one for each run that is begun.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
from torch import Tensor

from ..support import disk
from ..support.errors import UserError
from ..support.inputs import read_bytes
from .checkpoint import DAMAGE, checksum_of, read_vector, write_vectors
from .files import to_json, write_atomically

RUNS, METRICS, ERRORS = "runs", "metrics.jsonl", "errors.log"
# One more than there are checkpoints: the server's last one may not have been completed.
KEPT = 3


class SiloFolder:
    """Of one run; the server has none, and its methods do nothing.

    >>> folder = SiloFolder(Path("/secure/berlin/runs/photos-1a2b3c4d"), first=4, digest=manifest.digest)
    >>> folder.save(50, state)
    """

    def __init__(self, path: Path | None, first: int = 0, digest: str = ""):
        """``first``: the number of its first client among those of all silos; ``digest``: of the silo's data."""
        self.path, self.first, self.digest = path, first, digest

    def save(self, t: int, state: Mapping[str, Mapping[int, Tensor]]) -> None:
        """What clients keep after round ``t``."""
        if self.path is None:
            return
        final = self._state(t)
        temporary = final.with_suffix(".tmp")
        with disk.writing(temporary):
            private_folder(self.path)
            disk.remove(temporary)
        rows = {f"{client - self.first}/{name}": v for name, clients in state.items() for client, v in clients.items()}
        # The checksum is of what h5py has written.
        checksum = write_vectors(temporary, rows, {"round": t, "data": self.digest})
        with disk.writing(final):
            os.chmod(temporary, 0o600)
            write_atomically(final.with_suffix(".json"), json.dumps({"crc32": checksum, "data": self.digest}))
            disk.publish(temporary, final)
            rounds = sorted(self.path.glob("round_*.h5"))
            for old in rounds[:-KEPT]:
                disk.remove(old)
                disk.remove(old.with_suffix(".json"))

    def load(self, t: int, like: Tensor, state: dict[str, dict[int, Tensor]]) -> None:
        """What clients kept after round ``t``, as vectors like this one; refused if the silo's data is another."""
        if self.path is None:
            return
        path = self._state(t)
        rows: list[tuple[str, int, Tensor]] = []
        try:
            about = json.loads(read_bytes(path.with_suffix(".json")))
            if about["crc32"] != checksum_of(path):
                raise ValueError("its checksum is not the one that was written")
            with h5py.File(path) as file:
                for client in file:
                    rows += [(name, int(client), read_vector(file, f"{client}/{name}", like)) for name in state]
        except FileNotFoundError:
            raise UserError(
                f"{path} is missing: the silo's part of the run cannot be resumed after round {t}: put {self.path} "
                "back, or begin another run"
            ) from None
        except DAMAGE as error:
            raise UserError(
                f"{path} is damaged ({error}): --resume from an earlier checkpoint, or begin another run"
            ) from None
        if about.get("data") != self.digest:
            raise UserError(
                f"{self.path.parent.parent}: the silo's data has changed since the run began: put back what it was, or "
                "begin another run"
            )
        for name, client, row in rows:
            state[name][client + self.first] = row.to(like)

    def _state(self, t: int) -> Path:
        assert self.path is not None
        return self.path / f"round_{t:06d}.h5"

    def begin(self, start: int) -> None:
        """Forget the results of rounds after ``start``, which are done again."""
        if self.path is None:
            return
        with disk.writing(self.path):
            private_folder(self.path)
        path, known = self.path / METRICS, []
        if path.exists():
            for line in read_bytes(path).decode(errors="replace").splitlines():
                try:
                    record = json.loads(line)
                    if record["round"] <= start:
                        known.append(line)
                except (ValueError, TypeError, LookupError):  # a line that was not finished
                    continue
        write_atomically(path, "".join(f"{line}\n" for line in known))
        path.chmod(0o600)

    def record(self, values: Mapping[str, Any]) -> None:
        """The silo's own results of a round."""
        if self.path is None:
            return
        path = self.path / METRICS
        with disk.writing(path), path.open("a") as file:
            file.write(to_json(values) + "\n")


def private_folder(path: Path) -> None:
    """Make a folder, and those around it, that only this account can read."""
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(mode=0o700)


def log_error(silo: Path, message: str) -> Path | None:
    """Where the silo can read why its data was refused; None if that cannot be written."""
    path = silo / ERRORS
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")
    except OSError:
        return None
    return path
