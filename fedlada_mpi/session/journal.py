"""What the root keeps of a run: its history, the files and services that it is written to, and the results."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..rounds.watcher import Watcher
from ..rundir import checkpoint, metrics, provenance, results
from ..rundir.best import Best
from ..rundir.client_values import ClientValues
from ..rundir.files import write_atomically
from ..rundir.history import History
from ..rundir.metrics import Recorder, summarise
from ..rundir.provenance import Segments
from ..rundir.sinks import Sinks
from ..settings import CODE, dumps
from .assemble import Session
from .banner import environment


class Journal(Watcher):
    """On the root; as a context, it closes what it has opened.

    >>> with Journal(session, history) as journal:
    ...     status = Server(session.silo, [journal]).run(start)
    ...     journal.finish(status)
    """

    def __init__(self, session: Session, history: History | None = None, about: Mapping[str, Any] | None = None):
        """From the files of the run, or a ``history`` that a rank has kept; ``about`` adds to where it is computed."""
        self.session, config = session, session.config
        self.out = Path(config.out)
        self.sinks = Sinks(config, session.start)  # which may refuse; with its settings, the directory is a run's
        write_atomically(self.out / "config.json", dumps(config))
        known = history.records if history else None
        if history is None:
            history = self._read()  # before anything is written, as it may refuse damaged files
        else:
            history.mark_changed()
        self.recorder = Recorder(self.out, session.start, self.sinks, known)
        here = {**environment(session), **provenance.commit(), "nodes": provenance.nodes(session.ranks)}
        here |= {CODE: config.code} if config.code else {}
        earlier = history.segments.until(session.start)
        history.segments = Segments(earlier, session.start, session.started, {**here, **(about or {})})
        history.records = self.recorder.records
        self.history = history
        self._opened = ExitStack()

    def _read(self) -> History:
        """As it was at the round that the run goes on from."""
        session, start, manifest = self.session, self.session.start, self.session.manifest
        best = Best(self.out, start, session.silo.s.x, session.network.state_dict) if manifest.validation else None
        clients = ClientValues(self.out, start, manifest.counts, manifest.places[0] + 1)
        stored = checkpoint.read_more(self.out, start, checkpoint.SEGMENTS) if start else None
        earlier = [] if stored is None else provenance.decode(stored.tobytes())
        return History([], Segments(earlier, start, "", {}), clients, best)

    def __enter__(self) -> Journal:
        self._opened.enter_context(self.sinks)
        self._opened.enter_context(self.recorder)
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    @property
    def note(self) -> str:
        """On lines of an earlier start that could not be read; empty if there are none."""
        count = self.recorder.left_out
        lines = f"{count} unreadable line{'s' * (count > 1)}"
        return f"left out {lines} of metrics.jsonl, which is kept as {self.out / metrics.DAMAGED}" if count else ""

    def recorded(self, record: dict[str, Any]) -> None:
        if self.history.best:
            self.history.best.add(record, self.session.silo.s.x)
        self.recorder.add(record)

    def save(self, t: int) -> Mapping[str, Tensor]:
        history = self.history
        history.clients.write()
        if history.best:
            history.best.write()
        self.recorder.sync()
        segments = bytearray(provenance.encode(history.segments.until(t)))
        stored = {checkpoint.SEGMENTS: torch.frombuffer(segments, dtype=torch.uint8)}
        return stored | (history.best.kept() if history.best else {})

    def finish(self, status: str) -> dict[str, Any]:
        """Write the model and the summary, which is returned."""
        session, history = self.session, self.history
        self.recorder.close()
        summary = {
            "status": status,
            "method": session.algorithm.title(),
            **summarise(history.records, session.config.targets),
            **({"best_validation": history.best.record} if history.best else {}),
            "data": {**session.manifest.about_images, "digest": session.manifest.digest},
            **history.segments.summary(history.records[-1]["round"] if history.records else 0),
        }
        results.write(self.out, session.network.state_dict(session.silo.s.x.cpu()), summary)
        self.sinks.status = status
        return summary
