"""What a run records: metrics.jsonl, phase times, the summary."""

from __future__ import annotations

import contextlib
import lzma
import math
import os
import time
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..support import disk
from ..support.inputs import parse_json, read_bytes
from .columns import ALL_PHASES, CLASSIFICATION, TABLES, TOTALS, Columns
from .files import to_json, write_atomically

if TYPE_CHECKING:
    from .sinks import Sinks

METRICS = "metrics.jsonl"
PACKED = f"{METRICS}.xz"  # in published records (``report/pack.py``)
DAMAGED = "metrics.damaged.jsonl"
LARGEST = 2**30  # bytes that a packed file may unpack to, and of memory for it
MOST = 1e100  # larger numbers are damage, and their sums and squares would overflow


class Clock:
    """Seconds by phase, of one round at a time, and in ``total`` all the time from one ``lap`` to the next."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(ALL_PHASES, 0.0)
        self.since = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def take(self) -> list[float]:
        """The seconds of ALL_PHASES since the last call; counts from zero again."""
        taken = [self.seconds[phase] for phase in ALL_PHASES]
        self.seconds = dict.fromkeys(ALL_PHASES, 0.0)
        return taken

    def lap(self) -> float:
        """The seconds since the last call, in which the phases of all ranks lie."""
        now = time.perf_counter()
        seconds, self.since = now - self.since, now
        return seconds


def read(out: Path) -> bytes:
    """The content of the metrics file in ``out``, packed or not; raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        return read_bytes(out / METRICS)
    unpacker = lzma.LZMADecompressor(memlimit=LARGEST)
    try:
        content = unpacker.decompress(read_bytes(out / PACKED), LARGEST)
    except lzma.LZMAError as error:
        raise OSError(f"{PACKED} is damaged ({error})") from None
    if not (unpacker.eof or unpacker.needs_input):
        raise OSError(f"{PACKED} has more than {LARGEST:,} bytes of metrics")
    return content


def parse(content: bytes, columns: Columns = CLASSIFICATION) -> tuple[list[dict[str, Any]], int]:
    """The records of a metrics file in the order of the rounds, and how many lines are not records.

    A last line without its end is ignored: the run was killed, or is writing it. Of a round that was done twice, the
    last record counts.
    """
    lines = content[: content.rfind(b"\n") + 1].split(b"\n")[:-1]
    try:
        values = parse_json(b"[" + b",".join(lines) + b"]")
    except ValueError:
        values = [value for line in lines if (value := _line(line)) is not None]
    numbers = (*columns.numbers, *columns.optional)
    if not all(_is_record(value, numbers) for value in values):
        values = [value for value in values if _is_record(value, numbers)]
    by_round = {record["round"]: record for record in values}
    return [by_round[t] for t in sorted(by_round)], len(lines) - len(values)


def _line(line: bytes) -> Any:
    try:
        return parse_json(line)
    except ValueError:
        return None


def _is_record(value: Any, numbers: tuple[str, ...]) -> bool:
    """Whether a value of a metrics file has a round, and all its fields the types that a run writes."""
    return (
        isinstance(value, dict)
        and type(value.get("round")) is int
        and 0 < value["round"] < 2**31
        and _are_participants(value.get("participants"))
        and all(isinstance(value.get(name) or {}, dict) for name in TABLES)
        and _are_numbers([*map(value.get, numbers), *(value.get("seconds") or {}).values()])
        and all(_is_row(row) for row in (value.get("seconds_by_rank") or {}).values())
    )


def _are_participants(value: Any) -> bool:
    """Whether it is a list of participants, or, as in packed metrics, their number."""
    return value is None or isinstance(value, list) or (type(value) is int and 0 <= value < 2**31)


def _are_numbers(values: list[Any]) -> bool:
    """Whether each is null, NaN, infinite, or a number up to ``MOST``."""
    known = [value for value in values if value is not None]
    if not {int, float}.issuperset(map(type, known)):
        return False
    # ``max`` is wrong where there is a NaN.
    return max(map(abs, known), default=0) <= MOST or not any(MOST < abs(value) < math.inf for value in known)


def _is_row(values: Any) -> bool:
    return values is None or (isinstance(values, list) and None not in values and _are_numbers(values))


def _is_complete(record: dict[str, Any], numbers: tuple[str, ...]) -> bool:
    """Whether a record has everything that the summary and the last lines of a run need."""
    missing = {*numbers, "participants", *TABLES} - record.keys()
    if missing or not all(set(names) <= (record[table] or {}).keys() for table, names in TABLES.items()):
        return False
    summed = [*(record[name] for name in TOTALS), *(record["seconds"][phase] for phase in ALL_PHASES)]
    rows = record["seconds_by_rank"].values()
    return None not in rows and all(map(_is_finite, (*summed, *chain(*rows))))


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


