"""A run that is put together to be estimated.

One process can stand for many ranks (``--estimate 11``): it trains the clients of the rank with most of them.
"""

from __future__ import annotations

import os
import tempfile
import time
import zlib
from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import astuple, replace
from pathlib import Path
from statistics import median
from typing import Any

import h5py
import numpy as np
import torch

from ...data.datasets import ensure
from ...data.manifest import Manifest
from ...data.owners import Ownership, shared_out
from ...mpi import RankLost, World, several_ranks
from ...rounds.costs import Costs, RankMemory, bytes_of, most_participants
from ...rounds.device import uses_gpu
from ...rounds.evaluate import OWN, Evaluations, batch_size, parts_due
from ...rounds.examples import Resident
from ...rounds.trainer import CapturedSteps
from ...rundir.columns import PARTS
from ...settings import Config
from ...support.disk import writing
from ...support.errors import UserError
from ...support.processes import peak_memory, since_start
from ..assemble import Session
from ..plan import Plan, Request, one_at_a_time
from ..process_state import torch_state_restored
from .extrapolation import Due, Measured, extrapolate
from .forecast import PlannedRounds
from .probe import Probe, measure
from .result import Estimate

CHANGED: dict[str, Any] = {"profile": "none", "diagnose": 0, "eval_clients": 0}  # what only some rounds do
WRITTEN = 64 * 2**20  # bytes that are written to time a checkpoint


def estimate(request: Request, ranks: int = 0) -> Estimate | None:
    """Of the run that is asked for on the ranks that there are, or by one process for ``ranks``; None but on the root.

    Collective.
    """
    alone = one_at_a_time("a world of several ranks") if several_ranks() else nullcontext()
    with alone, World() as world, ExitStack() as around:
        plan = Plan(**world.broadcast_json(world.on_root(lambda: _plan(request, world, ranks).message)))
        config, directory, ranks = plan.config(request), Path(plan.directory), ranks or world.size
        world.limit_waiting(config.patience, "--patience sets the limit", lambda: None)
        before = time.perf_counter()
        silos = ranks - int(ranks > 1 and not config.server_trains)
        world.on_root(lambda: ensure(config, directory, silos, _say))
        preparing = time.perf_counter() - before  # which the run need not do again
        if world.size == 1 and uses_gpu(config):
            around.enter_context(one_at_a_time("a GPU"))
        around.enter_context(torch_state_restored())
        try:
            return Estimation(world, config, directory, ranks).run(preparing)
        except RankLost:
            if not world.tolerant:
                raise
            raise UserError("--estimate has lost a rank: start it again") from None


def _plan(request: Request, world: World, ranks: int) -> Plan:
    """On the root: the settings, and nothing that is held or written."""
    if ranks and world.size > 1:
        raise UserError(f"--estimate {ranks}: this run has {world.size} ranks already: give no number, or start one")
    if request.resume:
        raise UserError("--estimate is of a whole run: leave --resume out")
    if request.silo_dir:
        raise UserError("--estimate needs the data of all silos, and --silo-dir keeps it to each: leave one out")
    resolved, directory = request.resolve()
    config = resolved.config
    for name, given in {"--secure": config.secure, "--dp": config.dp != "none"}.items():
        if given:
            raise UserError(f"--estimate takes no part in what {name} keeps secret: estimate the run without {name}")
    if not config.rounds:
        raise UserError("--estimate: got --rounds 0, expected at least one round to estimate")
    return Plan(vars(config), str(directory), 0)


def _say(text: str) -> None:
    print(text, flush=True)


