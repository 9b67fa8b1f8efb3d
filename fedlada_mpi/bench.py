"""How fast this machine trains, and how near that is to what its hardware allows.

    python -m fedlada_mpi.bench                                    one rank: roofline, rounds, evaluation
    mpirun -n 11 python -m fedlada_mpi.bench --only transport      Bcast and Reduce between ranks
    mpirun -n 11 python -m fedlada_mpi.bench --only sums           --sums and --robust, without the training
    python -m fedlada_mpi.bench --baseline                         compared with an ordinary client-by-client loop
    python -m fedlada_mpi.bench --baseline --model lenet mlp my_models:net    built-in models and your own
    mpirun -n 4 python -m fedlada_mpi.bench --baseline --only round           the participants divided among the ranks

The data are random images of the data set's shape: the times depend on shapes alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .support.errors import UserError

try:
    from . import mpi
except UserError as missing:
    print(f"error: {missing}", file=sys.stderr)
    raise SystemExit(2) from None
import torch
import torch.nn.functional as F

from . import algorithms, models
from .algorithms import Round, Vectors, resolve
from .algorithms.fedlada import LocalAdam
from .algorithms.hook_draws import server_draws
from .gpu.graphs import capture_on
from .mpi import timing
from .mpi.plan import plan_transport
from .rounds import aggregate
from .rounds.aggregate import Part, RankSums, Sent
from .rounds.batches import LocalData, Normaliser, PlanBuffer, gather, local_steps, plan
from .rounds.device import (
    asked_threads,
    choose_device,
    device_name,
    limit_threads,
    set_onednn,
    set_precision,
    synchronize,
)
from .rounds.evaluate import Evaluation, Evaluator
from .rounds.examples import Resident
from .rounds.gradients import create_engine
from .rounds.trainer import Trainer
from .rounds.vectors import named_rows
from .settings import Config, Parser
from .support.processes import start_time
from .support.version import __version__

SHAPES = {"digits": ((8, 8, 1), 10, 30), "cifar10": ((32, 32, 3), 10, 500), "cifar100": ((32, 32, 3), 100, 500)}
SHAPES["tinyimagenet"] = ((64, 64, 3), 200, 1000)
SECTIONS = ("start", "roofline", "round", "evaluation", "transport", "sums")


def since_start() -> float:
    """Seconds since this process began, imports included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(start_time(os.getpid())) / os.sysconf("SC_CLK_TCK")


def timed(action: Callable[[], Any], device: torch.device, repeats: int, warm_up: int = 2) -> list[float]:
    """Seconds of each repetition."""
    for _ in range(warm_up):
        action()
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        action()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds


def roofline(device: torch.device, precision: str) -> dict[str, float]:
    """Measured copy bandwidth (bytes read and written a second) and matrix product rate."""
    elements = 1 << (28 if device.type == "cuda" else 24)
    source = torch.rand(elements, device=device)
    target = torch.empty_like(source)
    copy = 8 * elements / statistics.median(timed(lambda: target.copy_(source), device, 10))
    side = 8192 if device.type == "cuda" else 1024
    kind = {"bf16": torch.bfloat16, "fp64": torch.float64}.get(precision, torch.float32)
    a, b = (torch.rand(side, side, device=device).to(kind) for _ in range(2))
    product = 2 * side**3 / statistics.median(timed(lambda: a @ b, device, 10))
    return {"copy_bytes_per_s": copy, "product_flop_per_s": product}


