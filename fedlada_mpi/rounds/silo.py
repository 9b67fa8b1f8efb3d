"""A round from the silo's side. The root takes the same steps; it has clients only if it trains too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..algorithms import Algorithm, Round, Vectors
from ..algorithms.hook_draws import server_draws
from ..mpi import World
from ..mpi.transport import Transport
from ..privacy.budget import Budget
from ..privacy.sampling import secret_sample
from ..privacy.silo_files import SiloFiles
from ..rundir import checkpoint, silo_state
from ..rundir.checkpoint_writer import CheckpointWriter
from ..rundir.columns import ALL_PHASES, PARTS
from ..rundir.metrics import Clock
from ..rundir.silo_folder import SiloFolder
from ..settings import Config
from ..support import rng
from ..support.errors import DivergedError, UserError, some
from ..support.signals import stop_requested
from .aggregate import Aggregation
from .costs import RankMemory
from .device import synchronize
from .evaluate import Evaluations
from .sizes import Sizes
from .trainer import Trainer
from .watcher import Order, Watcher

MAX_EMPTY_ROUNDS = 10  # in a row without a finite client, after which --on-nonfinite skip ends the run


class Silo:
    """A rank's part of a run.

    >>> silo.train(r, participants)     # local training, and the sums to the root
    >>> silo.exchange(r)                # the root's new vectors, on every rank
    >>> silo.report(order)              # evaluation and times, to the root
    """

    def __init__(
        self,
        world: World,
        config: Config,
        algorithm: Algorithm,
        trainer: Trainer,
        transport: Transport,
        aggregation: Aggregation,
        s: Vectors,
        evaluations: Evaluations,
        sizes: Sizes,
        owned: np.ndarray,
        digests: dict[str, str],
        files: SiloFiles | None = None,
        folder: SiloFolder | None = None,
    ):
        """``sizes``: images of every client; ``owned``: whether a rank trains it; ``files``: that nobody else reads.

        ``folder``: where what clients keep stays, if that is not in the checkpoints of all.
        """
        self.files, self.folder = files, folder
        self.world, self.config, self.algorithm = world, config, algorithm
        self.trainer, self.transport, self.aggregation = trainer, transport, aggregation
        self.s, self.evaluations, self.digests = s, evaluations, digests
        self.sizes, self.owned = sizes, owned
        self.x_previous = torch.zeros_like(s.x)  # x before the last step
        self.previous_known = False  # before the first step of a run, unless its checkpoint has it
        # The vectors that the root sends after a step. Others are its own, unless any rank may have to serve.
        self.sent = (*algorithm.down, *(algorithm.private if world.tolerant else ()))
        self.watchers: list[Watcher] = []  # the same on every rank
        self.budget: Budget | None = None  # on the root, with --dp
        self.nonfinite: list[int] = []  # participants of this rank in the last round
        self.checkpoints = CheckpointWriter(world)
        self.clock = Clock()
        self.say: Callable[[str], object] = lambda text: None  # on the root, shows text to people

    @property
    def owned_sizes(self) -> np.ndarray:
        """Images of all clients that a rank trains."""
        return self.sizes.known[self.owned]

    @property
    def clients_left(self) -> int:
        """That a rank trains."""
        return int(self.owned.sum())

    def mean_steps(self, participants: np.ndarray) -> float:
        return self.sizes.mean_steps(self.config, participants)

    def weight(self, included: np.ndarray) -> float:
        """On the root, of participants by their numbers of images."""
        return self.sizes.weight(included)

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of what ``report`` gathers, but for the phase times."""
        evaluated = chain.from_iterable(map(self.evaluations.names, PARTS))
        return (
            *("loss", *evaluated, "stop", "wait", "nonfinite", "writing"),
            *chain.from_iterable(watcher.names for watcher in self.watchers),
        )

    @property
    def memory(self) -> RankMemory:
        """What this rank needs of its device."""
        vectors = [*vars(self.s).values(), self.x_previous]
        if "val" in self.evaluations.examples:
            vectors.append(self.s.x)  # the best model so far
        memory, others = self.trainer.memory, (self.aggregation, self.evaluations, *self.watchers)
        resident = memory.resident + sum(each.nbytes for each in (*vectors, *others))
        if (
            self.s.x.device.type == "cpu"
            and self.world.rank == 0
            and 0 < self.config.checkpoint_every < self.config.rounds
        ):
            resident += self.bytes_copied
        return RankMemory(memory.per_client, resident, memory.clients_that_fit, self.aggregation.bytes_per_client)

    @property
    def bytes_copied(self) -> int:
        """What a checkpoint that is written by a thread takes of the host's memory, on the root's machine."""
        c, x = self.config, self.s.x
        vectors = len(vars(self.s)) + ("val" in self.evaluations.examples) + bool(c.diagnose)
        if x.is_cuda:
            here = self.world.node.size / self.world.size
            vectors += round(here * c.clients * len(self.algorithm.client_state))
        return vectors * x.nbytes

    def sample(self, t: int) -> np.ndarray | None:
        """The participants of round ``t``, of the clients that a rank trains; None where every rank draws its own."""
        config = self.config
        if config.dp != "none":
            return None
        drawn = rng.participants(config.clients, config.participation, config.sampling, config.seed, t)
        return drawn[self.owned[drawn]]

    def train(self, r: Round, called: np.ndarray | None) -> list[int]:
        """Local training, and the sums to the root; returns the participants of all ranks that are left out.

        ``called``: the participants of all ranks. None: a rank draws its own, and nobody learns of them.
        """
        participants = called
        if participants is None:
            participants = secret_sample(self.trainer.data.client_ids, self.config.participation)
        # Ends with the slowest rank; timed as waiting, not as communication.
        self.nonfinite = self.world.collectively(lambda: self._train(r, called, participants))
        if self.nonfinite and self.files is not None:
            self.files.log(f"round {r.t + 1}: not finite, left out: clients {', '.join(map(str, self.nonfinite))}")
        if called is None:  # who is left out is as secret
            self.nonfinite = []
        # Where they are not skipped, the root learns of them by the numbers of ``report``.
        skips = self.config.on_nonfinite == "skip" and not self.aggregation.conceals
        left_out = self._all_nonfinite() if skips else []
        if self.config.weighting == "size" and not self.aggregation.conceals:
            self.sizes.add_up(self.world, np.setdiff1d(participants, left_out))
        with self.clock("reduce"):
            self.aggregation.reduce(participants, self.algorithm.communicates(r.t))
        return left_out

    def _train(self, r: Round, called: np.ndarray | None, participants: np.ndarray) -> list[int]:
        with self.clock("train"):
            self.aggregation.prepare(r, np.empty(0, np.int64) if called is None else called)
            nonfinite = self.trainer.round(self.s, r, participants, self.aggregation)
            synchronize(self.trainer.device)
        return nonfinite

    def _all_nonfinite(self) -> list[int]:
        """The clients of all ranks whose result in this round was not finite."""
        if self.world.all_ranks(not self.nonfinite):
            return []
        return sorted(client for clients in self.world.allgather_json(self.nonfinite) for client in clients)

    def exchange(self, r: Round) -> None:
        """From the root the server's new vectors; on every rank those that are derived from them."""
        self.world.barrier()
        with self.clock("bcast"):
            if self.world.rank != 0:
                self.x_previous.copy_(self.s.x)
            self.previous_known = True
            if not self.algorithm.communicates(r.t):
                return
            if self.transport.rounds:
                self.transport.bcast_change(self.s.x, self.x_previous)
                self.share(tuple(name for name in self.sent if name != "x"))
            else:
                self.share(self.sent)
            if r.participants:
                with server_draws(self.algorithm, "derive", r.t, self.trainer.buffers.real):
                    self.algorithm.derive(self.s, self.x_previous, r)
            synchronize(self.trainer.device)

    def share(self, names: tuple[str, ...]) -> None:
        """Vectors of the server, from the root to every rank."""
        self.broadcast([getattr(self.s, name) for name in names])

    def broadcast(self, vectors: list[Tensor]) -> None:
        """From the root; the transport may be planned for the integers of exact sums, which have the same size."""
        if vectors:
            self.transport.bcast([vector.view(self.transport.dtype) for vector in vectors])

    def report(self, order: Order) -> np.ndarray:
        """Evaluate what the order asks for; every rank's numbers and phase times, on the root."""
        watched = list(chain.from_iterable(watcher.numbers() for watcher in self.watchers))
        with self.clock("eval"):
            sums = self.evaluations(order["evaluate"])
        wait, self.world.seconds_waiting = self.world.seconds_waiting, 0.0
        left_out = self.aggregation.totals.left_out if self.aggregation.conceals else len(self.nonfinite)
        numbers = [self.aggregation.loss, *chain(*sums), float(stop_requested()), wait, float(left_out)]
        numbers.append(float(self.checkpoints.is_writing))
        row = [*numbers, *watched, *self.clock.take()]
        ranks = self._of_root(row) if self.aggregation.conceals else self.world.gather(row)
        # Now that all ranks have evaluated.
        ranks[:, len(self.numbers) + ALL_PHASES.index("total")] = self.clock.lap()
        for watcher in self.watchers:
            watcher.after(order)
        return ranks

    def _of_root(self, row: list[float]) -> np.ndarray:
        """The root's row, which has the sums of all; of another rank it learns only whether that is to stop."""
        stop = self.numbers.index("stop")
        stops = self.world.gather([row[stop]])
        row[stop] = float(stops.sum())
        if self.files is not None:
            names = (*self.numbers, *ALL_PHASES)
            shown = {name: round(row[names.index(name)], 4) for name in ("wait", *ALL_PHASES) if name != "total"}
            self.files.log("seconds of a round: " + ", ".join(f"{name} {value:g}" for name, value in shown.items()))
        return np.array([row] if self.world.rank == 0 else np.empty((0, len(row))))

    def save(self, t: int, more: Mapping[str, Tensor] | None = None, wait: bool = True) -> None:
        """A checkpoint after round ``t``; ``more`` is what the root adds. Without ``wait``, a thread writes it."""
        self.checkpoints.settle()  # where it fails, this one takes its place
        kept, server = self.trainer.client_state, {**vars(self.s), **(more or {})} if self.world.rank == 0 else {}
        if not wait:
            server = self.checkpoints.copies(server)
        state = kept.vectors if wait else kept.frozen()
        elsewhere = self.folder.save if self.folder else self._save_own if self.aggregation.conceals else None
        about = (self.config, server, state, self.digests, self.aggregation.order, elsewhere)
        draft = checkpoint.Draft(Path(self.config.out), t, self.world.rank, *about)
        if wait:
            checkpoint.save(self.world, draft)
        else:
            self.checkpoints.begin(draft, shared=self.world.size > 1 and bool(state))

    def _save_own(self, t: int, state: checkpoint.State) -> None:
        if self.files is not None and state:
            silo_state.save(self.files.folder, t, state)

    def diverged(self, number: int, by_server: bool = False) -> DivergedError:
        """The end of a run that left the finite numbers in round ``number``; all ranks get the root's message."""
        self.checkpoints.settle()
        clients = [] if self.aggregation.conceals else list(map(str, self._all_nonfinite()))
        message = ""
        if self.world.rank == 0:
            which = _named(clients, self.aggregation.totals.left_out)
            message = f"round {number}: " + _explain("" if by_server else which, self.config.on_nonfinite)
            saved = checkpoint.complete(Path(self.config.out))
            message += f"; the last checkpoint is {saved[-1]}" if saved else "; there is no checkpoint yet"
        return DivergedError(self.world.broadcast_json({"message": message})["message"])

    def serve(self) -> str:
        """The whole run on ranks other than the root: follow the server's orders; returns how it ended."""
        while True:
            order = self.world.broadcast_json()
            for watcher in self.watchers:
                watcher.ordered(order)
            match order["do"]:
                case "round":
                    self._round(order)
                case "void":
                    pass  # the model stays as it is
                case "checkpoint":
                    self.save(order["t"], wait=order["wait"])
                case "settle":
                    self.checkpoints.settle()
                case "diverged":
                    raise self.diverged(order["t"])
                case "fail":
                    raise UserError(order["message"])
                case "end":
                    return str(order["status"])

    def _round(self, order: Order) -> None:
        r = Round(**order["round"])
        called = order["participants"]
        left_out = self.train(r, None if called is None else np.asarray(called, np.int64))
        if left_out or (self.aggregation.conceals and called is not None):
            r = Round(**self.world.broadcast_json())
        self.exchange(r)
        self.report(order)


def _named(clients: list[str], concealed: int) -> str:
    """Those whose result is not finite; of the concealed ones, the number is known."""
    if concealed:
        return f"{concealed} client{'s' * (concealed > 1)}, whom the logs of their silos name,"
    return f"client{'s' * (len(clients) > 1)} {some(clients, most=10)}" if clients else ""


def _explain(which: str, on_nonfinite: str) -> str:
    """What was not finite, and what to do."""
    if not which:
        return "the server's step gave parameters that are not finite: lower --server-lr or --lr"
    fault = f"the result of {which} is not finite"
    if on_nonfinite == "skip":
        return f"{fault}, and no client's was for {MAX_EMPTY_ROUNDS} rounds: lower --lr, or set --clip"
    return f"{fault}: lower --lr, set --clip, or leave such clients out with --on-nonfinite skip"