class Estimation:
    """On every rank.

    >>> Estimation(world, config, directory, ranks=world.size).run().total.expected
    """

    session: Session
    rank_of: np.ndarray  # of every client, in the run
    rank_here: np.ndarray  # among those that there are now; -1: none of them

    def __init__(self, world: World, config: Config, directory: Path, ranks: int):
        self.world, self.asked, self.directory, self.ranks = world, config, directory, ranks
        self.config = replace(config, **CHANGED)

    def run(self, preparing: float = 0.0) -> Estimate | None:
        """``preparing``: seconds of this process so far that are no part of a run's start."""
        world = self.world
        self.session = session = Session(world, self.config, self.directory, 0, self._owners, _say)
        silo = session.silo
        world.on_root(session.begin)
        world.barrier()
        silo.share((*silo.sent, *silo.algorithm.derived))
        probe = Probe(session)
        start = float(world.gather([since_start()]).max(initial=0.0)) - preparing
        memory = world.gather(astuple(silo.memory))
        limit = self.config.max_clients_at_once or _fewest(memory[:, 2])
        batches = self._batches()
        measured = None
        if world.rank == 0:
            about = (session.config, session.manifest.sizes)
            here, planned = (PlannedRounds(*about, rank_of, limit) for rank_of in (self.rank_here, self.rank_of))
            with probe.serving():
                measured = measure(probe, here, self._evaluated(), batches)
        else:
            silo.serve()
        peaks, checkpoint = world.gather(self._peaks()), self._checkpoint()
        if measured is None:
            return None
        measured.start, measured.checkpoint = start, checkpoint
        return self._estimate(measured, planned, memory, peaks.max(0))

    def _owners(self, manifest: Manifest) -> Ownership:
        servers = int(self.ranks > 1 and not self.config.server_trains)
        owners = shared_out(manifest, self.ranks, servers, self.config.silo_per_rank)
        self.rank_of = np.full(manifest.clients, -1)
        for rank, clients in enumerate(owners.clients_of):
            self.rank_of[clients] = rank
        self.rank_here = self.rank_of
        if self.ranks == self.world.size:
            return owners
        busiest = int(most_participants(self.config, self.rank_of, 0).argmax())
        self.rank_here = np.where(self.rank_of == busiest, 0, -1)
        return Ownership([owners.clients_of[busiest]], [False])

    @property
    def _server_bytes(self) -> int:
        return sum(vector.nbytes for vector in vars(self.session.silo.s).values())

    @property
    def _state_bytes(self) -> int:
        """What a client keeps once it has trained."""
        buffers = self.session.silo.trainer.buffers
        return len(buffers.algorithm.client_state) * buffers.live * buffers.dtype.itemsize

    @property
    def _kept_bytes(self) -> int:
        """What this rank's clients keep once all have trained."""
        return len(self.session.silo.trainer.data.client_ids) * self._state_bytes

    def _checkpoint(self) -> float:
        """Seconds of the slowest rank to write what it writes of one; files without a name, which nobody sees."""
        own = self._server_bytes if self.world.rank == 0 else 0
        folder = Path(self.config.out).absolute()
        folder = next(parent for parent in (folder, *folder.parents) if parent.is_dir())

        def write() -> float:
            with writing(folder, "or choose another --out"):
                return sum(_written(folder, size) for size in (own, self._kept_bytes) if size)

        return float(self.world.gather([self.world.collectively(write)]).max(initial=0.0))

    def _batches(self) -> np.ndarray:
        """Seconds that every rank takes to evaluate each of ``PARTS``, from one batch, a row each; on the root.

        On a GPU they count as none: it evaluates all in less time than it would take to find out.
        """
        evaluations = self.session.silo.evaluations
        if self.session.device.type == "cuda":
            return self.world.gather([0.0] * len(PARTS))
        of = {part: [part, *([OWN] if part == "test" else [])] for part in PARTS}
        row = [
            sum(_of_batch(evaluations, name) for name in names if name in evaluations.examples) for names in of.values()
        ]
        return self.world.gather(row)

    def _evaluated(self) -> Counter[Due]:
        """How often which parts are evaluated together."""
        validates = "val" in self.session.silo.evaluations.examples
        due = (tuple(parts_due(self.asked, number, validates)) for number in range(1, self.asked.rounds + 1))
        return Counter(parts for parts in due if parts)

    def _peaks(self) -> list[float]:
        """Of this rank's memory on the host and on the GPU, with what clients will keep that have not trained yet."""
        silo = self.session.silo
        kept = sum(v.nbytes for vectors in silo.trainer.client_state.vectors.values() for v in vectors.values())
        missing = self._kept_bytes - kept
        if silo.trainer.device.type == "cpu":
            return [peak_memory() + missing, 0]
        return [peak_memory(), torch.cuda.max_memory_reserved(silo.trainer.device) + missing]

    def _estimate(self, measured: Measured, planned: PlannedRounds, memory: np.ndarray, peaks: np.ndarray) -> Estimate:
        session, config, silo = self.session, self.asked, self.session.silo
        silo.transport.ranks = self.ranks
        works, counted = planned.works(), self._evaluated()
        captures = planned.captures() - 1 if isinstance(silo.trainer.steps, CapturedSteps) else 0
        every = config.checkpoint_every
        saves = 1 + ((config.rounds - 1) // every if every else 0)
        round_, total = extrapolate(measured, works, config.rounds, counted, captures, saves)
        down, up, moved = self._bytes(planned)
        needed = [RankMemory(*map(int, row)) for row in memory] * (self.ranks // self.world.size)
        predicted = Costs.of(session.config, session.algorithm, 0, 0, self.rank_of, 0, needed)
        return Estimate(
            about=f"{config.algorithm}, {config.rounds} rounds; {config.model}, "
            f"{session.network.layout.numel:,} parameters",
            ranks=self.ranks,
            rounds=config.rounds,
            start=measured.start,
            round=round_,
            phases=measured.phases,
            first=measured.first + captures * measured.capture + measured.first_evaluations,
            evaluations={"+".join(due): (n, median(measured.evaluations[due])) for due, n in counted.items()},
            checkpoints=saves,
            checkpoint=measured.checkpoint,
            checkpoint_bytes=self._checkpoint_bytes(),
            total=total,
            bytes_down=down,
            bytes_up=up,
            bytes_mpi=moved,
            host_memory=int(peaks[0]),
            gpu_memory=int(peaks[1]),
            predicted_memory=predicted.memory,
            notes=self._notes(),
        )

    def _bytes(self, planned: PlannedRounds) -> tuple[int, int, int]:
        """Of all rounds: down, up, and moved by MPI."""
        silo, algorithm = self.session.silo, self.session.algorithm
        vector = self.session.network.layout.numel * self.session.dtype.itemsize
        sent = (len(silo.sent) - 1) * silo.transport.bytes_per_vector + silo.transport.bytes_rounded
        total = np.zeros(3, np.int64)
        for t in (t for t in range(planned.count) if algorithm.communicates(t)):
            number = len(planned.participants(t))
            moved = sent + silo.aggregation.bytes_moved(number)
            total += np.array([*bytes_of(algorithm, vector, number, number), moved])
        down, up, moved = (int(value) * self.asked.rounds // planned.count for value in total)
        return down, up, moved

    def _checkpoint_bytes(self) -> int:
        """Of all files of a checkpoint, once all clients have trained."""
        return self._server_bytes + self.asked.clients * self._state_bytes

    def _notes(self) -> list[str]:
        notes = []
        if self.ranks > self.world.size:
            notes.append(
                f"measured by one process for the busiest of {self.ranks} ranks, each on a machine, or a part of one, "
                "like this: without the time of messages between them, which srun or mpirun with --estimate measures"
            )
        left_out = [name for name in CHANGED if getattr(self.asked, name) != CHANGED[name]]
        if left_out:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in left_out)
            notes.append(f"without what {names} adds")
        return notes


def _fewest(fit: np.ndarray) -> int:
    """Of the clients that fit on a rank; 0: no limit known."""
    return int(min((value for value in fit if value), default=0))


def _written(folder: Path, size: int) -> float:
    """Seconds to write so many bytes as a checkpoint does, and to read them for their checksum."""
    part = min(size, WRITTEN)
    start = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        with h5py.File(file, "w") as content:
            content.create_dataset("x", data=np.zeros(part, np.uint8))
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        while block := file.read(1 << 20):
            zlib.crc32(block)
    return (time.perf_counter() - start) * size / part


def _of_batch(evaluations: Evaluations, name: str) -> float:
    """Seconds to evaluate all that this rank has of a part, by one batch of it."""
    examples = evaluations.examples[name]
    size = batch_size(evaluations.scores, evaluations.x.device)
    few = Resident(*examples.take(slice(0, min(size, len(examples)))))
    evaluation = evaluations.evaluator.of(evaluations.x, few)
    evaluation()
    start = time.perf_counter()
    evaluation()
    return (time.perf_counter() - start) * len(examples) / len(few)