class Bench:
    """A trainer on random data, as one rank of a run would have it."""

    def __init__(self, config: Config, clients: int, device: torch.device):
        shape, classes, images = SHAPES[config.dataset]
        config = replace(config, clients=clients, participation=1.0)  # all of them, every round
        self.config, self.device, self.clients = config, device, clients
        dtype = set_precision(config.precision)
        draw = np.random.default_rng(0)
        pixels = torch.from_numpy(draw.integers(0, 256, (clients * images, *shape), np.uint8)).to(device)
        labels = torch.from_numpy(draw.integers(0, classes, clients * images)).to(device)
        half = Normaliser(*(torch.full((shape[2],), 0.5, dtype=dtype, device=device) for _ in range(2)))
        starts = np.arange(clients) * images
        data = LocalData(Resident(pixels, labels), np.arange(clients), starts, np.full(clients, images), half)
        self.network = models.build(
            config.model,
            classes,
            shape,
            config.activation,
            stacked=config.engine != "generic",
            norm=config.norm,
            smu_mu=config.smu_mu,
        )
        self.algorithm = algorithms.create(config, self.network.layout.tensors)
        engine = create_engine(self.network, config, device)
        capture = capture_on(device) if engine.capturable else None
        self.trainer = Trainer(config, self.algorithm, engine, data, device, dtype, capture)
        self.evaluator = Evaluator(engine, half, self.trainer.compute, capture)
        a, size = self.algorithm, self.network.layout.size
        self.s = Vectors(**named_rows((*a.down, *a.derived, *a.private), size, dtype, device))
        self.s.x.copy_(self.network.initial(dtype))
        with server_draws(a, "start", 0, self.trainer.buffers.real):
            a.start(self.s)
        self.sums = RankSums(a, size, dtype, device)
        self.steps = int(local_steps(config, data.sizes)[0])
        self.t = 0

    def round(self) -> None:
        r = Round(self.t, self.config.lr, self.steps, self.clients, self.clients)
        self.trainer.round(self.s, r, np.arange(self.clients), self.sums)
        self.t += 1

    def evaluation(self) -> Evaluation:
        return self.evaluator.of(self.s.x, self.trainer.data.examples)

    def floor(self, limits: dict[str, float]) -> float:
        """A lower bound of a round's seconds: the arithmetic at the measured rate plus, at the measured bandwidth, each
        state vector read and written once per step, weights and gradients twice more for the two passes."""
        images = self.clients * self.steps * self.trainer.buffers.batch_width
        passes = 2 * (1 + len(self.algorithm.slots)) + 1 + len(self.algorithm.client_state) + 4
        size = passes * self.trainer.buffers.live * 4 * self.clients * self.steps
        return 6 * self.network.work * images / limits["product_flop_per_s"] + size / limits["copy_bytes_per_s"]

    def _optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        """Torch's own, for the baseline."""
        lr, decay = self.config.lr, self.config.weight_decay
        if isinstance(self.algorithm, LocalAdam):
            return torch.optim.AdamW(module.parameters(), lr=lr, amsgrad=True, weight_decay=decay)
        return torch.optim.SGD(module.parameters(), lr=lr, weight_decay=decay)

    def baseline(self) -> None:
        """The round as usually written: one client after another, eager, with torch's own layers; the same batches."""
        config, data, device = self.config, self.trainer.data, self.device
        augment, width = config.augment == "paper", self.trainer.buffers.batch_width
        pixels, _ = data.examples.take(slice(None))
        assert isinstance(pixels, torch.Tensor)
        module = self.network.module.to(device)
        start = {n: p.detach().clone() for n, p in module.named_parameters()}
        total = {n: torch.zeros_like(p) for n, p in start.items()}
        for client in range(self.clients):
            with torch.no_grad():
                for n, p in module.named_parameters():
                    p.copy_(start[n])
            optimizer = self._optimizer(module)
            one = slice(client, client + 1)
            whose = (data.client_ids[one], data.starts[one], data.sizes[one])
            batches = PlanBuffer(self.steps, 1, width, torch.float32, device)
            batches.load(plan(config, self.t, *whose, width, torch.float32), data.examples.labels)
            for step in range(self.steps):
                batch = batches.at(step, 1)
                images = gather(pixels, batch, data.normalise, torch.float32, augment)[0].permute(0, 3, 1, 2)
                optimizer.zero_grad()
                F.cross_entropy(module(images), batch.labels[0]).backward()
                torch.nn.utils.clip_grad_norm_(module.parameters(), config.clip)
                optimizer.step()
            for n, p in module.named_parameters():
                total[n] += start[n] - p.detach()


