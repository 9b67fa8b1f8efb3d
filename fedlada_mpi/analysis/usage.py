"""What runs computed on, from their summaries: GPUs, times and nodes, and how many runs shared a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

MOST = 1_000_000  # GPUs, or runs at once; more are damage


class Span(NamedTuple):
    """A segment of a run: seconds since the epoch, and the GPUs it was on; its nodes, where it did not record these."""

    start: float
    end: float
    places: frozenset[str]


@dataclass
class Usage:
    """What a run says about its GPUs; what it has not recorded is None or empty."""

    device: str = ""
    gpus: int | None = None  # or ranks with one, where the run has not recorded which they share
    spans: list[Span] = field(default_factory=list)
    at_once: float | None = None  # runs on its GPUs at the same time, where its record has it


def last_segment(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The environment of a run where it was last at work."""
    segments = summary.get("segments") or []
    return {**summary["environment"], **(segments[-1] if segments else {})}


def of(summary: Mapping[str, Any]) -> Usage:
    """As far as the summary has it; summaries of other versions, or damaged ones, have less."""
    usage = Usage()
    try:
        segments, last = summary.get("segments") or [], last_segment(summary)
        nodes = last.get("nodes") or {"": {"devices": {last["device"]: last["ranks"]}}}
        devices = [(str(name), int(count)) for node in nodes.values() for name, count in node["devices"].items()]
        usage.device = ", ".join(dict.fromkeys(name for name, _ in devices))
        ranks = sum(count for name, count in devices if not name.endswith(" CPU"))
        gpus = sum(len(node.get("gpus", ())) for node in nodes.values()) or ranks
        usage.gpus = gpus if 0 <= gpus < MOST else None
        usage.spans = [Span(_time(s["start"]), _time(s["end"]), _places(s["nodes"])) for s in segments]
    except (TypeError, ValueError, AttributeError, LookupError, OverflowError):
        pass
    at_once = summary.get("runs_at_once")
    if isinstance(at_once, (int, float)) and 1 <= at_once < MOST:
        usage.at_once = float(at_once)
    return usage


def _places(nodes: Mapping[str, Any]) -> frozenset[str]:
    """The GPUs of the nodes; of earlier versions, which did not record them, the nodes."""
    gpus = (f"{name}/{gpu}" if gpu else name for name, node in nodes.items() for gpu in node.get("gpus") or [""])
    return frozenset(gpus)


def _time(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def at_once(runs: Sequence[Usage]) -> list[float | None]:
    """For each run on a GPU, how many of the runs shared its GPUs while it was at work: the harmonic mean over time.

    A record says it itself: those that it shared them with need not be among the runs.
    """
    return [run.at_once or _at_once(run, [other for other in runs if other is not run]) for run in runs]


def _at_once(run: Usage, others: Sequence[Usage]) -> float | None:
    lasting = sum(span.end - span.start for span in run.spans)
    if not run.gpus or lasting <= 0 or not all(span.places for span in run.spans):
        return None
    beside = [span for other in others if other.gpus for span in other.spans]
    alone = 0.0  # the seconds that the run would have had its GPUs to itself
    for span in run.spans:
        shared = [s for s in beside if s.places & span.places and s.start < span.end and s.end > span.start]
        inside = (t for s in shared for t in (s.start, s.end) if span.start < t < span.end)
        for start, end in pairwise(sorted({span.start, span.end, *inside})):
            there = [s.places for s in shared if s.start <= start and end <= s.end]
            alone += (end - start) * fmean(1 / (1 + sum(place in each for each in there)) for place in span.places)
    return lasting / alone
