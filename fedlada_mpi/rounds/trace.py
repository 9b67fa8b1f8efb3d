"""Traces of torch's profiler for Perfetto and chrome://tracing: all ranks on one time axis, and what takes most time.

An event is a line of its own, so that files are joined without being parsed.
"""

from __future__ import annotations

import gzip
import io
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..rundir.columns import PHASES
from ..rundir.files import to_json

Event = dict[str, Any]

ROUND = "round "  # what the name of the range of a whole round begins with
BETWEEN = "between phases: waiting, recording"
FILES, JOINED = "*.json.gz", "trace.json.gz"  # in the folder of a run's profile
HEAD, TAIL = b'{"displayTimeUnit": "ms", "traceEvents": [\n', b"]}\n"
HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
COMPRESSION = 4


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:04d}.json.gz"


def of_rank(exported: Mapping[str, Any], process: int, rank: int, size: int, origin: int) -> list[Event]:
    """The events of a trace that torch has exported, with the rank in place of the ``process``.

    Times are microseconds since ``origin``, nanoseconds of the system's clock. A GPU is a process of its own.
    """
    shift = (exported.get("baseTimeNanoseconds", 0) - origin) / 1000
    found = [event for event in exported["traceEvents"] if isinstance(event.get("pid"), int)]
    devices = {event["pid"]: event["pid"] + 1 for event in found if event["ph"] != "M"} | {process: 0}
    events: list[Event] = []
    for pid, device in devices.items():
        name = f"rank {rank}, GPU {pid}" if device else f"rank {rank}"
        about = {"process_name": {"name": name}, "process_sort_index": {"sort_index": rank * 100 + device}}
        events += [{"ph": "M", "name": n, "pid": rank + device * size, "tid": 0, "args": a} for n, a in about.items()]
    for event in found:
        if event["pid"] not in devices or event["name"].startswith("process_"):
            continue
        moved = {**event, "pid": rank + devices[event["pid"]] * size, "ts": round(event["ts"] + shift, 3)}
        if isinstance(event.get("id"), int):  # of arrows from launches to kernels
            moved["id"] = (rank << 40) + event["id"]
        events.append(moved)
    return events


def packed(events: Iterable[Event]) -> bytes:
    return _packed(to_json(event).encode() for event in events)


def joined(files: Iterable[Path]) -> bytes:
    """One trace of several that ``packed`` has made."""
    return _packed(line for file in files for line in _lines(file))


def _packed(lines: Iterable[bytes]) -> bytes:
    content = io.BytesIO()
    with gzip.open(content, "wb", COMPRESSION) as file:
        file.write(HEAD)
        for i, line in enumerate(lines):
            file.write(b",\n" + line if i else line)
        file.write(b"\n" + TAIL)
    return content.getvalue()


def _lines(path: Path) -> Iterator[bytes]:
    with gzip.open(path) as file:
        for line in file:
            if line not in (HEAD, TAIL):
                yield line.rstrip(b",\n")


@dataclass(frozen=True)
class Item:
    """What takes time: an operation, a kernel, or a phase outside of torch's operations."""

    name: str
    seconds: float  # without those of what it calls
    count: int


@dataclass(frozen=True)
class Account:
    """Where the profiled rounds of a rank went."""

    seconds: float  # of all these rounds
    phases: dict[str, float]
    items: list[Item]  # the largest

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def recorded(cls, record: Mapping[str, Any]) -> Account:
        return cls(record["seconds"], record["phases"], [Item(**item) for item in record["items"]])

    @property
    def busy(self) -> float:
        """Seconds in which the rank did not wait for others."""
        return sum(self.phases.values())

    def lines(self) -> list[str]:
        """For people: the shares of the phases, then of each item."""
        total = self.seconds or 1.0
        shares = ", ".join(f"{phase} {seconds / total:.0%}" for phase, seconds in self.phases.items())
        items = [
            f"{item.seconds / total:7.1%}  {_shortened(item.name)} ({item.count:,} time{'s' * (item.count != 1)})"
            for item in self.items
        ]
        return [shares, *items]


def account(events: Sequence[Event], most: int) -> Account:
    """Of a rank's events, with the ``most`` largest items: of its GPU where it has one, otherwise of its CPU."""
    timed = [event for event in events if event["ph"] == "X"]
    ranges = [event for event in timed if event["cat"] == "user_annotation"]
    phases = {name: sum(e["dur"] for e in ranges if e["name"] == name) / 1e6 for name in PHASES}
    seconds = sum(e["dur"] for e in ranges if e["name"].startswith(ROUND)) / 1e6
    own = [(e["name"], e["dur"]) for e in timed if e["cat"] in DEVICE]
    own = own or [(_item(e), t) for e, t in _self_times(e for e in timed if e["cat"] in HOST)]
    totals: dict[str, float] = defaultdict(float)
    for name, duration in own:
        totals[name] += duration / 1e6
    counts = Counter(name for name, _ in own)
    largest = sorted(totals, key=lambda name: -totals[name])[:most]
    return Account(seconds, phases, [Item(name, totals[name], counts[name]) for name in largest])


def _self_times(events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """Every event with its time less that of the events within it, thread by thread."""
    within: dict[int, float] = {}  # the time of the events directly within one
    open_: dict[Any, list[Event]] = defaultdict(list)
    ordered = sorted(events, key=lambda event: (event["ts"], -event["dur"]))
    for event in ordered:
        stack = open_[event["tid"]]
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
            stack.pop()
        if stack:
            within[id(stack[-1])] = within.get(id(stack[-1]), 0.0) + event["dur"]
        stack.append(event)
    return ((event, max(0.0, event["dur"] - within.get(id(event), 0.0))) for event in ordered)


def _item(event: Event) -> str:
    """The name under which an event is added up."""
    name = event["name"]
    if event["cat"] != "user_annotation":
        return str(name)
    return BETWEEN if name.startswith(ROUND) else f"{name}, outside torch's operations"


def _shortened(name: str, most: int = 70) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
