"""The banner of a run, and what else says where it is computed and what it costs."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import mpi
from ..data.manifest import TEST_FILE
from ..gpu import mps, sharing
from ..mpi.plan import cuda_aware
from ..rounds.costs import Costs, RankMemory
from ..rounds.device import arithmetic, device_name, precision_notes
from ..rundir import provenance
from ..rundir.silo_folder import METRICS
from ..settings import DATASETS, Config
from ..support.rng import fixed_number
from ..support.version import __version__
from . import privacy_notes, secure_rounds
from .assemble import Session
from .console import amount, plural

TUNED_ON = "cifar10"  # the data on which --preset tuned and closest were chosen


def environment(session: Session) -> dict[str, Any]:
    """What the run runs on."""
    return {
        "fedlada_mpi": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mpi": mpi.implementation(),
        "ranks": session.world.size,
        "device": device_name(session.device),
        "cpu": provenance.cpu_model(),
        "threads": torch.get_num_threads(),
        "transport": session.silo.transport.kind,
        "host": platform.node(),
        "command": sys.argv,
    }


def costs(session: Session, memory: np.ndarray) -> Costs:
    a, manifest, transport = session.algorithm, session.manifest, session.silo.transport
    rank_of = np.zeros(manifest.clients, np.int64)
    for rank, clients in enumerate(session.owners.clients_of):
        rank_of[clients] = rank
    vector_bytes = session.network.layout.numel * session.dtype.itemsize
    participants = fixed_number(manifest.clients, session.config.participation)
    down = (len(a.down) - 1) * transport.bytes_per_vector + transport.bytes_rounded
    bytes_mpi = down + session.silo.aggregation.bytes_moved(participants)
    ranks = [RankMemory(*map(int, row)) for row in memory]
    return Costs.of(session.config, a, vector_bytes, bytes_mpi, rank_of, session.start, ranks)


def augmented(config: Config, image: bool = True) -> str:
    """How training examples are changed before a step, behind what they are; nothing where they are no images."""
    if ":" in config.augment:
        return f"; augmented by {config.augment}"
    if not image:
        return ""
    cropped = {"half": "half cropped", "always": "all cropped", "never": ""}[config.crop]
    ways = ["half mirrored"] * config.flip + [f"{cropped} ({config.crop_padding} pixels around)"] * bool(cropped)
    return f"; augmented: {', '.join(ways)}" if ways and config.augment == "paper" else "; not augmented"


class Banner:
    """What a run prints of itself before its first round."""

    def __init__(self, session: Session, memory: np.ndarray, sums_changed: str = ""):
        """``memory``: a row for every rank's ``RankMemory``; ``sums_changed``: how the order of sums has changed."""
        self.session, self.config, self.sums_changed = session, session.config, sums_changed
        self.costs = costs(session, memory)
        trains = zip(map(len, session.owners.clients_of), session.owners.only_serves, strict=True)
        self.clients_per_rank = [count for count, only_serves in trains if count or not only_serves]

    def __str__(self) -> str:
        rows = [*self._what_runs(), *self._where(), *self._costs(), ("files", self.config.out)]
        rows += [("note", note) for note in self._notes()]
        width = max(len(name) for name, _ in rows)
        lines = "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
        return f"fedlada_mpi {__version__}\n{lines}"

    def _what_runs(self) -> list[tuple[str, str]]:
        session, c, m = self.session, self.config, self.session.manifest
        resumed = f", resumed after round {session.start}" if session.start else ""
        computed = f"{arithmetic(c.precision, session.device)}, {session.silo.trainer.engine.description}"
        preset = "" if ":" in c.algorithm else f", preset {c.preset}"
        name = m.dataset if m.dataset in DATASETS else Path(os.path.abspath(c.dataset)).name
        return [
            ("method", f"{c.algorithm}, {c.rounds} rounds{resumed}{preset}"),
            (
                "data",
                f"{name}: {self._examples()}, {m.clients} clients{augmented(c, m.image)}",
            ),
            *([("task", self._task())] if self.config.columns else []),
            ("model", f"{c.model}, {session.network.layout.numel:,} parameters, {computed}"),
            *([("privacy", session.epoch.description)] if session.epoch else []),
            *([("dp", privacy_notes.row(session, session.silo.budget))] if session.silo.budget else []),
        ]

    def _examples(self) -> str:
        m = self.session.manifest
        if self.session.data.in_silos:
            shape = f"{m.classes} classes" if m.image else f"inputs {self.session.network.form.seen_shape}"
            return f"{plural(m.silos, 'silo')} with their own {'images' if m.image else 'examples'}, {shape}"
        nobodys = m.rows(TEST_FILE) if TEST_FILE in m.files else 0
        own = f", {int(m.test_sizes.sum())} of their own to test on" if m.own_tests else ""
        tested = own + (f", {nobodys} to test on" if nobodys and not m.image else "")
        if m.image:
            return f"{int(m.sizes.sum())} images, {m.classes} classes{tested}"
        inputs = self.session.network.form.seen_shape.removeprefix("arrays ")
        return f"{int(m.sizes.sum())} examples{tested}, inputs {inputs}"

    def _task(self) -> str:
        task, objective = self.session.task, self.session.columns.objective
        better = "more" if objective.larger_is_better else "less"
        loss = f", loss {task.loss_name}" if task.loss_name else ""
        return f"{self.config.task}{loss}; objective: {objective.title} ({better} is better)"

    def _where(self) -> list[tuple[str, str]]:
        session, e, owned = self.session, environment(self.session), self.clients_per_rank
        threads = f", {plural(e['threads'], 'thread')} per rank" if session.device.type == "cpu" else ""
        aware = "" if cuda_aware() else "not "
        each = plural(max(owned), "client")
        if len(owned) > 1:
            each = f"{each if min(owned) == max(owned) else f'{min(owned)} to {each}'} each"
        return [
            (
                "ranks",
                f"{e['ranks']} ({session.world.node.size} on this node), {each}, of "
                f"{plural(session.manifest.silos, 'silo' if session.data.in_silos else 'silo file')}",
            ),
            ("device", f"{e['device']}{threads}{self._streamed()}"),
            ("MPI", f"{e['mpi']}, {aware}CUDA-aware; transport: {e['transport']}"),
        ]

    def _streamed(self) -> str:
        """Where examples come from that are not on the device."""
        places = {place for rank in self.session.ranks for place in rank["data"]}
        named = {"host": "the host's memory", "disk": "the files"}
        streamed = [words for place, words in named.items() if place in places]
        return f"; examples are streamed from {' and '.join(streamed)}" if streamed else ""

    def _costs(self) -> list[tuple[str, str]]:
        a, costs = self.session.algorithm, self.costs
        about = "about " if self.config.sampling == "bernoulli" else ""
        down = f"{'+'.join(a.down)} down {amount(costs.bytes_down)}"
        up = f"{'+'.join(a.up)} up {amount(costs.bytes_up)}"
        who = f"{about}{plural(costs.participants, 'participant')}"
        at_once = plural(costs.clients_at_once, "client")
        memory = ("memory", f"about {amount(costs.memory)} per rank, for up to {at_once} at once")
        return [
            ("a round", f"{who}; {down}, {up}; MPI moves {amount(costs.bytes_mpi)}"),
            *([] if self.config.secure else [memory]),  # the silos do not tell how much they have
        ]

    def _shared_gpus(self) -> str:
        """What ranks that train on one GPU could gain; empty where each has its own."""
        session = self.session
        ranks = zip(session.ranks, session.owners.clients_of, strict=True)
        gpus = [rank["gpu"] for rank, clients in ranks if len(clients)]
        # Silos are apart for a reason.
        joined = not (self.config.secure or self.config.silo_per_rank or session.data.in_silos)
        return ": ".join(filter(None, sharing.advice(gpus, mps.is_running(), joined)))

    def _notes(self) -> list[str]:
        session = self.session
        notes = [*session.network.notes, *session.algorithm.traits.notes, *secure_rounds.notes(session)]
        notes += session.data.notes
        if session.silo.budget:
            notes += privacy_notes.notes(session, session.silo.budget)
        if session.data.in_silos and session.without_outputs:
            notes.append(f"{', '.join(session.scores.whole)} only in the silos' own {METRICS}: outputs stay there")
        elif session.without_outputs:
            names, parts = ", ".join(session.scores.whole), " and ".join(session.without_outputs)
            why = "stay in the silos" if self.config.secure else "are too many to have all at once"
            notes.append(f"no {names} on {parts} examples, whose outputs {why}")
        if self.config.preset == "tuned" and session.manifest.dataset != TUNED_ON:
            notes.append(f"--preset tuned was chosen on {TUNED_ON}: whether it is better on this data is not known")
        if self.config.preset == "closest":
            notes.append(
                f"--preset closest was chosen on the test data of {TUNED_ON}, against the paper's stated decay"
            )
        notes += precision_notes(self.config.precision, session.device)
        if 0 < self.costs.clients_that_fit < self.costs.most_participants:
            fit = plural(self.costs.clients_that_fit, "client")
            notes.append(f"no more than {fit} at once in a GPU's memory; a rank's others train in turns")
        if shared := self._shared_gpus():
            notes.append(shared)
        if self.sums_changed:
            notes.append(f"resumed with {self.sums_changed}: rounded in another order, the last digits differ")
        if idle := self.clients_per_rank.count(0):
            cure = (
                "leave out --silo-per-rank"
                if self.config.silo_per_rank
                else f"{self.session.manifest.clients} would do"
            )
            notes.append(f"{plural(idle, 'rank')} without clients: {cure}")
        return notes
