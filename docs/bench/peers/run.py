"""Rounds of other federated frameworks and of fedlada_mpi: the same two workloads, one after another.

    python docs/bench/peers/run.py --environments DIR                           install what is missing, then run all
    python docs/bench/peers/run.py --environments DIR --only flower pfl
    python docs/bench/peers/run.py --environments DIR --json docs/bench/peers/x86-64.json
    python docs/bench/peers/run.py --environments DIR --json FILE --again       the rounds of another session as well
    python docs/bench/peers/run.py --environments DIR --install                 only install
    python docs/bench/peers/run.py --environments DIR --rounds 4                a trial

Each framework is installed by its name into an environment of its own below ``DIR``; all of them see the torch of
``DIR/base``, unless they need another one. pip's own settings (``PIP_INDEX_URL`` and the like) decide where from. A run
that is over its time limit is ended, and so is everything that a run has left behind. ``common.py`` has the workloads,
``frameworks.py`` the versions and the ways, ``table.py`` puts the results into the pages.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from frameworks import BASE, DIGITS, FRAMEWORKS, MOVING, ROOT, ROUNDS, WARM_UP, Framework, Way
from table import table

HERE = Path(__file__).resolve().parent
MARK = "PEERS_RUN"  # in the environment of every process that a run starts
# Less than a right run may end with: with 30 seeds for clients and batches, the plain loop ends between 0.785 and
# 0.906, and between 0.747 and 0.899 with four clients in all. After five rounds it has at most 0.5.
LEAST_ACCURACY = 0.7

# What ``jobs/mpi.env`` has: more ranks than cores, a waiting rank yields its core.
MPI_SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def install(
    environment: Path, packages: tuple[str, ...], base: Path | None = None, afterwards: tuple[str, ...] = ()
) -> str:
    """Make an environment unless it is there; returns why that failed, or nothing."""
    stamp, wanted = environment / "installed.json", [*packages, *afterwards]
    if stamp.exists() and json.loads(stamp.read_text()) == wanted:
        return ""
    print(f"installing {environment.name}: {' '.join(wanted) or 'nothing'}", file=sys.stderr, flush=True)
    shutil.rmtree(environment, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    if base is not None:
        (site,) = environment.glob("lib/python*/site-packages")
        (shared,) = base.glob("lib/python*/site-packages")
        (site / "shared_base.pth").write_text(f"{shared}\n")
    for names in filter(None, (packages, afterwards)):
        command = [python_of(environment), "-m", "pip", "install", *names]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return "pip: " + last_line(done.stderr)
    stamp.write_text(json.dumps(wanted))
    return ""


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR|\w*Error|\w*Exception)\b.*:", line)]
    return (errors or lines or ["no output"])[-1][:300]


def versions(environment: Path, names: tuple[str, ...]) -> dict[str, str]:
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    done = subprocess.run(
        [python_of(environment), "-c", code, *names], capture_output=True, text=True, check=True, cwd="/"
    )
    return json.loads(done.stdout)


def marked(mark: str) -> Iterator[int]:
    """Processes of a run, also those whose parents have ended."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found = f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0")
        except OSError:  # ended, or another user's
            continue
        if found:
            yield int(path.parent.name)


def end_all(mark: str) -> int:
    """End what is left of a run; returns how many processes there were."""
    ended = set()
    for _ in range(50):
        left = list(marked(mark))
        if not left:
            break
        for process in left:
            ended.add(process)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.1)
    return len(ended)


def busy_cores(seconds: float = 1.0) -> float:
    """How many cores other programs use just now."""

    def busy() -> float:
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")

    before = busy()
    time.sleep(seconds)
    return (busy() - before) / seconds


def words(framework: Framework, way: Way, python: Path, workload: str, rounds: int) -> list[str]:
    """The command but for the file of the record."""
    launcher = [word.format(bin=python.parent) for word in way.launcher]
    return [*launcher, str(python), *way.module, str(framework.driver), workload, way.word, "--rounds", str(rounds)]


def shown(framework: Framework, way: Way, workload: str, rounds: int) -> str:
    """The command as a reader types it in the environment."""
    command = words(framework, way, Path("bin/python"), workload, rounds)
    return " ".join(word.removeprefix("bin/").replace(f"{ROOT}/", "") for word in command)


def measured(framework: Framework, way: Way, workload: str, environment: Path, most: int) -> dict[str, Any]:
    """One run: its times and checks, or why there are none."""
    rounds = min(way.rounds or ROUNDS[workload], most)
    folder, mark = Path(tempfile.mkdtemp(prefix="peers-")), uuid.uuid4().hex
    record, log = folder / "record.json", folder / "log.txt"
    row: dict[str, Any] = {"framework": framework.name, "workload": workload, "way": way.name}
    row["command"] = f"OMP_NUM_THREADS={way.threads} {shown(framework, way, workload, rounds)}"
    row["busy_before"] = round(busy_cores(), 2)
    settings = {
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(HERE),
        "OMP_NUM_THREADS": str(way.threads), "CUDA_VISIBLE_DEVICES": "", "PEERS_FOLDER": str(folder), MARK: mark,
        "RAY_TMPDIR": str(folder), **MPI_SETTINGS, **framework.settings,
    }  # fmt: skip
    command = [*words(framework, way, python_of(environment), workload, rounds), "--record", str(record)]
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=folder,
            env={**os.environ, **settings}, start_new_session=True,
        )  # fmt: skip
        try:
            if not ended(process, record, way.limit):
                row["problem"] = f"ended after {way.limit} s"
        finally:
            row["total_seconds"] = round(time.monotonic() - start, 1)
            row["left_behind"] = end_all(mark)
            process.wait()
            time.sleep(2)  # while the system frees their memory
    found = json.loads(record.read_text()) if record.exists() else {"rounds": 0, "seconds": []}
    row |= judged(found, workload, rounds)
    if "problem" not in row and found["rounds"] < rounds:
        row["problem"] = last_line(log.read_text(errors="replace"))
    if keep := os.environ.get("PEERS_LOGS"):
        shutil.copy(log, Path(keep) / f"{framework.name}-{workload}-{way.name.replace(' ', '_')}.txt")
    shutil.rmtree(folder, ignore_errors=True)
    return row


