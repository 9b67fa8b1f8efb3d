"""Whole rounds of a run on the CPU, in turn with a plain mpi4py loop on the same ranks, data and participants.

    mpirun -n 2 python docs/bench/cpu.py                     all workloads
    mpirun -n 4 python docs/bench/cpu.py cnn cnn-each        some of them
    mpirun -n 2 python docs/bench/cpu.py --rounds 60 mlp
    mpirun -n 2 python docs/bench/cpu.py --adamw mlp mlp-each

``NAME-each`` has one client on every rank, the others divide their participants among the ranks. A round of the run
is all that it does from one order to the next, with its messages and records; one of the loop is Bcast, local training
with torch's own layers, and Reduce. The loop's method is the run's: FedAvg with torch's SGD, or FedLADA as an optimiser
of a few lines; ``--adamw`` puts averages of clients that train with torch's AdamW in FedLADA's place. A row has seconds
of the root, median and shortest, and seconds of the processors of all ranks: where other programs use the cores, too,
the shortest tell most.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor

from fedlada_mpi import Data
from fedlada_mpi.mpi import World
from fedlada_mpi.rounds.watcher import Order, Watcher
from fedlada_mpi.session import plan
from fedlada_mpi.session.assemble import Session
from fedlada_mpi.session.journal import Journal
from fedlada_mpi.session.plan import Plan, Request
from fedlada_mpi.session.training import Training

WARM_UP = 3  # rounds


@dataclass(frozen=True)
class Workload:
    """Clients of random images, all of the same size."""

    model: str
    algorithm: str
    shape: tuple[int, int, int]
    clients: int  # 0: one on every rank
    participation: float
    images: int  # of a client
    batch: int
    steps: int

    def data(self, ranks: int) -> Data:
        draw, clients = np.random.default_rng(0), self.clients or ranks
        count = clients * self.images
        return Data(
            train_images=draw.integers(0, 256, (count, *self.shape), np.uint8),
            train_labels=np.arange(count) % 10,
            clients=np.arange(count).reshape(clients, -1).tolist(),
            test_images=draw.integers(0, 256, (10, *self.shape), np.uint8),
            test_labels=np.arange(10),
        )


DIGITS = dict(shape=(8, 8, 1), images=75, batch=10, steps=8)
CIFAR = dict(shape=(32, 32, 3), images=150, batch=50, steps=3)
EACH = dict(clients=0, participation=1.0)
WORKLOADS = {
    "cnn": Workload("cnn", "fedavg", clients=20, participation=0.2, **DIGITS),
    "cnn-each": Workload("cnn", "fedavg", **EACH, **DIGITS),
    "mlp": Workload("mlp", "fedlada", clients=10, participation=1.0, **CIFAR),
    "mlp-each": Workload("mlp", "fedlada", **EACH, **CIFAR),
    "lenet3": Workload("lenet3", "fedlada", clients=10, participation=1.0, **CIFAR),
    "lenet3-each": Workload("lenet3", "fedlada", **EACH, **CIFAR),
}


class PlainLoop:
    """Federated averaging as it is usually written; participants are dealt out, whoever has their images."""

    optimizer_class: Callable[..., torch.optim.Optimizer] = torch.optim.SGD

    def __init__(self, work: Workload, data: Data, session: Session):
        self.work, self.clip = work, session.config.clip
        images = torch.from_numpy(np.asarray(data.train_images)).permute(0, 3, 1, 2).contiguous()
        self.images = images.float() / 255 - 0.5
        self.labels = torch.from_numpy(np.asarray(data.train_labels))
        self.module = copy.deepcopy(session.network.module).float().train()
        self.parameters = list(self.module.parameters())
        self.x = torch.nn.utils.parameters_to_vector(self.parameters).detach().numpy().copy()
        self.sum = np.empty_like(self.x)
        self.lr, self.decay = session.config.lr, session.config.weight_decay

    def optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer_class(self.parameters, lr=self.lr, weight_decay=self.decay)

    def train(self, client: int) -> torch.optim.Optimizer:
        first, optimizer = client * self.work.images, self.optimizer()
        order = first + torch.randperm(self.work.images)
        for batch in order.split(self.work.batch):
            optimizer.zero_grad()
            F.cross_entropy(self.module(self.images[batch]), self.labels[batch]).backward()
            if self.clip:
                torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
            optimizer.step()
        return optimizer

    def round(self, participants: list[int]) -> None:
        comm = MPI.COMM_WORLD
        comm.Bcast(self.x)
        total = torch.zeros(len(self.x))
        for client in participants[comm.rank :: comm.size]:
            torch.nn.utils.vector_to_parameters(torch.from_numpy(self.x).clone(), self.parameters)
            self.train(client)
            with torch.no_grad():
                total += torch.nn.utils.parameters_to_vector(self.parameters)
        comm.Reduce(total.numpy(), self.sum)
        if comm.rank == 0:
            np.divide(self.sum, len(participants), out=self.x)


class PlainAdamW(PlainLoop):
    optimizer_class = partial(torch.optim.AdamW, amsgrad=True)


class FedLADAStep(torch.optim.Optimizer):
    """AMSGrad whose maximum starts at the server's, blended with the global direction ``g_a``."""

    def __init__(self, parameters: list[torch.nn.Parameter], v: Tensor, g_a: Tensor, **settings: float):
        super().__init__(parameters, settings)
        sizes = [p.numel() for p in parameters]
        for p, v_hat, direction in zip(parameters, v.split(sizes), g_a.split(sizes), strict=True):
            self.state[p] = {
                "m": torch.zeros_like(p), "v": torch.zeros_like(p),
                "v_hat": v_hat.view_as(p).clone(), "g_a": direction.view_as(p),
            }  # fmt: skip

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            b1, b2, lr, alpha = (group[name] for name in ("beta1", "beta2", "lr", "alpha"))
            for p in group["params"]:
                state = self.state[p]
                m, v, v_hat = state["m"], state["v"], state["v_hat"]
                m.lerp_(p.grad, 1 - b1)
                v.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                torch.maximum(v_hat, v, out=v_hat)
                if group["weight_decay"]:
                    p.mul_(1 - lr * group["weight_decay"])
                p.addcdiv_(m, v_hat.sqrt(), value=-lr * alpha).add_(state["g_a"], alpha=-lr * (1 - alpha))


