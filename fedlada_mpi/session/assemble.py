"""A run put together on this rank: device, data, model, method, transport; then server or silo."""

from __future__ import annotations

import platform
import sys
from contextlib import closing
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .. import __version__, algorithms, models, mpi
from ..algorithms import Vectors
from ..data.datasets import ensure
from ..data.manifest import TEST_FILE, VALIDATION_FILE, Manifest, read_manifest
from ..data.owners import owners_left
from ..data.shards import check_files, files_of, read_clients, read_test
from ..gpu.graphs import capture_on
from ..models.initial import load_initial
from ..models.trial import tensors
from ..mpi.plan import cuda_aware, plan_transport
from ..rounds.aggregate import wire_type
from ..rounds.batches import LocalData, Normaliser
from ..rounds.costs import Costs, RankMemory
from ..rounds.device import (
    arithmetic,
    asked_threads,
    choose_device,
    device_name,
    limit_threads,
    precision_notes,
    set_precision,
)
from ..rounds.diagnose import Objective
from ..rounds.evaluate import BATCH, Evaluator
from ..rounds.gradients import create_engine
from ..rounds.server import OnRound, Server
from ..rounds.silo import Silo, named_rows
from ..rounds.trainer import Trainer
from ..rundir import checkpoint, claim, metrics, provenance, results
from ..rundir.best import Best
from ..rundir.client_values import ClientValues
from ..rundir.files import write_atomically
from ..rundir.metrics import Recorder, summarise
from ..rundir.sinks import Sinks, check_installed
from ..settings import Config, dumps
from ..support.disk import WriteError
from ..support.errors import CallbackError, UserError
from ..support.rng import fixed_number
from ..support.signals import stop_requested
from .console import Overview, Progress, closing_lines, plural
from .held import Held, Left, Past


class Kept(NamedTuple):
    """What the root keeps of a run."""

    recorder: Recorder
    segments: provenance.Segments
    clients: ClientValues
    best: Best | None
    previous_known: bool  # whether ``silo.before`` is the x before the last step
    sinks: Sinks