def ended(process: subprocess.Popen, record: Path, limit: float) -> bool:
    """Wait until a run has ended by itself, or has its result and does not end within some seconds."""
    last, results = time.monotonic() + limit, 0
    while process.poll() is None and results < 10:
        if time.monotonic() > last:
            return False
        time.sleep(0.5)
        results += record.exists() and not {"error", "accuracy"}.isdisjoint(json.loads(record.read_text()))
    return True


def judged(found: dict[str, Any], workload: str, rounds: int) -> dict[str, Any]:
    """Of a record: the timed rounds, and whether the result is right."""
    timed = found["seconds"][WARM_UP - 1 :]  # the first gap is that between the ends of rounds 1 and 2
    row: dict[str, Any] = {"rounds": found["rounds"], "seconds": [round(value, 5) for value in timed]}
    if timed:
        row |= {"median": statistics.median(row["seconds"]), "min": min(row["seconds"]), "max": max(row["seconds"])}
    if workload == MOVING and "error" in found:
        row["error"] = found["error"]
        row["right"] = found["error"] <= 1
    if workload == DIGITS and "accuracy" in found:
        row["accuracy"] = round(found["accuracy"], 4)
        row["right"] = found["rounds"] < ROUNDS[DIGITS] or found["accuracy"] >= LEAST_ACCURACY
    if row.get("right") is False:
        row["problem"] = "the result is wrong"
    return row


def pooled(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two sessions of the same run: all rounds of both, and the worse of their results."""
    if not (first.get("right") and second.get("right")):
        return first if "problem" in first else second
    seconds = first["seconds"] + second["seconds"]
    worse = {name: max(first[name], second[name]) for name in ("busy_before", "left_behind", "total_seconds")}
    if "accuracy" in first:
        worse["accuracy"] = min(first["accuracy"], second["accuracy"])
    else:
        worse["error"] = max(first["error"], second["error"])
    times = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
    return {**first, **worse, **times, "seconds": seconds, "sessions": first.get("sessions", 1) + 1}


def machine() -> dict[str, Any]:
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {model[1] if model else platform.processor()}",
        "system": " ".join((platform.system(), platform.machine(), *platform.libc_ver())),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def key(row: dict[str, Any]) -> tuple[str, ...]:
    return row["framework"], row["workload"], row["way"]


def line(row: dict[str, Any]) -> str:
    times = f"{row['median']:.4f} s ({row['min']:.4f} to {row['max']:.4f})" if "median" in row else "no times"
    check = f"accuracy {row['accuracy']}" if "accuracy" in row else f"error {row.get('error', float('nan')):.2f}"
    more = f", {row['problem']}" if "problem" in row else ""
    what = f"{row['framework']}, {row['workload']}, {row['way']}"
    return f"{what}: {times}, {row['rounds']} rounds, {check}, {row['total_seconds']} s in all{more}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=[each.name for each in FRAMEWORKS], metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    parser.add_argument("--again", action="store_true", help="add the rounds to those that the file of --json has")
    parser.add_argument("--install", action="store_true", help="only install")
    parser.add_argument("--rounds", type=int, default=10**6, help="at most, of each run")
    parser.add_argument("--limit", type=int, help="seconds of each run, on a slow machine")
    parser.add_argument("--workload", choices=(MOVING, DIGITS), help="only this one")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # not without ending the run
    folder = options.environments.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if why := install(folder / "base", BASE):
        raise SystemExit(f"base: {why}")
    report: dict[str, Any] = {**machine(), "versions": {}, "not_installed": {}, "results": []}
    report["base"] = versions(folder / "base", BASE)
    if options.again:
        report = json.loads(options.json.read_text())
    chosen = [each for each in FRAMEWORKS if not options.only or each.name in options.only]
    for each in chosen:
        if why := install(folder / each.name, each.packages, folder / "base", each.afterwards):
            report["not_installed"][each.name] = why
        else:
            report["versions"][each.name] = versions(folder / each.name, ("torch", each.distribution, *each.also))
    report.setdefault("load_before", []).append(round(os.getloadavg()[0], 2))
    before = {key(row): row for row in report["results"]}
    for workload in (MOVING, DIGITS) if not options.install else ():
        if options.workload not in (None, workload):
            continue
        for each in chosen:
            for way in each.ways[workload] if each.name in report["versions"] else ():
                limited = replace(way, limit=options.limit or way.limit)
                row = measured(each, limited, workload, folder / each.name, options.rounds)
                print(line(row), file=sys.stderr, flush=True)
                if (known := before.get(key(row))) is not None:
                    report["results"][report["results"].index(known)] = pooled(known, row)
                else:
                    report["results"].append(row)
                if options.json:
                    options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.install:
        print(json.dumps({**report["versions"], **report["not_installed"]}, indent=1))
        return 0
    print(table(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