def rounds(
    world: mpi.World,
    config: Config,
    clients: int,
    device: torch.device,
    limits: dict[str, float],
    repeats: int,
    baseline: bool,
) -> dict:
    """A round of ``clients`` participants, divided among the ranks; the slowest of these counts."""
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.perf_counter()
    mine = len(np.array_split(np.arange(clients), world.size)[world.rank])
    bench = Bench(config, max(1, mine), device)
    limit_threads(world, device, bench.network.work * bench.clients * bench.trainer.buffers.batch_width)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    def seconds_of(action: Callable[[], None], warm_up: int) -> list[float]:
        def to_its_end() -> None:
            if mine:
                action()
                synchronize(device)

        return timing.slowest_seconds(world, to_its_end, repeats, warm_up)

    bench.round()
    synchronize(device)
    first = time.perf_counter() - begin
    seconds = seconds_of(bench.round, warm_up=2)
    median = statistics.median(seconds)
    on = f" on {world.size} ranks" if world.size > 1 else ""
    row: dict[str, Any] = {
        "what": f"{config.algorithm} round, {clients} participant{'s' * (clients > 1)}{on}, {config.precision}",
        "model": config.model,
        "engine": bench.trainer.engine.description,
        "ranks": world.size,
        "threads": torch.get_num_threads(),
        "seconds": median,
        "fastest": min(seconds),
        "rounds_timed": repeats,
        "seconds_per_step": median / bench.steps,
        "images_per_s": clients * bench.steps * bench.trainer.buffers.batch_width / median,
        "floor_seconds": bench.floor(limits),
        "first_round_seconds": first,
    }
    row["fraction_of_floor"] = row["floor_seconds"] / median
    if device.type == "cuda":
        row["predicted_bytes_per_client"] = bench.trainer.memory.per_client
        row["clients"] = mine
        row["memory_bytes"] = torch.cuda.max_memory_reserved(device) - before
    if baseline:
        loop = statistics.median(seconds_of(bench.baseline, warm_up=1))
        row["baseline_seconds"], row["times_faster_than_baseline"] = loop, loop / median
    return row


def add_memory_slopes(rows: list[dict]) -> None:
    """Memory per client: what the clients of a row take beyond those of another row of the same method."""
    methods = [(row.get("model"), row["what"].split()[0], row["what"].split()[-1]) for row in rows]
    sized = [(method, row) for method, row in zip(methods, rows, strict=True) if "memory_bytes" in row]
    for method, row in sized:
        for other_method, other in sized:
            if method == other_method and row["clients"] > other["clients"]:
                extra = row["memory_bytes"] - other["memory_bytes"]
                row["measured_bytes_per_client"] = extra / (row["clients"] - other["clients"])


def first_step(config: Config, clients: int, device: torch.device) -> dict:
    """From the start of the process, imports included, to the end of the first local step."""
    Bench(replace(config, local_steps=1), clients, device).round()
    synchronize(device)
    return {
        "what": f"start to first step, {config.precision}, compile {config.compile}",
        "start_seconds": since_start(),
    }