class Session:
    def __init__(
        self,
        world: mpi.World,
        config: Config,
        directory: Path,
        start: int,
        on_round: OnRound | None = None,
        quiet: bool = False,
        held: Held | None = None,
        left: list[Left] | None = None,
    ):
        """To go on after round ``start`` (0: a new run); from what is ``held`` where ranks have ``left``."""
        self.world, self.config, self.start = world, config, start
        self.on_round, self.quiet = on_round, quiet
        self.held, self.left = held, left or []
        self.started = provenance.now()
        # The root only serves, unless it is alone or asked to train.
        world.on_root(lambda: check_installed(config))
        first = 0 if world.original_size == 1 or config.server_trains else 1
        ranks = world.original_size - first
        world.on_root(lambda: ensure(config, directory, ranks, (lambda line: None) if quiet else print))
        self.manifest: Manifest = world.collectively(lambda: read_manifest(directory))
        threads = asked_threads(world)
        self.device = world.collectively(lambda: choose_device(world, config, threads))
        if config.sums == "exact" and self.device.type == "cpu":
            # No library promises that a product has the same bits alone and in a stack; who asks for stacks gets them.
            self.config = config = replace(config, max_clients_at_once=config.max_clients_at_once or 1)
        self.dtype = set_precision(config.precision)
        whose = (world.original_ranks, world.original_size, first, config.silo_per_rank, config.adopt)
        self.clients_of = owners_left(self.manifest, *whose)
        # Whoever ends a job may end some ranks before the others.
        unfinished = bool(self.left) and start < config.rounds
        self.asked_to_stop = unfinished and not world.all_ranks(not stop_requested())
        self.stops = "asked to stop" if self.asked_to_stop else self._too_few()
        self.only_serve = [place < first for place in world.original_ranks]
        self.lost = np.setdiff1d(np.arange(self.manifest.clients), np.concatenate(self.clients_of))
        world.collectively(self._verify)
        data = world.collectively(self._local_data)
        held_out = world.on_root(self._held_out) or {}

        self.network = world.collectively(self._network)
        # Products on several threads depend on how many there are.
        work = 0 if config.sums == "exact" else self.network.work * self._images_per_step()
        limit_threads(world, self.device, work, threads)
        digests = {checkpoint.DATA: self.manifest.digest, checkpoint.MODEL: self.network.digest()}
        if ":" in config.model:
            self._refuse_different_models(digests[checkpoint.MODEL])
        self.algorithm = a = world.collectively(lambda: algorithms.create(config, self.network.layout.tensors))
        size = self.network.layout.size
        engine = world.collectively(lambda: create_engine(self.network, config, self.device))
        capture = capture_on(self.device) if engine.capturable else None
        self.trainer = world.collectively(
            lambda: Trainer(config, a, engine, data, self.device, self.dtype, capture)
        )  # fmt: skip
        kind = wire_type(config, self.dtype)
        self.transport = plan_transport(world, size, kind, self.device, config.transport, config.wire)
        world.at_close.callback(self.transport.close)
        names = (*a.down, *a.derived, *(a.private if world.rank == 0 or world.tolerant else ()))
        s = Vectors(**named_rows(names, size, self.dtype, self.device))
        self.sums_changed = ""
        evaluator = Evaluator(engine, data.normalise, self.trainer.compute, capture)
        objective = Objective(config, engine, data, np.delete(self.manifest.sizes, self.lost), s.x)
        self.silo = Silo(world, config, a, self.trainer, self.transport, s, evaluator, held_out, digests, objective)

    def _network(self) -> models.Network:
        c, m = self.config, self.manifest
        stacked = c.engine != "generic"
        network = models.build(c.model, m.classes, m.image_shape, c.activation, c.seed, stacked, c.norm, c.smu_mu)
        if c.init and (network.constants or (self.world.rank == 0 and not self.start)):
            load_initial(Path(c.init), network, self.dtype, c.init_partial)
        return network

    def _images_per_step(self) -> int:
        """That a rank's threads share, the same number on all ranks; an evaluation's batch has a forward pass only."""
        c, m = self.config, self.manifest
        most = max(map(len, self.clients_of))
        batch = int(min(c.batch_size or m.sizes.max(), m.sizes.max()))
        return max(round(c.participation * most) * batch, BATCH["cpu"] // 3)

    def _refuse_different_models(self, digest: str) -> None:
        """A user's function may read files, or depend on the machine."""
        first, *others = self.world.allgather_json(digest)
        different = [rank for rank, other in enumerate(others, 1) if other != first]
        if different:
            raise UserError(
                f"--model {self.config.model}: rank {different[0]} has other frozen parameters, buffers or shapes than "
                "rank 0; expected the same model on every rank"
            )

    def _verify(self) -> None:
        """Compare the checksums of files that ranks of this node need: of each file, the first rank that needs it."""
        files = {rank: files_of(self.manifest, self.clients_of[rank]) for rank in self.world.neighbours}
        first = {name: rank for rank in reversed(self.world.neighbours) for name in files[rank]}
        check_files(self.manifest, [name for name, rank in first.items() if rank == self.world.rank])

    def _local_data(self) -> LocalData:
        m, dtype = self.manifest, self.dtype
        shard = read_clients(m, self.clients_of[self.world.rank], verify=False)
        normalise = Normaliser(*(torch.tensor(v, dtype=dtype, device=self.device) for v in (m.mean, m.std)))
        images, labels = (torch.from_numpy(a).to(self.device) for a in (shard.images, shard.labels))
        largest = int(m.sizes.max()) if self.config.sums == "exact" else 0
        return LocalData(
            images, labels, shard.client_ids, shard.offsets[:-1], np.diff(shard.offsets), normalise, largest
        )

    def _held_out(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Images and labels that belong to no client: the test set and, if there is one, the validation set."""
        files = {"test": TEST_FILE, **({"val": VALIDATION_FILE} if self.manifest.validation else {})}
        arrays = {part: read_test(self.manifest, name=name) for part, name in files.items()}
        return {
            part: (torch.from_numpy(images).to(self.device), torch.from_numpy(labels).to(self.device))
            for part, (images, labels) in arrays.items()
        }

    def run(self) -> str:
        """To the end; finished or stopped."""
        world, silo, out, start = self.world, self.silo, Path(self.config.out), self.start
        if self.held:
            self._go_on(self.held)
        elif start:
            clients = set(silo.trainer.data.client_ids.tolist())
            state = silo.trainer.client_state.vectors
            world.on_root(lambda: checkpoint.refuse_other_digests(out, start, silo.digests, self.manifest.root))
            world.collectively(lambda: checkpoint.load(out, start, silo.s, state, clients, world))
            self.sums_changed = world.on_root(lambda: self._sums_changed(start)) or ""
            world.on_root(lambda: checkpoint.remove_unfinished(out))
        else:
            world.on_root(self._start)
        world.barrier()
        silo.share((*silo.sent, *self.algorithm.derived))
        world.bytes_moved = 0
        memory = world.gather(astuple(silo.memory))
        here = {"host": platform.node(), "cpu": provenance.cpu_model(), "device": device_name(self.device)}
        self.ranks = world.allgather_json(here)
        kept = world.on_root(self._kept)
        if world.tolerant:
            silo.held = self._hold(kept)
        if kept is None:
            return silo.serve()
        try:
            status = self._serve(memory, kept)
        except (WriteError, CallbackError) as error:  # on the root alone, while the others wait for an order
            world.broadcast_json({"do": "fail", "message": str(error)})
            raise
        world.broadcast_json({"do": "end", "status": status})
        return status

    def _go_on(self, held: Held) -> None:
        """From what this rank holds; the root keeps the last state of clients that nobody has, for a later resume."""
        silo, out = self.silo, Path(self.config.out)
        for name, vector in held.s.items():
            getattr(silo.s, name).copy_(vector)
        silo.before.copy_(held.before)
        state = silo.trainer.client_state.vectors = held.state

        def keep_state_of_lost_clients() -> None:
            if saved := checkpoint.complete(out):
                checkpoint.load_state(out, int(saved[-1].name[6:]), silo.s.x, state, set(self.lost.tolist()))

        if state:
            self.world.on_root(keep_state_of_lost_clients)

    def _hold(self, kept: Kept | None) -> Held:
        """What the root keeps, on every rank."""
        message = kept and {
            "records": kept.recorder.records,
            "segments": vars(kept.segments),
            "clients": kept.clients.known(),
            "best": kept.best and kept.best.record,
            "previous_known": kept.previous_known,
        }
        known = self.world.broadcast_json(message)
        out, best = Path(self.config.out), None
        if self.manifest.validation:
            best = Best(out, 0, self.silo.s.x, self.network.state_dict)
            if known["best"]:
                x = torch.zeros_like(self.silo.s.x)
                if kept and kept.best and kept.best.x is not None:
                    x.copy_(kept.best.x)
                self.transport.bcast([x.view(self.transport.dtype)])
                best.restore(x, known["best"])
        clients = ClientValues.restored(out, self.manifest.counts, self.manifest.places[0] + 1, known["clients"])
        segments = provenance.Segments(**known["segments"])
        past = Past(known["records"], segments, clients, best, known["previous_known"])
        self.world.barrier()
        return Held(self.silo, self.start, past)

    def _kept(self) -> Kept:
        """What the root keeps of the run, as it was at the round that the run goes on from."""
        out, start = Path(self.config.out), self.start
        sinks = Sinks(self.config, start)  # which may refuse; with its settings, the directory is a run's
        write_atomically(out / "config.json", dumps(self.config))
        if self.held:
            past = self.held.past
            if past.best:
                past.best.changed = True
            past.clients.changed = True
            recorder = Recorder(out, start, sinks, past.records)
            return Kept(recorder, self._segments(), past.clients, past.best, past.previous_known, sinks)
        best = Best(out, start, self.silo.s.x, self.network.state_dict) if self.manifest.validation else None
        previous = checkpoint.read_more(out, start, checkpoint.PREVIOUS) if start and self.config.diagnose else None
        if previous is not None:
            self.silo.before.copy_(torch.from_numpy(previous))
        clients = ClientValues(out, start, self.manifest.counts, self.manifest.places[0] + 1)
        recorder = Recorder(out, start, sinks)
        return Kept(recorder, self._segments(), clients, best, previous is not None, sinks)

    def _serve(self, memory: np.ndarray, kept: Kept) -> str:
        """The run on the root, and all that it writes but for checkpoints."""
        config, silo, out, start = self.config, self.silo, Path(self.config.out), self.start
        if self.left:
            self._print(f"note: {self._departures()}")
        if not self.held:
            self._print(self._overview(memory).banner())
        with kept.sinks as sinks:
            progress = Progress(config.rounds, start, self.quiet)
            with kept.recorder as recorder, closing(progress):
                if recorder.left_out:
                    lines = f"{recorder.left_out} unreadable line{'s' * (recorder.left_out > 1)}"
                    self._print(f"note: left out {lines} of metrics.jsonl, which is kept as {out / metrics.DAMAGED}")
                about = (self.manifest.sizes, self.network.layout.numel, recorder, progress, *kept[1:5], self.on_round)
                silo.clock.take()  # services take seconds to start, which are no part of the first round
                server = Server(silo, *about, self.lost, self.left)
                if self.stops:
                    self._print(f"note: {self.stops}: stopped, --resume {config.out} goes on")
                    if not self.asked_to_stop or self._nothing_lost():
                        server.save(start)
                status = "stopped" if self.stops else server.run(start)
            summary = {
                "status": status,
                "method": self.algorithm.title(),
                **summarise(recorder.records, config.targets),
                **({"best_validation": kept.best.record} if kept.best else {}),
                "data": self.manifest.about_images,
                **kept.segments.summary(recorder.records[-1]["round"] if recorder.records else 0),
            }
            results.write(out, self.network.state_dict(silo.s.x.cpu()), summary)
            self._print(closing_lines(summary, recorder.records, str(out)))
            sinks.status = status
        return status

    def _clients_per_rank(self) -> list[int]:
        """Of the ranks that train."""
        counts = [len(clients) for clients in self.clients_of]
        return [n for n, serves in zip(counts, self.only_serve, strict=True) if n or not serves]

    def _departures(self) -> str:
        """Who left, and what becomes of their clients."""
        who = ", ".join(f"rank {left.rank} on {left.host}" for left in self.left)
        clients = plural(len(self.lost), "client")
        kept = f"without {clients}" if len(self.lost) else "with all clients"
        ranks = f"{self.world.size} of {plural(self.world.original_size, 'rank')}"
        return f"{who} left after round {self.start}: {ranks} go on, {kept}"

    def _too_few(self) -> str:
        """That so few silos are left that the run is to stop; empty if it is not. On all ranks alike."""
        silos = sum(len(clients) > 0 for clients in self.clients_of)
        if not self.left or silos >= self.config.min_silos:
            return ""
        few = f"{plural(silos, 'silo')} left, and --min-silos is {self.config.min_silos}"
        if not self.start:
            raise UserError(f"{few}: start again, there is no round to go on from")
        return few

    def _nothing_lost(self) -> bool:
        """Whether a checkpoint of what the ranks hold is that of a run without departures."""
        return self.start > 0 and not (self.algorithm.client_state and len(self.lost))

    def trained_module(self) -> nn.Module:
        """The network's own module, on the CPU, with the values of the last round."""
        module = self.network.module.cpu()
        values = self.network.state_dict(self.silo.s.x.cpu())
        for name, tensor in tensors(module).items():
            if name in values:
                tensor.data = values[name]
        return module

    def _print(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)

    def _start(self) -> None:
        """Server vectors at t = 0."""
        s = self.silo.s
        s.x.copy_(self.network.initial(self.dtype))
        self.algorithm.start(s)
        claim.clear(Path(self.config.out))  # not before everything that could be refused has been read

    def _overview(self, memory: np.ndarray) -> Overview:
        layout = self.network.layout
        return Overview(
            self.config,
            self.manifest,
            self.algorithm,
            self.start,
            parameters=layout.numel,
            arithmetic=arithmetic(self.config.precision, self.device),
            engine=self.trainer.engine.description,
            on_cpu=self.device.type == "cpu",
            ranks_on_node=self.world.node.size,
            clients_per_rank=self._clients_per_rank(),
            cuda_aware=cuda_aware(),
            environment=self.environment(),
            sums_changed=self.sums_changed,
            model_notes=[*self.network.notes, *precision_notes(self.config.precision, self.device)],
            costs=self._costs(self.start, memory),
        )

    def _segments(self) -> provenance.Segments:
        earlier: list[provenance.Segment] = []
        if self.held:
            earlier = self.held.past.segments.until(self.start)
        elif self.start:
            stored = checkpoint.read_more(Path(self.config.out), self.start, checkpoint.SEGMENTS)
            earlier = [] if stored is None else provenance.decode(stored.tobytes())
        about = {**self.environment(), **provenance.commit(), "nodes": provenance.nodes(self.ranks)}
        if self.left:
            about |= {"left": [left._asdict() for left in self.left], "clients_left_out": len(self.lost)}
        return provenance.Segments(earlier, self.start, self.started, about)

    def _sums_changed(self, start: int) -> str:
        """How the order of the sums over ranks differs from that up to the checkpoint."""
        before = checkpoint.order_of_sums(Path(self.config.out), start)
        now = self.silo.order_of_sums
        changed = {name: before[name] for name in now if before.get(name, now[name]) != now[name]}
        return ", ".join(f"{name} {value} before and {now[name]} now" for name, value in changed.items())

    def _costs(self, start: int, memory: np.ndarray) -> Costs:
        a, manifest = self.algorithm, self.manifest
        rank_of = np.zeros(manifest.clients, np.int64)
        for rank, clients in enumerate(self.clients_of):
            rank_of[clients] = rank
        vector_bytes = self.network.layout.numel * self.dtype.itemsize
        sums, per_vector = self.silo.kept_sums, self.transport.bytes_per_vector
        participants = fixed_number(manifest.clients, self.config.participation)
        rounded = self.transport.bytes_rounded
        bytes_up = sums.bytes_moved(participants) if sums else len(a.up) * rounded
        bytes_mpi = (len(a.down) - 1) * per_vector + rounded + bytes_up
        ranks = [RankMemory(*map(int, row)) for row in memory]
        return Costs.of(self.config, a, vector_bytes, bytes_mpi, rank_of, start, ranks)

    def environment(self) -> dict[str, Any]:
        """What the run ran on, for its summary."""
        return {
            "fedlada_mpi": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "mpi": mpi.implementation(),
            "ranks": self.world.size,
            "device": device_name(self.device),
            "cpu": provenance.cpu_model(),
            "threads": torch.get_num_threads(),
            "transport": self.transport.kind,
            "host": platform.node(),
            "command": sys.argv,
        }
