"""Put a run together on this rank: device, data, model, method, transport; then server or silo."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import __version__, algorithms, checkpoint, models, mpi, outputs
from .algorithms import Vectors
from .batches import Normaliser
from .config import Config
from .data import ensure
from .errors import UserError
from .gradients import create
from .metrics import Recorder, summarise, write_atomically
from .mpi_transport import Transport, cuda_aware
from .server import Server
from .shards import Manifest, read_manifest, read_silos, read_test
from .show import Show, amount, banner, summary
from .silo import Silo, named_rows
from .trainer import Resident, Trainer


def keep_freed_memory() -> None:
    """A step's large temporaries come back at every step: glibc shall keep their pages, not return and clear them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, -1)


def choose_device(world: mpi.World, config: Config) -> torch.device:
    """A GPU by local rank (several ranks may share one), or the CPU with its share of the cores."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise UserError(
            "--device cuda: torch sees no GPU here; use --device cpu, or check CUDA_VISIBLE_DEVICES and the driver"
        )
    if available and config.device != "cpu":
        device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        keep_freed_memory()
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        # Ranks that a launcher bound see their own cores; unbound ones share the node's.
        sharing = world.node.size if cores >= (os.cpu_count() or 1) else 1
        torch.set_num_threads(max(1, cores // sharing))
    return device


def set_precision(precision: str) -> torch.dtype:
    """The type of parameters and states; what products are computed in is a global of torch."""
    tf32 = precision in ("tf32", "bf16")
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    return torch.float64 if precision == "fp64" else torch.float32


class Session:
    def __init__(self, world: mpi.World, config: Config, directory: Path):
        self.world, self.config = world, config
        # Rank 0 only serves, unless it is alone or told to train: the first rank with clients, and how many there are.
        first = 0 if world.size == 1 or config.server_trains else 1
        ranks = world.size - first
        world.alone(lambda: ensure(config, directory, ranks))
        self.manifest: Manifest = world.together(lambda: read_manifest(directory))
        self.device = world.together(lambda: choose_device(world, config))
        self.dtype = set_precision(config.precision)
        self.owner = np.array_split(np.arange(self.manifest.silos), ranks)
        mine = self.owner[world.rank - first] if world.rank >= first else []
        data = world.together(lambda: self._resident(mine))
        test = world.alone(self._test)

        self.network = world.together(self._network)
        self.algorithm = algorithms.create(config)
        layout = self.network.layout
        gradient = create(self.network, config, self.device)
        self.trainer = Trainer(config, self.algorithm, gradient, data, self.device, self.dtype)
        self.transport = Transport(world, layout.size, self.dtype, self.device, config.transport)
        a = self.algorithm
        names = (*a.down, *a.derived, *(a.private if world.rank == 0 else ()))
        s = Vectors(**named_rows(names, layout.size, self.dtype, self.device))
        self.silo = Silo(world, config, a, self.trainer, self.transport, s, test)

    def _network(self) -> models.Network:
        c, m = self.config, self.manifest
        stacked = c.engine != "generic"
        network = models.build(c.model, m.classes, m.image_shape, c.activation, c.seed, stacked=stacked)
        if c.engine == "stacked" and network.forward is None:
            raise UserError(f"--engine stacked: {c.model} has no stacked layers; use --engine generic or auto")
        return network

    def _resident(self, silos) -> Resident:
        m, dtype = self.manifest, self.dtype
        shard = read_silos(m, [int(i) for i in silos])
        normalise = Normaliser(*(torch.tensor(v, dtype=dtype, device=self.device) for v in (m.mean, m.std)))
        images, labels = (torch.from_numpy(a).to(self.device) for a in (shard.images, shard.labels))
        return Resident(images, labels, shard.client_ids, shard.offsets[:-1], np.diff(shard.offsets), normalise)

    def _test(self):
        return tuple(torch.from_numpy(a).to(self.device) for a in read_test(self.manifest))

    def _start(self) -> None:
        """Server vectors at t = 0."""
        s, config = self.silo.s, self.config
        x = self.network.initial(self.dtype)
        if config.init:
            x = self._load_model(Path(config.init))
        s.x.copy_(x)
        self.algorithm.start(s)
        outputs.clear(Path(config.out))  # not before everything that could be refused has been read

    def _load_model(self, path: Path) -> torch.Tensor:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise UserError(f"--init: cannot read {path} as a state_dict: {str(error).splitlines()[0]}") from None
        wanted = {e.name: e.shape for e in self.network.layout.entries}
        if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise UserError(f"--init: {path} is not a state_dict of tensors: expected one such as a run's model.pt")
        found = {name: tuple(value.shape) for name, value in state.items()}
        if found != wanted:
            odd = sorted({name for name, _ in {*found.items()} ^ {*wanted.items()}})[:3]
            raise UserError(f"--init: {path} does not fit {self.config.model} (differs in {', '.join(odd)})")
        return self.network.layout.pack(state, self.dtype)

    def run(self, start: int) -> str:
        """From round ``start`` (0: anew) to the end; finished or stopped."""
        world, config, silo, out = self.world, self.config, self.silo, Path(self.config.out)
        if start:
            ids = set(silo.trainer.data.client_ids.tolist())
            world.together(lambda: checkpoint.load(out, start, silo.s, silo.trainer.kept, ids, world.rank == 0))
        else:
            world.alone(self._start)
        world.wait()
        silo.share((*self.algorithm.down, *self.algorithm.derived))
        world.bytes_moved = 0
        needs = world.collect([self.trainer.bytes_per_client, self.trainer.bytes_beside, self.trainer.room()])
        if world.rank != 0:
            return silo.serve()
        write_atomically(out / "config.json", json.dumps(asdict(config), indent=2) + "\n")
        print(self.banner(start, needs), flush=True)
        recorder, show = Recorder(out, start), Show(config.rounds, start)
        try:
            status = Server(silo, self.manifest.sizes, self.network.layout.numel, recorder, show).run(start)
        finally:
            show.close()
            recorder.close()
        found = {"status": status, **summarise(recorder.records, config.targets), "environment": self.environment()}
        self._save_model(out / "model.pt")
        write_atomically(out / "summary.json", json.dumps(found, indent=2) + "\n")
        print(summary(found, recorder.records, str(out)), flush=True)
        return status

    def close(self) -> None:
        self.transport.close()
        self.world.close()

    def _save_model(self, path: Path) -> None:
        temporary = path.with_name(path.name + ".tmp")
        torch.save(self.network.layout.unpack(self.silo.s.x.cpu()), temporary)
        os.replace(temporary, path)

    def environment(self) -> dict[str, Any]:
        cuda = self.device.type == "cuda"
        return {
            "fedlada_mpi": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "mpi": mpi.implementation(),
            "ranks": self.world.size,
            "device": torch.cuda.get_device_name(self.device) if cuda else f"{platform.machine()} CPU",
            "threads": torch.get_num_threads(),
            "transport": self.transport.kind,
            "host": platform.node(),
            "command": sys.argv,
        }

    def banner(self, start: int, needs: np.ndarray) -> str:
        c, w, m, d = self.config, self.world, self.manifest, self.network.layout.numel
        a, vector = self.algorithm, self.network.layout.numel * self.dtype.itemsize
        per_silo = [int(sum(len(m.client_ids[i]) for i in silos)) for silos in self.owner]
        idle = sum(count == 0 for count in per_silo)
        participants = c.participation * c.clients
        share = max(per_silo) / c.clients * participants
        sends = f"{'+'.join(a.down)} down, {'+'.join(a.up)} up"
        where = self.environment()["device"] + (
            f", {torch.get_num_threads()} threads a rank" if self.device.type == "cpu" else ""
        )
        per_client, beside, _ = needs.max(0)
        room = min((n for n in needs[:, 2] if n), default=0)
        memory = share * per_client + beside + vector * (len(a.up) + len(a.down) + len(a.derived) + 1)
        path = "generic (functional torch; the stacked path is several times faster)"
        if self.network.forward is not None:
            path = "stacked" + (", compiled kernels" if self.trainer.kernels is not None else "")
        rows = [
            ("method", f"{c.algorithm}, {c.rounds} rounds" + (f", resumed after round {start}" if start else "")),
            ("data", f"{m.dataset}: {int(m.sizes.sum())} images, {m.classes} classes, {m.clients} clients"),
            ("model", f"{c.model}, {d:,} parameters, {c.precision}, {path}"),
            ("ranks", f"{w.size} ({w.node.size} on this node), {min(per_silo)} to {max(per_silo)} clients a silo"),
            ("device", where),
            (
                "MPI",
                f"{mpi.implementation()}, {'' if cuda_aware() else 'not '}CUDA-aware; transport: {self.transport.kind}",
            ),
            (
                "a round",
                f"{participants:g} participants; {sends}: {amount(participants * (len(a.down) + len(a.up)) * vector)}",
            ),
            ("memory", f"about {amount(memory)} a rank for {share:.1f} clients at once"),
            ("files", c.out),
        ]
        if 0 < room < share:
            rows.append(("note", f"{room:.0f} clients fit in a GPU's memory together; more train in turns"))
        if idle:
            rows.append(("note", f"{idle} ranks have no clients: prepare shards for more than {m.silos} silos"))
        return f"fedlada_mpi {__version__}\n{banner(rows)}"
