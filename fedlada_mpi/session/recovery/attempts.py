"""A run on the ranks that there are; where one is lost, the others try again from what they have kept.

ranks       attempt 1           agree    regroup                       attempt 2
0, 1, 2     train -> 2 is lost    no     0 and 1 shrink, and agree     train from that round on
                                         on a round that both have
"""

from __future__ import annotations

import gc
from contextlib import ExitStack
from pathlib import Path

from ...mpi import RankLost, World
from ...rounds.device import uses_gpu
from ...rundir import checkpoint, claim, lock
from ...settings import Config
from ...support.errors import DivergedError, OtherRankError, UserError
from ...support.processes import ProcessId
from .. import plan
from ..assemble import Session
from ..plan import Plan, Request, one_at_a_time
from ..process_state import torch_state_restored
from ..run_data import SiloData
from ..training import Training
from .departures import Departure, SurvivableTraining
from .snapshot import Snapshot

# How an attempt has ended on a rank; the ranks agree on the bits that all of them have.
ENDED, RANK_LOST, DEFECT = 0b11, 0b10, 0b00


class Attempts:
    """
    >>> attempts = Attempts(request, world, at_end, around)
    >>> attempts.run()
    >>> attempts.status
    'finished'
    """

    def __init__(self, request: Request, world: World, at_end: ExitStack, around: ExitStack):
        """``at_end`` is closed when the run has ended, ``around`` after each attempt."""
        self.request, self.world, self.at_end, self.around = request, world, at_end, around
        self.plan: Plan | None = None  # the root's
        self.silos: SiloData | None = None  # where each has a directory of its own
        self.own_plan: Plan | None = None  # made on this rank
        self.locked = False  # whether this rank has taken the output directory
        self.training: Training | None = None
        self.snapshot: Snapshot | None = None
        self.start = 0  # the round that the run goes on after
        self.departures: list[Departure] = []  # since then
        self.known = list(world.original_ranks)  # ranks whose departure would be a new one
        self.status = ""

    @property
    def config(self) -> Config:
        assert self.plan is not None
        return self.plan.config(self.request)

    @property
    def session(self) -> Session | None:
        return self.training.session if self.training else None

    def run(self) -> None:
        """To the end, on all ranks alike; raises what ended the run, if it was an error."""
        again = False
        while True:
            error: BaseException | None = None
            flags = ENDED
            try:
                if again:
                    self._regroup()
                self._train()
            except RankLost:
                if not self.world.tolerant:
                    raise
                flags = RANK_LOST
            except (UserError, DivergedError) as raised:
                error = raised
            except SystemExit as raised:
                # Python would end this rank alone and leave the others waiting; as an error it ends all of them.
                error, flags = RuntimeError(f"sys.exit({raised.code!r}) was called during the run"), DEFECT
                error.__cause__ = raised
                if not self.world.tolerant:
                    raise error from raised
            except BaseException as raised:  # an interrupt, too: the others must not wait for this rank
                if not self.world.tolerant:
                    raise
                if _is_out_of_memory(raised):
                    self.world.die(raised)
                error, flags = raised, DEFECT
            agreed = self.world.agree(flags, ENDED)
            again = agreed == RANK_LOST
            if again:
                continue
            self.world.fails_together = error is not None or agreed == DEFECT
            if error is not None:
                raise error
            if agreed == DEFECT:
                raise OtherRankError
            return

    def _train(self) -> None:
        world, request = self.world, self.request
        if self.plan is None:
            made = world.on_root(self._make_plan)
            message = world.broadcast_json(made.message if made else {})
            if not message:  # the settings depend on what the silos have
                self.silos = SiloData(world, request.silo_dir, request.named_silos())
                made = world.on_root(self._make_plan)
                message = world.broadcast_json(made.message if made else None)
            self.plan = Plan(**message)
            self.start = self.plan.start
        config = self.config
        world.collectively(lambda: request.check_plan(config) if world.rank else None)
        if self.start == claim.FINISHED:
            self.status = "finished"
            return
        hint = f"--resume goes on from the last checkpoint in {config.out}; --patience sets the limit"
        world.limit_waiting(config.patience, hint, self.at_end.close)
        # Torch crashes where two of its profilers run at once.
        exclusive = "a GPU" if uses_gpu(config) else "--profile" if config.profile != "none" else ""
        if exclusive and world.original_size == 1:  # one of several ranks is alone in its process from the start
            self.around.enter_context(one_at_a_time(exclusive))
        self.around.enter_context(torch_state_restored())
        about = (world, config, Path(self.plan.directory), self.start, request.on_round, request.quiet, self.silos)
        if world.tolerant:
            self.training = SurvivableTraining(*about, snapshot=self.snapshot, departures=self.departures)
        else:
            self.training = Training(*about)
        self.status = self.training.run()

    def _make_plan(self) -> Plan | None:
        """None where the silos have to meet before."""
        if self.request.silo_dir and self.silos is None:
            return None
        if self.own_plan is None:
            self.own_plan, self.locked = plan.make(self.request, self.at_end, self._gone(), self.silos), True
        return self.own_plan

    def _regroup(self) -> None:
        """Agree with the ranks that are left on where to go on."""
        world = self.world
        self.around.close()
        world.shrink()
        if isinstance(self.training, SurvivableTraining):
            self.snapshot = self.training.snapshot or self.snapshot
        self.training = None
        gc.collect()  # of the training, what is on the GPU
        latest = -1 if self.snapshot is None else self.snapshot.latest
        planned, t = world.allreduce_min([self.plan is not None, latest])
        if not planned or self.snapshot is None or t < 0:
            self.snapshot, t = None, self.start
        else:
            self.snapshot.back_to(t)
        lost = [rank for rank in self.known if rank not in world.original_ranks]
        departures = [Departure(rank, world.members[rank].host, t) for rank in lost]
        self.known = list(world.original_ranks)
        if not planned:  # nothing of the run is there yet
            self.plan = self.silos = None
            self.departures += departures
            return
        self.departures = departures if t > self.start else self.departures + departures
        self.start = t
        world.on_root(self._take_over)
        if self.config.adopt and self.snapshot and self.snapshot.state:
            # What clients of lost ranks kept is in the checkpoints alone.
            self.start = world.broadcast_json(world.on_root(self._last_checkpoint))["start"]
            self.snapshot = None

    def _gone(self) -> set[ProcessId]:
        """The processes of lost ranks."""
        world = self.world
        return {member for rank, member in enumerate(world.members) if rank not in world.original_ranks}

    def _take_over(self) -> None:
        """Hold the output directory, if another rank did."""
        out = Path(self.config.out)
        if not self.locked:
            self.at_end.enter_context(lock.hold(out, gone=self._gone()))
            self.locked = True
        elif not lock.is_mine(out):
            raise UserError(f"the other ranks have lost this one, and go on in {out} without it")

    def _last_checkpoint(self) -> dict[str, int]:
        return {"start": checkpoint.latest(Path(self.config.out), self.config)}


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether this rank's machine has no memory left: the others may go on."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error))
