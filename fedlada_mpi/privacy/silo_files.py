"""What a silo writes for itself alone: its log, and which rounds it has sent something of.

A sum over some silos and one over others, from the same model and the same batches, differ by what a single silo has
sent. A round is therefore never sent again with other silos, after a loss or by another start with the same inputs.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from ..settings import Config
from ..support import disk
from ..support.errors import PublicError
from ..support.inputs import parse_json, read_bytes

FOLDER, LOG, ROUNDS = "silos", "log.txt", "rounds.jsonl"
SEVERAL = "several"  # in place of a digest


def inputs_digest(config: Config, data: str, sizes: np.ndarray) -> str:
    """Of what the first model and the batches of a silo follow from; ``data``: its digest, ``sizes``: its clients'.

    Sums of runs that differ in other settings, such as a rate, may still be so close that their difference tells what
    one silo has sent. So may those from two files of ``--init``, and one file has several names.
    """
    seed = config.seed if seed_matters(config) or not same_batches(config, sizes) else None
    # Where "" is, version 1.0 had --init.
    return hashlib.sha256(json.dumps([data, seed, config.model, ""]).encode()).hexdigest()


def same_batches(config: Config, sizes: np.ndarray) -> bool:
    """Whether clients of these sizes have the same batches in every round, and with any seed."""
    whole = len(sizes) > 0 and (not config.batch_size or bool(np.all(sizes <= config.batch_size)))
    return whole and config.augment == "none" and config.dp == "none"


def seed_matters(config: Config) -> bool:
    """Whether the first model is another one with another seed; that of a user or a library may come from a file."""
    return not config.init and ":" not in config.model


def silo_folder(config: Config, name: str) -> Path:
    """Where a silo writes what is its own."""
    return Path(config.out) / FOLDER / name


class SiloFiles:
    """The files of the silo ``name``.

    >>> files = SiloFiles(silo_folder(config, "silo_0001"), "silo_0001", inputs="5f2c", silos="91aa")
    >>> files.begun(7)      # before anything of round 7 leaves the silo
    """

    def __init__(self, folder: Path, name: str, inputs: str, silos: str = ""):
        """``inputs``, ``silos``: digests of what the first model and the batches follow from, and of who takes part."""
        self.folder, self.name, self.inputs, self.silos = folder, name, inputs, silos
        self.errors = 0
        with disk.writing(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.sent: dict[int, str] = {}  # with which silos each round was sent, in runs with these inputs
        self._known = 0  # bytes of the record that have been read
        self._read()

    def _read(self) -> None:
        """What is new in the record: another run of this silo may write to it at the same time."""
        try:
            content = read_bytes(self.folder / ROUNDS)
        except FileNotFoundError:
            return
        for line in content[self._known :].splitlines():
            with suppress(ValueError, KeyError, TypeError):  # the last one may be cut off
                entry = parse_json(line)
                if entry["inputs"] == self.inputs:
                    number, silos = int(entry["round"]), str(entry["silos"])
                    self.sent[number] = silos if self.sent.get(number, silos) == silos else SEVERAL
        self._known = content.rfind(b"\n") + 1

    @property
    def void_until(self) -> int:
        """The last round that was sent with other silos; 0 if there is none."""
        return max((number for number, silos in self.sent.items() if silos != self.silos), default=0)

    def begun(self, number: int) -> None:
        """Write down that round ``number`` is sent now; refused if it was sent with others."""
        self._read()
        self._refuse_others(number)
        entry = {"inputs": self.inputs, "round": number, "silos": self.silos}
        path = self.folder / ROUNDS
        with disk.writing(path):
            disk.append_line(path, json.dumps(entry).encode())
        self._read()  # of two runs that begin the same round at once, one at least sees the other's line
        self._refuse_others(number)
        self.sent[number] = self.silos

    def _refuse_others(self, number: int) -> None:
        if self.sent.get(number, self.silos) != self.silos:
            raise PublicError(f"round {number} was sent with other silos before: it must not be sent again")

    def log(self, text: str) -> None:
        """One entry; what cannot be written is lost, as there is nobody else who may know."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with suppress(OSError), open(self.folder / LOG, "a", encoding="utf-8", opener=_private) as file:
            file.write(f"{stamp} {text}\n")

    def conceal(self, text: str) -> str:
        """Keep an error in the log; returns what others get to see of it."""
        self.errors += 1
        self.log(f"error {self.errors}: {text}")
        return f"{self.name}: error {self.errors} on this silo, see its own log"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