def evaluation(world: mpi.World, config: Config, device: torch.device, repeats: int) -> dict:
    count = 120 if device.type == "cuda" else 2
    bench = Bench(config, count, device)
    limit_threads(world, device, bench.network.work * bench.evaluation().batch // 3)
    seconds = statistics.median(timed(bench.evaluation(), device, repeats))
    images = len(bench.trainer.data.examples)
    return {
        "what": f"evaluating {images:,} images, {config.precision}",
        "seconds": seconds,
        "images_per_s": images / seconds,
    }


def transport(world: mpi.World, size: int, device: torch.device, kinds: list[str], repeats: int) -> list[dict]:
    """Every transport, and the library's own Bcast and Reduce on the same kind of buffers."""
    rows = []
    for kind in kinds:
        try:
            planned = plan_transport(world, size, torch.float32, device, kind)
        except UserError:
            continue
        vector = torch.rand(size, device=device)
        row: dict[str, Any] = {"what": f"transport {planned.kind}", "ranks": world.size, "bytes": 4 * size}
        for name, move in (("bcast", planned.bcast), ("reduce", planned.reduce)):
            row[f"{name}_seconds"] = timing.slowest_rank(world, partial(move, [vector]), repeats)
        planned.close()
        rows.append(row)
    host = torch.rand(size, pin_memory=device.type == "cuda")
    for name, plain in (("bcast", timing.plain_bcast), ("reduce", timing.plain_reduce)):
        seconds = timing.slowest_rank(world, partial(plain, world, host), repeats)
        rows.append({"what": f"plain {name}, host buffers", f"{name}_seconds": seconds})
    return rows


def sums(world: mpi.World, config: Config, size: int, clients: int, device: torch.device, repeats: int) -> dict:
    """From what ``clients`` participants send, divided among the ranks, to the root's vectors."""
    algorithm, dtype = algorithms.create(config), set_precision(config.precision)
    planned = plan_transport(world, size, aggregate.wire_type(config, dtype), device, "auto")
    aggregation = aggregate.create(world, config, algorithm, planned, dtype)
    mine = np.array_split(np.arange(clients), world.size)[world.rank]
    ones, which = np.ones(len(mine)), np.arange(len(mine))
    rows = {name: torch.rand(len(mine), size, dtype=dtype, device=device) for name in algorithm.up}
    scalars = dict.fromkeys(algorithm.scalars, ones)
    aggregation.begin(len(mine))
    aggregation.add(Sent(mine, ones, ones, ones, scalars, [Part(slice(None), rows, which, shared=False)]))

    def once() -> None:
        aggregation.reduce(np.arange(clients), communicates=True)
        synchronize(device)

    seconds = timing.slowest_rank(world, once, repeats)
    before = world.bytes_moved
    once()
    planned.close()
    return {
        "what": f"sums {config.sums}, robust {config.robust}, {clients} participants",
        "ranks": world.size,
        "vectors": len(algorithm.up),
        "reduce_seconds": seconds,
        "bytes_mpi": world.bytes_moved - before,
    }


SUMS: list[dict[str, str]] = [{}, {"sums": "exact"}, *({"robust": name} for name in ("clip", "median", "trimmed"))]


def table(report: dict[str, Any]) -> str:
    lines = [
        f"fedlada_mpi {__version__} on {report['device']}, torch {report['torch']}, {report['mpi']}, {report['date']}",
        "",
    ]
    for name, limits in report.get("roofline", {}).items():
        copy, product = limits["copy_bytes_per_s"] / 1e9, limits["product_flop_per_s"] / 1e12
        lines.append(f"roofline {name}: copy {copy:,.0f} GB/s, products {product:,.2f} TFLOP/s")
    several = len({row["model"] for row in report["results"] if "model" in row}) > 1
    for row in report["results"]:
        text = f"{row['model'] + ': ' if several and 'model' in row else ''}{row['what']}"
        text = f"{text:<48}"
        if "seconds" in row:
            text += f" {row['seconds']:9.4f} s  {row['images_per_s']:11,.0f} images/s"
        if "floor_seconds" in row:
            floor, share, first = (row[k] for k in ("floor_seconds", "fraction_of_floor", "first_round_seconds"))
            text += f"  floor {floor:.4f} s ({share:.0%})  first {first:.1f} s"
        if "measured_bytes_per_client" in row:
            measured, predicted = (row[f"{k}_bytes_per_client"] / 1e6 for k in ("measured", "predicted"))
            text += f"  {measured:,.0f} MB/client (predicted {predicted:,.0f})"
        if "start_seconds" in row:
            text += f" {row['start_seconds']:9.2f} s"
        if "baseline_seconds" in row:
            text += f"  baseline {row['baseline_seconds']:.4f} s ({row['times_faster_than_baseline']:.1f}x)"
        if "bytes_mpi" in row:
            text += f"  {row['vectors']} vectors  {row['bytes_mpi'] / 1e6:,.0f} MB between ranks"
        text += "".join(f"  {k[:-8]} {1e3 * row[k]:.1f} ms" for k in ("bcast_seconds", "reduce_seconds") if k in row)
        lines.append(text)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m fedlada_mpi.bench", description=__doc__, formatter_class=form)
    parser.add_argument("--dataset", default="cifar10", choices=SHAPES, help="whose shapes and settings [cifar10]")
    parser.add_argument("--model", nargs="*", default=[], help="built-in, torchvision:NAME or your own")
    parser.add_argument("--algorithm", nargs="*", default=["fedlada"], help="methods [fedlada]")
    parser.add_argument("--precision", nargs="*", default=[], help="[tf32 bf16 on a GPU, fp32 on a CPU]")
    parser.add_argument("--participants", type=int, nargs="*", default=[10, 1], help="in a round [10 1]")
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds [20 on a GPU, 3 on a CPU]")
    parser.add_argument("--local-steps", type=int, default=0, help="[the data set's]")
    parser.add_argument("--only", nargs="*", default=SECTIONS, choices=SECTIONS, help="what to time [all]")
    parser.add_argument("--engine", default="auto", help="as for fedlada_mpi.run [auto]")
    parser.add_argument("--compile", default="auto", help="as for fedlada_mpi.run [auto]")
    parser.add_argument("--device", default="auto", help="as for fedlada_mpi.run [auto]")
    parser.add_argument("--baseline", action="store_true", help="also time an ordinary client-by-client loop")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    try:
        options = parser.parse_all(argv)
        if options.json and not Path(options.json).parent.is_dir():
            raise UserError(f"--json: there is no directory {Path(options.json).parent}")
        with mpi.World() as world:
            measure(world, options)
    except UserError as error:
        if mpi.is_root():
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def measure(world: mpi.World, options: argparse.Namespace) -> None:
    """Time what was asked for, and report it."""
    device = choose_device(world, resolve({"device": options.device}).config, asked_threads(world))
    cuda = device.type == "cuda"
    repeats = options.rounds or (20 if cuda else 3)
    precisions = options.precision or (["tf32", "bf16"] if cuda else ["fp32"])
    report: dict[str, Any] = {
        "device": device_name(device) + ("" if cuda else f", {torch.get_num_threads()} threads"),
        "torch": torch.__version__,
        "mpi": mpi.implementation(),
        "date": time.strftime("%Y-%m-%d"),
        "roofline": {},
        "results": [],
    }
    flags = {"dataset": options.dataset, "engine": options.engine, "compile": options.compile}
    flags |= {"local_steps": options.local_steps} if options.local_steps else {}
    named = options.model or [resolve(flags).config.model]
    results = report["results"]
    onednn = bool(torch.backends.mkldnn.enabled)
    if "start" in options.only:
        config = resolve({**flags, "model": named[0], "precision": precisions[0], "algorithm": options.algorithm[0]})
        set_precision(precisions[0])
        row = world.on_root(partial(first_step, config.config, options.participants[0], device))
        results += [row] if row else []
    for precision in precisions if {"roofline", "round", "evaluation"} & set(options.only) else ():
        set_onednn(onednn)  # which bf16 may have switched off
        set_precision(precision)
        limits = world.broadcast_json(world.on_root(partial(roofline, device, precision)))
        report["roofline"][precision] = limits
        for model in named:
            own = {**flags, "model": model, "precision": precision}
            for name in options.algorithm if "round" in options.only else ():
                config = resolve({**own, "algorithm": name})
                for clients in options.participants:
                    what = (config.config, clients, device, limits, repeats, options.baseline)
                    results.append(rounds(world, *what))
            if "evaluation" in options.only:
                row = world.on_root(partial(evaluation, world, resolve(own).config, device, max(3, repeats // 4)))
                results += [row] if row else []
        add_memory_slopes(results)
    if world.size > 1 and "transport" in options.only:
        network = models.build(named[0], *reversed(SHAPES[options.dataset][:2]))
        kinds = ["direct", "shared", "staged"] if cuda else ["shared", "host"]
        results += transport(world, network.layout.size, device, kinds, repeats)
    if "sums" in options.only:
        size = models.build(named[0], *reversed(SHAPES[options.dataset][:2])).layout.size
        for clients in (n for n in options.participants if n > 2):
            for which in SUMS:
                config = resolve({**flags, **which, "algorithm": options.algorithm[0], "precision": precisions[0]})
                results.append(sums(world, config.config, size, clients, device, repeats))
    if world.rank == 0:
        print(table(report), flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
