"""How close ``--estimate`` comes to runs: both, one after the other, for a list of settings.

    python docs/bench/estimates.py                        on the CPU, or on the GPU where there is one
    python docs/bench/estimates.py --json estimates.json --repeats 5
    python docs/bench/estimates.py --cpu-time             seconds of the processor, on a machine that others use, too

Every repetition is a process of its own, or as many as there are ranks; the table has the medians. The seconds of a
whole run are those from the start of the ranks' processes to their end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from fedlada_mpi.support.launcher import launched_processes, settings

Case = tuple[str, int, list[str]]  # name, ranks, arguments of a run


def case(name: str, ranks: int, rounds: int, line: str) -> Case:
    return name, ranks, [*line.split(), "--rounds", str(rounds)]


CPU = [
    case("fedlada, cnn", 1, 40, "--algorithm fedlada"),
    case("scaffold, cnn", 1, 40, "--algorithm scaffold"),
    case("fedavg, mlp", 1, 100, "--algorithm fedavg --model mlp"),
    case("fedadam, cnn, uneven clients", 1, 40, "--algorithm fedadam --size-sigma 1 --batch-size 10"),
    case("fedlada, lenet, 32x32", 1, 6, "--algorithm fedlada --model lenet --dataset {images} --local-steps 10"),
    case("fedlada, cnn", 2, 40, "--algorithm fedlada"),
    case("scaffold, mlp", 4, 60, "--algorithm scaffold --model mlp"),
]
RESNET18 = "--model resnet18 --dataset {images}"
GPU = [
    case("fedlada, resnet18, tf32", 1, 100, f"--algorithm fedlada {RESNET18} --precision tf32"),
    case("fedlada, resnet18, bf16", 1, 100, f"--algorithm fedlada {RESNET18} --precision bf16"),
    case("scaffold, resnet18, tf32", 1, 100, f"--algorithm scaffold {RESNET18} --precision tf32"),
    case("fedavg, lenet", 1, 100, "--algorithm fedavg --dataset {images} --model lenet"),
    case("fedlada, resnet18, tf32", 4, 60, f"--algorithm fedlada {RESNET18} --precision tf32"),
]


def make_images(folder: Path, clients: int, each: int) -> Path:
    """Random images of CIFAR's size: times depend on shapes alone."""
    from data_prep import PrepareSettings, prepare

    draw, count, tested = np.random.default_rng(0), clients * each, min(10_000, clients * each // 5)
    arrays = {
        f"{part}_{name}": draw.integers(0, most, (rows, *shape)).astype(kind)
        for part, rows in (("train", count), ("test", tested))
        for name, most, shape, kind in (("images", 256, (32, 32, 3), np.uint8), ("labels", 10, (), np.int64))
    }
    np.savez(folder / "images.npz", **arrays)
    out = folder / "images"
    prepare(PrepareSettings("npz", out=out, raw=folder / "images.npz", clients=clients, silos=4, partition="iid"))
    return out


def busy(seconds: dict[str, float]) -> float:
    """The phases of a round, each of the slowest rank, without evaluation: ranks that wait take no processor time."""
    return sum(value for phase, value in seconds.items() if phase not in ("total", "eval"))


def rank(what: str, folder: Path, cpu_time: bool, argv: list[str]) -> int:
    """One rank of an estimate or of a run; its numbers are written to ``folder``."""
    if cpu_time:
        time.perf_counter = time.process_time
    from fedlada_mpi.support import processes

    if cpu_time:
        processes.since_start = time.process_time
    from fedlada_mpi import run
    from fedlada_mpi.session.estimate import estimate, probe

    if cpu_time and launched_processes() > 1:

        def recorded(self: probe.Probe, record: dict[str, Any]) -> None:
            self.seconds = {**record["seconds"], "total": busy(record["seconds"])}

        probe.Probe.recorded = recorded

    status, found = 0, None
    if what == "estimate":
        request, _ = run.parse([*argv, "--estimate"])
        found = estimate(request)
    else:
        status = run.main(argv)
    import torch

    about: dict[str, Any] = {"seconds": processes.since_start(), "host_memory": processes.peak_memory()}
    about["gpu_memory"] = torch.cuda.max_memory_reserved() if torch.cuda.is_initialized() else 0
    about["estimate"] = found.record() if found else None
    (folder / f"{platform.node()}-{os.getpid()}.json").write_text(json.dumps(about))
    return status


def start(what: str, ranks: int, argv: list[str], cpu_time: bool) -> list[dict[str, Any]]:
    """What the ranks of an estimate or a run report."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["mpirun", "-n", str(ranks)] if ranks > 1 else []
        own = ["--rank", what, "--folder", folder, *(["--cpu-time"] if cpu_time else []), "--"]
        words = [*launcher, sys.executable, __file__, *own, *argv]
        done = subprocess.run(words, env={**settings(), **os.environ}, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return [json.loads(path.read_text()) for path in Path(folder).iterdir()]


def compared(name: str, ranks: int, argv: list[str], repeats: int, cpu_time: bool, folder: Path) -> dict[str, Any]:
    """An estimate and a run in turns; medians of both."""
    estimates, runs, load = [], [], []
    by_phases = cpu_time and ranks > 1

    def seconds_of(seconds: dict[str, float]) -> float:
        return busy(seconds) if by_phases else seconds["total"] - seconds["eval"]

    for repeat in range(repeats):
        out = folder / f"run-{time.time_ns()}"
        line = [*argv, "--out", str(out)]
        load.append(os.getloadavg()[0])
        (found,) = [each["estimate"] for each in start("estimate", ranks, line, cpu_time) if each["estimate"]]
        estimates.append(found)
        ended = start("run", ranks, line, cpu_time)
        records = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
        runs.append(
            {
                "round": mean(seconds_of(r["seconds"]) for r in records[1:]),
                "total": max(each["seconds"] for each in ended),
                **{part: max(each[part] for each in ended) for part in ("host_memory", "gpu_memory")},
                **{part: sum(r[part] for r in records) for part in ("bytes_down", "bytes_up", "bytes_mpi")},
            }
        )
        done = f"{found['total']['expected']:.1f} s estimated, {runs[-1]['total']:.1f} s measured"
        print(f"{name}, {ranks} ranks, {repeat + 1} of {repeats}: {done}", file=sys.stderr, flush=True)
    parts = ("round",) if by_phases else ("round", "total")  # processors of several ranks work at the same time
    times = {part: [e[part]["expected"] for e in estimates] for part in parts}
    same = {part: estimates[0][part] == runs[0][part] for part in ("bytes_down", "bytes_up", "bytes_mpi")}
    row: dict[str, Any] = {
        "case": name,
        "ranks": ranks,
        "arguments": " ".join(argv),
        "load": median(load),
        "bytes": same,
    }
    for part in (*parts, "host_memory", "gpu_memory"):
        expected = times.get(part) or [e[part] for e in estimates]
        row[part] = {"estimated": expected, "measured": [r[part] for r in runs]}
    return row


def table(rows: list[dict[str, Any]]) -> str:
    on_gpu = any(any(row["gpu_memory"]["measured"]) for row in rows)
    memory, of = ("gpu_memory", "GPU") if on_gpu else ("host_memory", "host")
    lines = [
        f"| run | ranks | a round, s: estimated, measured | whole run, s | {of} memory of a rank, MB | bytes |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        cells = []
        for part, unit, digits in (("round", 1, 4), ("total", 1, 1), (memory, 1e6, 0)):
            if part not in row:
                cells.append("")
                continue
            expected, found = (median(row[part][how]) / unit for how in ("estimated", "measured"))
            cells.append(f"{expected:,.{digits}f}, {found:,.{digits}f} ({expected / found - 1:+.0%})")
        same = "equal" if all(row["bytes"].values()) else "differ"
        lines.append(f"| {row['case']} | {row['ranks']} | {' | '.join(cells)} | {same} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="*", help="only settings for these numbers of ranks")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--cpu-time", action="store_true", help="seconds of the processor")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("argv", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return rank(options.rank, options.folder, options.cpu_time, options.argv)
    import torch

    cuda = torch.cuda.is_available()
    cases = [each for each in (GPU if cuda else CPU) if options.ranks is None or each[1] in options.ranks]
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else f"{os.cpu_count()} cores of {_cpu()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": "of the processor" if options.cpu_time else "of the clock",
        "results": [],
    }
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        images = make_images(folder, *((100, 500) if cuda else (20, 50)))
        for name, ranks, argv in cases:
            line = [word.format(images=images) for word in argv]
            row = compared(name, ranks, [*line, "--data-dir", str(folder)], options.repeats, options.cpu_time, folder)
            report["results"].append({**row, "arguments": " ".join(argv)})
            if options.json:
                Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    print(table(report["results"]))
    return 0


def _cpu() -> str:
    from fedlada_mpi.rundir.provenance import cpu_model

    return cpu_model()


if __name__ == "__main__":
    raise SystemExit(main())