class PlainFedLADA(PlainLoop):
    """Offsets and ``v_hat`` move up, the model and ``v`` down; every rank computes ``g_a`` from successive models."""

    def __init__(self, work: Workload, data: Data, session: Session):
        super().__init__(work, data, session)
        method: Any = session.algorithm
        self.settings = {"beta1": method.beta1, "beta2": method.beta2, "alpha": method.alpha}
        self.v, self.g_a = np.full_like(self.x, method.eps_v**2), torch.zeros(len(self.x))
        self.sum_v, self.before = np.empty_like(self.x), torch.from_numpy(self.x.copy())

    def optimizer(self) -> torch.optim.Optimizer:
        v, settings = torch.from_numpy(self.v), {**self.settings, "lr": self.lr, "weight_decay": self.decay}
        return FedLADAStep(self.parameters, v, self.g_a, **settings)

    def round(self, participants: list[int]) -> None:
        comm, steps = MPI.COMM_WORLD, self.work.steps
        for vector in (self.x, self.v):
            comm.Bcast(vector)
        x = torch.from_numpy(self.x)
        torch.sub(self.before, x, out=self.g_a).div_(self.lr * steps)
        self.before.copy_(x)
        offsets, maxima = torch.zeros(len(x)), torch.zeros(len(x))
        for client in participants[comm.rank :: comm.size]:
            torch.nn.utils.vector_to_parameters(x.clone(), self.parameters)
            state = self.train(client).state
            with torch.no_grad():
                offsets += torch.nn.utils.parameters_to_vector(self.parameters) - x
                maxima += torch.cat([state[p]["v_hat"].flatten() for p in self.parameters])
        for total, received in ((offsets, self.sum), (maxima, self.sum_v)):
            comm.Reduce(total.numpy(), received)
        if comm.rank == 0:
            self.x += self.sum / len(participants)
            np.divide(self.sum_v, len(participants), out=self.v)


LOOPS = {"fedavg": PlainLoop, "fedlada": PlainFedLADA}


