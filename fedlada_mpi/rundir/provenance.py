"""Where the rounds of a run were computed: one segment for each start of the run.

Segments are in the checkpoints: a resumed run takes over those of the rounds up to its checkpoint.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
Segment = dict[str, Any]


def now() -> str:
    """The time in UTC, as 2026-01-31T12:00:00Z."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def commit() -> dict[str, Any]:
    """The commit that the package runs from, and whether files were modified since; null if it is not in a checkout."""
    unknown = {"commit": None, "modified": None}
    # An installed package may be inside the repository of another project.
    if not (_ROOT / ".git").exists():
        return unknown
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    # In a git hook, GIT_* variables point to another repository.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            command,
            env={**clean, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return unknown
    name, _, dirty = done.stdout.strip().partition("-")
    return {"commit": name, "modified": bool(dirty)} if done.returncode == 0 and name else unknown


def cpu_model() -> str:
    """The name of the processor, or of its architecture where the system does not tell more."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def nodes(ranks: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By host name: the number of ranks, the CPU, how many ranks use each device, and what identifies the GPUs."""
    found: dict[str, dict[str, Any]] = {}
    for rank in ranks:
        node = found.setdefault(rank["host"], {"ranks": 0, "cpu": rank["cpu"], "devices": {}})
        node["ranks"] += 1
        node["devices"][rank["device"]] = node["devices"].get(rank["device"], 0) + 1
        if gpu := rank.get("gpu"):
            node["gpus"] = sorted({*node.get("gpus", ()), gpu})
    return found


class Segments:
    """The segments of a run: the ``earlier`` ones, and the current one with its ``environment``."""

    def __init__(self, earlier: list[Segment], resumed_at: int, start: str, environment: Mapping[str, Any]):
        self.earlier, self.resumed_at = earlier, resumed_at
        self.start, self.environment = start, environment

    def until(self, t: int) -> list[Segment]:
        """The segments of the first ``t`` rounds, all of which are done."""
        if t <= self.resumed_at:
            return self.earlier
        present = {"from": self.resumed_at + 1, "to": t, "start": self.start, "end": now(), **self.environment}
        return [*self.earlier, present]

    def summary(self, t: int) -> dict[str, Any]:
        """Entries of the summary after ``t`` rounds: start, end, current environment, all segments, lost ranks."""
        segments = self.until(t)
        start = segments[0]["start"] if segments else self.start
        # Ranks that were lost after the last round are not in a segment.
        departures = [*segments, *([self.environment] if t <= self.resumed_at else [])]
        left = [rank for part in departures for rank in part.get("left", [])]
        found = {"start": start, "end": now(), "environment": self.environment, "segments": segments}
        return {**found, "left": left} if left else found


def encode(segments: list[Segment]) -> bytes:
    return json.dumps(segments).encode()


def decode(content: bytes) -> list[Segment]:
    return list(json.loads(content))
