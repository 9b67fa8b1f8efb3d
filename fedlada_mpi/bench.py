"""How fast this machine trains, and how near that is to what its hardware allows.

    python -m fedlada_mpi.bench                                    one rank: roofline, rounds, evaluation
    mpirun -n 11 python -m fedlada_mpi.bench --only transport      Bcast and Reduce between ranks
    mpirun -n 11 python -m fedlada_mpi.bench --only sums           --sums and --robust, without the training
    python -m fedlada_mpi.bench --baseline                         compared with an ordinary client-by-client loop
    python -m fedlada_mpi.bench --baseline --model lenet mlp my_models:net    built-in models and your own
    mpirun -n 4 python -m fedlada_mpi.bench --baseline --only round           the participants divided among the ranks
    python -m fedlada_mpi.bench --only round --dataset shakespeare --model gpt --length 128 --batch-size 16    text
    python -m fedlada_mpi.bench --only round --dataset shakespeare --model hf:FOLDER --tokens 50257 --lora 8   adapters

The data are random, of the data set's shape: the times depend on shapes alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from torch import Tensor

from . import algorithms, models, tasks
from .algorithms import Round, Vectors, resolve
from .algorithms.fedlada import LocalAdam
from .algorithms.hook_draws import server_draws
from .gpu.graphs import capture_on
from .models.form import Stored, as_stored
from .models.lora import Lora
from .mpi import timing
from .mpi.plan import plan_transport
from .rounds import aggregate
from .rounds.aggregate import Part, RankSums, Sent
from .rounds.batches import Batch, LocalData, Normalise, Normaliser, PlanBuffer, gather, local_steps, plan
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
from .rounds.examples import Examples, Resident
from .rounds.gradients import create_engine
from .rounds.trainer import Trainer
from .rounds.vectors import named_rows
from .settings import MOST, Config, Parser, Setting, check_value
from .support import disk
from .support.processes import since_start
from .support.version import __version__
from .tasks import About, Array

# Of images: their shape, the classes, and how many a client has.
SHAPES = {"digits": ((8, 8, 1), 10, 30), "cifar10": ((32, 32, 3), 10, 500), "cifar100": ((32, 32, 3), 100, 500)}
SHAPES["tinyimagenet"] = ((64, 64, 3), 200, 1000)
TEXT = "shakespeare"
SECTIONS = ("start", "roofline", "round", "evaluation", "transport", "sums")


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


class Images:
    """Random images with classes."""

    what = "images"

    def __init__(self, dataset: str):
        shape, classes, self.of_client = SHAPES[dataset]
        self.about = About(Array("uint8", shape), Array("int64"), classes=classes, image=True)
        self.task = tasks.create("classification", self.about)

    def examples(self, count: int, device: torch.device) -> Examples:
        draw = np.random.default_rng(0)
        assert isinstance(self.about.inputs, Array)
        pixels = draw.integers(0, 256, (count, *self.about.inputs.shape), np.uint8)
        labels = draw.integers(0, self.about.classes, count)
        return Resident(torch.from_numpy(pixels).to(device), torch.from_numpy(labels).to(device))

    def normalise(self, dtype: torch.dtype, device: torch.device) -> Normalise:
        assert isinstance(self.about.inputs, Array)
        channels = self.about.inputs.shape[2]
        return Normaliser(*(torch.full((channels,), 0.5, dtype=dtype, device=device) for _ in range(2)))


class Text:
    """Random rows of tokens; after each of them comes the next."""

    what, of_client = "rows", 500

    def __init__(self, length: int, tokens: int):
        row = Array("int64", (length,), tokens)
        self.about = About(row, row, classes=tokens)
        self.task = tasks.create("next-token", self.about)

    def examples(self, count: int, device: torch.device) -> Examples:
        assert isinstance(self.about.inputs, Array)
        shape = (count, *self.about.inputs.shape)
        rows = torch.from_numpy(np.random.default_rng(0).integers(0, self.about.classes, shape)).to(device)
        return Resident(rows, rows.roll(-1, 1))

    def normalise(self, dtype: torch.dtype, device: torch.device) -> Normalise:
        return as_stored


@dataclass(frozen=True)
class Workload:
    """What is trained: random data, and settings of a run."""

    data: Images | Text
    config: Config

    @classmethod
    def of_images(cls, config: Config) -> Workload:
        return cls(Images(config.dataset), config)

    def network(self) -> models.Network:
        c = self.config
        about = (c.model, self.data.task.outputs(), self.data.about, c.activation)
        lora = Lora.of(c.record())
        return models.build(*about, stacked=c.engine != "generic", norm=c.norm, smu_mu=c.smu_mu, lora=lora)


class Bench:
    """A trainer on random data, as one rank of a run would have it."""

    def __init__(self, work: Workload, clients: int, device: torch.device):
        config = replace(work.config, clients=clients, participation=1.0)  # all of them, every round
        self.config, self.device, self.clients, self.data = config, device, clients, work.data
        dtype = set_precision(config.precision)
        each, normalise = work.data.of_client, work.data.normalise(dtype, device)
        examples, starts = work.data.examples(clients * each, device), np.arange(clients) * each
        data = LocalData(examples, np.arange(clients), starts, np.full(clients, each), normalise)
        self.network = work.network()
        self.algorithm = algorithms.create(config, self.network.layout.tensors)
        self.loss = tasks.client_loss(work.data.task)
        engine = create_engine(self.network, config, device, self.loss)
        capture = capture_on(device) if engine.capturable else None
        self.trainer = Trainer(config, self.algorithm, engine, data, device, dtype, capture)
        scores = tasks.scores(work.data.task, work.data.task.outputs() or ())
        self.evaluator = Evaluator(engine, normalise, self.trainer.compute, capture, scores)
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
        state vector read and written once per step, weights and gradients twice more for the two passes.

        Of frozen weights there is no gradient, which is a third of the arithmetic.
        """
        images = self.clients * self.steps * self.trainer.buffers.batch_width
        passes = 2 * (1 + len(self.algorithm.slots)) + 1 + len(self.algorithm.client_state) + 4
        size = passes * self.trainer.buffers.live * 4 * self.clients * self.steps
        passes = 4 if self.network.lora else 6
        return passes * self.network.work * images / limits["product_flop_per_s"] + size / limits["copy_bytes_per_s"]

    def _optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        """Torch's own, for the baseline."""
        lr, decay = self.config.lr, self.config.weight_decay
        trained = [p for p in module.parameters() if p.requires_grad]
        if isinstance(self.algorithm, LocalAdam):
            return torch.optim.AdamW(trained, lr=lr, amsgrad=True, weight_decay=decay)
        return torch.optim.SGD(trained, lr=lr, weight_decay=decay)

    def baseline(self) -> None:
        """The round as usually written: one client after another, eager, with torch's own layers; the same batches."""
        config, data, device = self.config, self.trainer.data, self.device
        width, all_examples = self.trainer.buffers.batch_width, data.examples.take(slice(None))
        module = self.network.module.to(device)
        start = {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}
        total = {n: torch.zeros_like(p) for n, p in start.items()}
        for client in range(self.clients):
            with torch.no_grad():
                for n, value in start.items():
                    module.get_parameter(n).copy_(value)
            optimizer = self._optimizer(module)
            one = slice(client, client + 1)
            whose = (data.client_ids[one], data.starts[one], data.sizes[one])
            batches = PlanBuffer(self.steps, 1, width, torch.float32, device)
            batches.load(plan(config, self.t, *whose, width, torch.float32), data.examples.labels)
            for step in range(self.steps):
                batch = batches.at(step, 1)
                optimizer.zero_grad()
                self._loss_of(module, all_examples, batch).backward()
                torch.nn.utils.clip_grad_norm_(module.parameters(), config.clip)
                optimizer.step()
            for n, value in start.items():
                total[n] += value - module.get_parameter(n).detach()

    def _loss_of(self, module: torch.nn.Module, examples: tuple[Stored, Tensor], batch: Batch) -> Tensor:
        (inputs, targets), normalise = examples, self.trainer.data.normalise
        assert isinstance(inputs, Tensor)
        if isinstance(normalise, Normaliser):
            augment = self.config.augment == "paper"
            images = gather(inputs, batch, normalise, torch.float32, augment)[0].permute(0, 3, 1, 2)
            return F.cross_entropy(module(images), batch.labels[0])
        outputs = module(inputs[batch.index[0]])
        return self.loss(outputs[None], targets[batch.index], batch.weight)[0]