class Recorder:
    """Appends one JSON object per round to metrics.jsonl, and passes its numbers to ``sinks``.

    A run that goes on after round ``resumed_at`` keeps the records up to there, because it repeats the later rounds. It
    takes them from its checkpoint, whatever has become of the file; the file is kept as metrics.damaged.jsonl, if it is
    not as the run has left it.
    """

    def __init__(
        self,
        out: Path,
        resumed_at: int,
        sinks: Sinks | None = None,
        known: list[dict[str, Any]] | None = None,
        columns: Columns = CLASSIFICATION,
    ):
        """``known``: the records up to there; by default those in the file, as older checkpoints have none."""
        self.path, self.sinks, self.columns = out / METRICS, sinks, columns
        self.records = list(known or [])
        self.left_out = 0
        self.note = ""
        self._packer, self._packed = zlib.compressobj(1), bytearray()
        if resumed_at and known is None:
            self._read(resumed_at)
        lines = [_encoded(record) for record in self.records]
        for line in lines:
            self._pack(line)
        if resumed_at and known is not None:
            self._keep_if_different(b"".join(lines))
        self._write(b"".join(lines))

    def _read(self, until: int) -> None:
        records, self.left_out = parse(self._content(), self.columns)
        complete = [record for record in records if _is_complete(record, self.columns.numbers)]
        self.left_out += len(records) - len(complete)
        self.records = [record for record in complete if record["round"] <= until]
        notes = []
        if self.left_out:
            self.path.replace(self.path.with_name(DAMAGED))
            lines = f"{self.left_out} unreadable line{'s' * (self.left_out > 1)}"
            notes.append(f"left out {lines} of {METRICS}, which is kept as {self.path.with_name(DAMAGED)}")
        if missing := until - len(self.records):
            rounds = f"{missing} of the first {until} rounds"
            notes.append(f"{METRICS} does not have {rounds}: totals and targets of this run are without them")
        self.note = "; ".join(notes)

    def _content(self) -> bytes:
        try:
            return read_bytes(self.path)
        except FileNotFoundError:
            return b""

    def _keep_if_different(self, expected: bytes) -> None:
        content = self._content()
        if content.startswith(expected) and not parse(content[len(expected) :], self.columns)[1]:
            return
        self.note = f"{METRICS} was not as this run had left it: it is written again from the checkpoint"
        if content:
            with disk.writing(self.path):
                self.path.replace(self.path.with_name(DAMAGED))
            self.note += f", and kept as {self.path.with_name(DAMAGED)}"

    def _write(self, content: bytes) -> None:
        """A new file; the run appends to it."""
        write_atomically(self.path, content)
        with disk.writing(self.path):
            self.file = open(self.path, "ab")  # noqa: SIM115 (open for the whole run)
            self.identity, self.size = os.fstat(self.file.fileno()), len(content)

    def _pack(self, line: bytes) -> None:
        self._packed += self._packer.compress(line)

    def packed(self) -> bytes:
        """All records, for ``unpacked``."""
        self._packed += self._packer.flush(zlib.Z_SYNC_FLUSH)
        return bytes(self._packed)

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        line = _encoded(record)
        self._pack(line)
        with disk.writing(self.path):
            self.file.write(line)
            self.file.flush()
            self.size += len(line)
        if self.sinks is not None:
            self.sinks.add(record["round"], plotted(record, self.columns))

    def is_missing(self) -> bool:
        """Whether the file is not there, or not as it was written."""
        try:
            there = os.stat(self.path)
        except OSError:
            return True
        return not os.path.samestat(there, self.identity) or there.st_size != self.size

    def put_back(self) -> None:
        """Write all records again."""
        self.close()
        self._write(b"".join(map(_encoded, self.records)))

    def sync(self) -> None:
        """Flush to disk, before a checkpoint declares these rounds done."""
        with disk.writing(self.path):
            os.fsync(self.file.fileno())
        if self.sinks is not None:
            self.sinks.flush()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the file; an exception that is on its way goes on, whatever else fails here."""
        with contextlib.suppress(*(() if kind is None else (disk.WriteError,))):
            self.close()

    def close(self) -> None:
        with disk.writing(self.path):
            self.file.close()


def _encoded(record: dict[str, Any]) -> bytes:
    return to_json(record).encode() + b"\n"


def unpacked(packed: bytes) -> list[dict[str, Any]]:
    """The records in what ``Recorder.packed`` gave."""
    return [parse_json(line) for line in zlib.decompressobj().decompress(packed).splitlines()]


def plotted(record: dict[str, Any], columns: Columns = CLASSIFICATION) -> dict[str, float]:
    """What TensorBoard and the like show of a round."""
    names = ("local_loss", "consistency", "lr", *columns.evaluated, *columns.optional)
    return {name: record[name] for name in names if record.get(name) is not None}


def summarise(records: list[dict[str, Any]], targets: list[float], columns: Columns = CLASSIFICATION) -> dict[str, Any]:
    """Best and final results, the first round at each target (null: not reached), and what was spent."""
    objective, column = columns.objective, columns.objective.of("test")
    evaluated = [r for r in records if r.get(column) is not None]
    best = objective.best(evaluated)
    return {
        "rounds": records[-1]["round"] if records else 0,
        "final": {name: evaluated[-1][name] for name in ("round", *columns.evaluated)} if evaluated else None,
        "best": {"round": best["round"], column: best[column]} if best else None,
        "targets": {
            f"{t:g}": next((r["round"] for r in evaluated if objective.reached(r[column], t)), None) for t in targets
        },
        **{name: sum(r[name] for r in records) for name in TOTALS},
        "seconds": sum(r["seconds"]["total"] for r in records),
    }