class Alternation(Watcher):
    """A round of the loop before every one of the run, on every rank; keeps the seconds of both."""

    def __init__(self, loop: Callable[[list[int]], None]):
        self.loop = loop
        self.seconds: list[tuple[float, ...]] = []  # of the loop, then of the run: wall clock, processor
        self.since: tuple[float, float] | None = None

    def ordered(self, order: Order) -> None:
        now = _times()
        run = None if self.since is None else _between(self.since, now)
        if run is not None:
            self.seconds.append((*self.of_loop, *run))
        if order["do"] != "round":
            self.since = None
            return
        with torch.enable_grad():
            MPI.COMM_WORLD.Barrier()
            start = _times()
            self.loop(order["participants"])
        self.since = _times()
        self.of_loop = _between(start, self.since)


def _times() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _between(start: tuple[float, float], end: tuple[float, float]) -> tuple[float, ...]:
    return tuple(b - a for a, b in zip(start, end, strict=True))


class AlternatingTraining(Training):
    def alternate_with(self, loop: type[PlainLoop], work: Workload, data: Data) -> np.ndarray:
        """Run to the end; of every rank and round, what ``Alternation`` has measured."""
        self.loop, self.about = loop, (work, data)
        self.run()
        seconds = np.array(self.alternation.seconds[WARM_UP:])
        return self.world.gather(seconds.ravel()).reshape(-1, *seconds.shape)

    def watchers(self, journal: Journal | None) -> list[Watcher]:
        self.alternation = Alternation(self.loop(*self.about, self.session).round)
        return [*super().watchers(journal), self.alternation]


def measured(world: World, work: Workload, loop: type[PlainLoop], rounds: int, out: Path) -> np.ndarray:
    """On the root, [ranks, rounds, 4]: seconds and processor seconds of the loop, then of the run."""
    data = work.data(world.size)
    settings = {
        "algorithm": work.algorithm, "model": work.model, "batch_size": work.batch, "local_epochs": 1,
        "participation": work.participation, "rounds": rounds + WARM_UP, "server_trains": world.size > 1,
        "eval_every": 0, "checkpoint_every": 0, "augment": "none", "device": "cpu", "weight_decay": 0.0,
        "lr": 1e-3, "out": str(out / "run"), "data_dir": str(out / "data"),
    }  # fmt: skip
    request = Request(settings, data=data, quiet=True, overwrite=True)
    with ExitStack() as at_end:
        made = world.on_root(lambda: plan.make(request, at_end))
        agreed = Plan(**world.broadcast_json(asdict(made) if made else None))
        training = AlternatingTraining(world, agreed.config(request), Path(agreed.directory), 0, quiet=True)
        return training.alternate_with(loop, work, data)


def row(name: str, seconds: np.ndarray) -> str:
    wall_loop, _, wall_run, _ = seconds[0].T
    _, cpu_loop, _, cpu_run = seconds.sum(0).T
    ratio = statistics.median(wall_loop / wall_run)
    figures = []
    for loop, run in ((wall_loop, wall_run), (cpu_loop, cpu_run)):
        figures += [np.median(run), np.min(run), np.median(loop), np.min(loop), np.min(loop) / np.min(run)]
    numbers = " ".join(f"{figure:9.4f}" for figure in figures)
    return f"{name:12} {len(seconds):5} {numbers} {ratio:9.2f}"


HEADER = (
    "             ranks |  run: median, shortest   loop: median, shortest, times the run's | the same of processors "
    "| median of the ratios"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="*", choices=[*WORKLOADS, []], help="[all]")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds of each [20]")
    parser.add_argument("--adamw", action="store_true", help="a loop with AdamW in place of one with FedLADA")
    options = parser.parse_args()
    with World() as world, tempfile.TemporaryDirectory() as folder:
        out = Path(world.broadcast_json({"folder": folder})["folder"])
        if world.rank == 0:
            print(HEADER, flush=True)
        for name in options.workload or WORKLOADS:
            work = WORKLOADS[name]
            loop = PlainAdamW if options.adamw and work.algorithm == "fedlada" else LOOPS[work.algorithm]
            seconds = measured(world, work, loop, options.rounds, out / name)
            if world.rank == 0:
                print(row(name, seconds), flush=True)


if __name__ == "__main__":
    main()