def rounds(
    world: mpi.World,
    work: Workload,
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
    bench, config = Bench(work, max(1, mine), device), work.config
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
        "unit": work.data.what,
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


def first_step(work: Workload, clients: int, device: torch.device) -> dict:
    """From the start of the process, imports included, to the end of the first local step."""
    Bench(replace(work, config=replace(work.config, local_steps=1)), clients, device).round()
    synchronize(device)
    return {
        "what": f"start to first step, {work.config.precision}, compile {work.config.compile}",
        "start_seconds": since_start(),
    }


def evaluation(world: mpi.World, work: Workload, device: torch.device, repeats: int) -> dict:
    count = 120 if device.type == "cuda" else 2
    bench = Bench(work, count, device)
    limit_threads(world, device, bench.network.work * bench.evaluation().batch // 3)
    seconds = statistics.median(timed(bench.evaluation(), device, repeats))
    images = len(bench.trainer.data.examples)
    return {
        "what": f"evaluating {images:,} {work.data.what}, {work.config.precision}",
        "unit": work.data.what,
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
            text += f" {row['seconds']:9.4f} s  {row['images_per_s']:11,.0f} {row.get('unit', 'images')}/s"
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
    known = (*SHAPES, TEXT)
    parser.add_argument("--dataset", default="cifar10", choices=known, help="whose shapes and settings [cifar10]")
    parser.add_argument("--length", type=int, default=80, help="of text: tokens of a row [80]")
    parser.add_argument("--tokens", type=int, default=90, help="of text: different ones [90]")
    parser.add_argument("--batch-size", type=int, default=0, help="[the data set's]")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters on the model's linear layers [none]")
    parser.add_argument("--lora-on", default="", help="as for fedlada_mpi.run [all]")
    parser.add_argument("--model", nargs="*", default=[], help="built-in, torchvision:NAME or your own")
    parser.add_argument("--algorithm", nargs="+", default=["fedlada"], help="methods [fedlada]")
    parser.add_argument("--precision", nargs="*", default=[], help="[tf32 bf16 on a GPU, fp32 on a CPU]")
    parser.add_argument("--participants", type=int, nargs="+", default=[10, 1], help="in a round [10 1]")
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds [20 on a GPU, 3 on a CPU]")
    parser.add_argument("--local-steps", type=int, default=0, help="[the data set's]")
    parser.add_argument("--only", nargs="+", default=SECTIONS, choices=SECTIONS, help="what to time [all]")
    parser.add_argument("--engine", default="auto", help="as for fedlada_mpi.run [auto]")
    parser.add_argument("--compile", default="auto", help="as for fedlada_mpi.run [auto]")
    parser.add_argument("--device", default="auto", help="as for fedlada_mpi.run [auto]")
    parser.add_argument("--baseline", action="store_true", help="also time an ordinary client-by-client loop")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    try:
        options = parser.parse_all(argv)
        _check(options)
        with mpi.World() as world:
            measure(world, options)
    except UserError as error:
        if mpi.is_root():
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _check(options: argparse.Namespace) -> None:
    for name, least in (("participants", 1), ("rounds", 0), ("length", 1), ("tokens", 1)):
        given = getattr(options, name)
        for value in given if isinstance(given, list) else [given]:
            check_value(Setting(value, "", least=least, most=MOST[int]), value, name)
    if options.json and not Path(options.json).parent.is_dir():
        raise UserError(f"--json: there is no directory {Path(options.json).parent}")
    if options.json and Path(options.json).is_dir():
        raise UserError(f"--json: got {options.json}, which is a directory, expected a file")


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
    asked = {name: getattr(options, name) for name in ("local_steps", "batch_size", "lora", "lora_on")}
    flags |= {name: value for name, value in asked.items() if value}
    data = Text(options.length, options.tokens) if options.dataset == TEXT else Images(options.dataset)

    def workload(**more: str) -> Workload:
        return Workload(data, resolve({**flags, **more}).config)

    named = options.model or [resolve(flags).config.model]
    results = report["results"]
    onednn = bool(torch.backends.mkldnn.enabled)
    if "start" in options.only:
        work = workload(model=named[0], precision=precisions[0], algorithm=options.algorithm[0])
        set_precision(precisions[0])
        row = world.on_root(partial(first_step, work, options.participants[0], device))
        results += [row] if row else []
    for precision in precisions if {"roofline", "round", "evaluation"} & set(options.only) else ():
        set_onednn(onednn)  # which bf16 may have switched off
        set_precision(precision)
        limits = world.broadcast_json(world.on_root(partial(roofline, device, precision)))
        report["roofline"][precision] = limits
        for model in named:
            for name in options.algorithm if "round" in options.only else ():
                work = workload(model=model, precision=precision, algorithm=name)
                for clients in options.participants:
                    results.append(rounds(world, work, clients, device, limits, repeats, options.baseline))
            if "evaluation" in options.only:
                work = workload(model=model, precision=precision)
                row = world.on_root(partial(evaluation, world, work, device, max(3, repeats // 4)))
                results += [row] if row else []
        add_memory_slopes(results)
    if world.size > 1 and "transport" in options.only:
        network = workload(model=named[0]).network()
        kinds = ["direct", "shared", "staged"] if cuda else ["shared", "host"]
        results += transport(world, network.layout.size, device, kinds, repeats)
    if "sums" in options.only:
        size = workload(model=named[0]).network().layout.size
        for clients in (n for n in options.participants if n > 2):
            for which in SUMS:
                config = resolve({**flags, **which, "algorithm": options.algorithm[0], "precision": precisions[0]})
                results.append(sums(world, config.config, size, clients, device, repeats))
    if world.rank == 0:
        print(table(report), flush=True)
        if options.json:
            with disk.writing(Path(options.json), "then give the same command again"):
                Path(options.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
