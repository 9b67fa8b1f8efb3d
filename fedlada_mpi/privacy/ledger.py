"""Every release of a run, in ``privacy.jsonl``: written before the release, and never cut.

A line is a release, with its round, share of clients, noise multiplier and clip; a round that was void, with nothing
released; or the calibration of the noise, so that a run that is resumed need not calibrate again. A round that is done
again is another line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..support import disk
from ..support.errors import UserError
from ..support.inputs import parse_json, read_bytes
from .accounting import Release

LEDGER = "privacy.jsonl"
CALIBRATION, VOID = "calibration", "void"


class Ledger:
    """
    >>> ledger = Ledger(out)
    >>> ledger.add({"round": 1, "q": 0.05, "z": 1.1, "clip": 1.0})      # on disk when it returns
    >>> ledger.releases
    [Release(share=0.05, noise=1.1)]
    """

    def __init__(self, out: Path):
        self.path = out / LEDGER
        self._content = self._read()
        self.entries = [self._entry(line) for line in self._content.splitlines()]

    @property
    def releases(self) -> list[Release]:
        return [Release(entry["q"], entry["z"]) for entry in self.entries if not {CALIBRATION, VOID} & {*entry}]

    @property
    def rounds(self) -> set[int]:
        """Those that were released, or void."""
        return {entry["round"] for entry in self.entries if CALIBRATION not in entry}

    def calibration(self, asked: Mapping[str, float]) -> dict[str, Any] | None:
        """What was found for what was asked, the noise multiplier ``z`` among it."""
        found = [entry[CALIBRATION] for entry in self.entries if CALIBRATION in entry]
        return next((each for each in reversed(found) if {**each, **asked} == each), None)

    def add(self, entry: dict[str, Any]) -> None:
        """Append an entry; it is on the disk when this returns."""
        line = json.dumps(entry).encode() + b"\n"
        with disk.writing(self.path):
            content = self._on_disk()
            if not self._content.startswith(content[: content.rfind(b"\n") + 1]):
                raise UserError(
                    f"{self.path} has releases of another run, which goes on at the same time or has put it there: "
                    "wait until that has ended, then add --resume"
                )
            if content == self._content and self._content:
                with open(self.path, "ab") as file:
                    file.write(line)
                    file.flush()
                    os.fsync(file.fileno())
            else:  # the first entry, behind the rest of a line, or a file that was removed during the run
                self._write(self._content + line)
        self._content += line
        self.entries.append(entry)

    def _on_disk(self) -> bytes:
        try:
            return read_bytes(self.path)
        except FileNotFoundError:
            return b""

    def _read(self) -> bytes:
        """Whole lines: of one that a kill has cut short, the release has not happened."""
        content = self._on_disk()
        return content[: content.rfind(b"\n") + 1]

    def _write(self, content: bytes) -> None:
        temporary = self.path.with_name(self.path.name + ".tmp")
        disk.remove(temporary)
        disk.write_new(temporary, content)
        disk.publish(temporary, self.path)

    def _entry(self, line: bytes) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = parse_json(line)
            if CALIBRATION in entry:
                _check(1.0, float(entry[CALIBRATION]["z"]), entry[CALIBRATION]["rounds"])
            elif VOID in entry:
                _check(1.0, 1.0, entry["round"])
            else:
                _check(float(entry["q"]), float(entry["z"]), entry["round"])
            return entry
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{self.path} is damaged: without every release, nobody knows the epsilon that is spent: put the file "
                "back as it was, or start another run with another --out"
            ) from None


def _check(share: float, noise: float, number: Any) -> None:
    if not (0 < share <= 1 and 0 < noise < float("inf") and type(number) is int):
        raise ValueError
