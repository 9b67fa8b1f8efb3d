"""What the root keeps of a run: its history, the files and services that it is written to, and the results."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..rounds.watcher import Watcher
from ..rundir import checkpoint, client_values, lock, metrics, provenance, results
from ..rundir.best import Best
from ..rundir.client_values import ClientValues
from ..rundir.files import CHECKPOINTS, write_atomically
from ..rundir.history import History
from ..rundir.metrics import Recorder, summarise
from ..rundir.provenance import Segments
from ..rundir.sinks import Sinks
from ..settings import CODE, COLUMNS, dumps
from ..support import disk
from ..support.errors import DivergedError
from ..support.inputs import read_bytes
from .assemble import Session
from .banner import environment

CONFIG = "config.json"
ATTEMPTS = 3  # to write the results into a directory that others change


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
        self._write_config()
        known = history.records if history else self._records()
        if history is None:
            history = self._read()  # before anything is written, as it may refuse damaged files
        else:
            history.mark_changed()
        self.recorder = Recorder(self.out, session.start, self.sinks, known, session.columns)
        here = {**environment(session), **provenance.commit(), "nodes": provenance.nodes(session.ranks)}
        here |= {CODE: config.code} if config.code else {}
        earlier = history.segments.until(session.start)
        history.segments = Segments(earlier, session.start, session.started, {**here, **(about or {})})
        history.records = self.recorder.records
        self.history = history
        self.saved = False  # whether there has been a checkpoint
        self._opened = ExitStack()

    def _read(self) -> History:
        """As it was at the round that the run goes on from."""
        session, start = self.session, self.session.start
        about = (session.silo.s.x, session.network.saved, session.columns)
        best = Best(self.out, start, *about) if session.manifest.validation else None
        clients = ClientValues(self.out, start, session.clients)
        stored = checkpoint.read_more(self.out, start, checkpoint.SEGMENTS) if start else None
        earlier = [] if stored is None else provenance.decode(stored.tobytes())
        return History([], Segments(earlier, start, "", {}), clients, best)

    def _records(self) -> list[dict[str, Any]] | None:
        """Those that the checkpoint has; None if it is of an older version, or there is none."""
        start = self.session.start
        stored = checkpoint.read_more(self.out, start, checkpoint.RECORDS) if start else None
        return None if stored is None else metrics.unpacked(stored.tobytes())

    def _write_config(self) -> None:
        write_atomically(self.out / CONFIG, dumps(self.session.config))

    def __enter__(self) -> Journal:
        results.unmark_diverged(self.out)
        self._opened.enter_context(self.sinks)
        self._opened.enter_context(self.recorder)
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)
        if isinstance(error[1], DivergedError):
            with suppress(disk.WriteError):  # the run ends by the divergence
                results.mark_diverged(self.out, self.history.records[-1]["round"] if self.history.records else 0)

    @property
    def note(self) -> str:
        """On what an earlier start had recorded, where the file does not have it; empty if it has."""
        return self.recorder.note

    def recorded(self, record: dict[str, Any]) -> None:
        if self.history.best:
            self.history.best.add(record, self.session.silo.s.x)
        self.recorder.add(record)

    def save(self, t: int) -> Mapping[str, Tensor]:
        self.put_back()
        self.saved, history = True, self.history
        history.clients.write()
        if history.best:
            history.best.write()
        self.recorder.sync()
        segments = bytearray(provenance.encode(history.segments.until(t)))
        records = bytearray(self.recorder.packed())
        stored = {
            name: torch.frombuffer(content, dtype=torch.uint8)
            for name, content in ((checkpoint.SEGMENTS, segments), (checkpoint.RECORDS, records))
        }
        return stored | (history.best.kept() if history.best else {})

    def finish(self, status: str) -> dict[str, Any]:
        """Write the model and the summary, which is returned."""
        session, history = self.session, self.history
        summary = {
            "status": status,
            "method": session.algorithm.title(),
            **summarise(history.records, session.config.targets, session.columns),
            **({"best_validation": history.best.record} if history.best else {}),
            **({"privacy": session.silo.budget.summary()} if session.silo.budget else {}),
            **({COLUMNS: session.columns.record()} if session.columns.record() else {}),
            "data": {**session.manifest.described, "digest": session.manifest.digest},
            **history.segments.summary(history.records[-1]["round"] if history.records else 0),
        }
        model = session.network.saved(session.silo.s.x.cpu())
        self._write_results(model, summary)
        if self.saved and not checkpoint.complete(self.out):
            raise disk.WriteError(
                f"{self.out / CHECKPOINTS} was removed during the run: the results are there, but --resume cannot go on"
            )
        self.sinks.status = status
        return summary

    def _write_results(self, model: Mapping[str, Tensor], summary: Mapping[str, Any]) -> None:
        """Until all files of the run are there at the same time."""
        for _ in range(ATTEMPTS):
            try:
                self.put_back()
                self.recorder.sync()
                results.write(self.out, model, summary)
            except disk.WriteError:
                if self.out.is_dir():
                    raise
            if not self._missing() and all((self.out / name).is_file() for name in (results.MODEL, results.SUMMARY)):
                return
        raise disk.WriteError(f"{self.out} was changed while the run wrote to it: leave it in place, then add --resume")

    def _missing(self) -> list[str]:
        """The files that are not there, or not as the run has written them."""
        history, out = self.history, self.out
        missing = {
            CONFIG: not _has(out / CONFIG, dumps(self.session.config)),
            metrics.METRICS: self.recorder.is_missing(),
            results.BEST: history.best is not None and history.best.is_missing(),
            client_values.CLIENTS: history.clients.is_missing(),
            "tensorboard": self.sinks.is_missing(),
        }
        return [name for name, is_missing in missing.items() if is_missing]

    def put_back(self) -> None:
        """Write again what was removed or replaced during the run; the root has all of it but for checkpoints."""
        missing, history = self._missing(), self.history
        with disk.writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        try:
            lock.keep(self.out)
        except lock.Busy as busy:  # of which the root tells the other ranks, as of a full disk
            raise disk.WriteError(str(busy)) from None
        if not missing:
            return
        print(f"note: {', '.join(missing)} of {self.out} changed or missing during the run: written again", flush=True)
        self._write_config()
        self.recorder.put_back()
        for file in (history.clients, history.best):
            if file is not None and file.is_missing():
                file.changed = True
                file.write()
        if "tensorboard" in missing:
            self.sinks.put_back(
                {record["round"]: metrics.plotted(record, self.session.columns) for record in history.records}
            )


def _has(path: Path, content: str) -> bool:
    try:
        return read_bytes(path) == content.encode()
    except OSError:
        return False
