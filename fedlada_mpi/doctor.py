"""Examine this machine and installation, line by line: what works, what is missing and the command that mends it.

    python -m fedlada_mpi.doctor
    mpirun -n 4 python -m fedlada_mpi.doctor
    srun -n 4 --mpi=pmix python -m fedlada_mpi.doctor --json doctor.json

Exit codes: 0 nothing failed on any rank, 1 otherwise. A warning is something that works, but slower or less than it could.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from . import __version__
from .errors import UserError

OK, WARN, FAIL = "ok", "warn", "FAIL"
PYTHON = (3, 10)
LEAST = {"numpy": "1.24", "h5py": "3.8", "matplotlib": "3.6", "pillow": "0", "tqdm": "0"}
LEAST_TORCH = "2.4"
RESNET18 = 11_279_112 * 4  # bytes of the largest vector that a preset moves
PATIENCE = 120  # seconds after which a check hangs: some rank is not there
# Before MPI has started, only the launcher's variables tell the ranks apart.
RANKS = (
    "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "FLUX_TASK_RANK", "PALS_RANKID", "SLURM_PROCID",
)  # fmt: skip
Found = tuple[str, ...]  # status, what was found, what to do


class Row(NamedTuple):
    name: str
    status: str
    found: str
    do: str = ""

    def __str__(self) -> str:
        return f"  {self.status:<4}  {self.name:<12}  {self.found}" + (f"\n{'':22}-> {self.do}" if self.do else "")


@dataclass
class Here:
    """What the checks learn for one another."""

    out: Path = Path("runs")
    speaks: bool = True
    world: Any = None
    place: int = 0
    ranks: list[dict[str, Any]] = field(default_factory=list)  # every rank's `facts`
    gpu: bool = False
    rows: list[Row] = field(default_factory=list)

    def mates(self) -> list[dict[str, Any]]:
        """The ranks that run on the same machine as this one."""
        return [r for r in self.ranks if r["machine"] == self.ranks[self.place]["machine"]] or [facts()]


class Check(NamedTuple):
    name: str
    examine: Callable[[Here], Found]
    mend: str
    needs: tuple[str, ...]

    def __call__(self, here: Here) -> Row:
        lost = [row.name for row in here.rows if row.name in self.needs and row.status == FAIL]
        if lost:
            return Row(self.name, WARN, f"not examined, because of {lost[0]}")
        try:
            return Row(self.name, *self.examine(here))
        except UserError as error:
            return Row(self.name, FAIL, str(error))
        except Exception as error:
            line = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
            return Row(self.name, FAIL, f"{type(error).__name__}: {line.strip()}", self.mend)


CHECKS: list[Check] = []


def check(name: str, mend: str = "", needs: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    def register(examine: Callable[[Here], Found]) -> Callable[[Here], Found]:
        CHECKS.append(Check(name, examine, mend, needs))
        return examine

    return register


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def facts(gpu: str = "") -> dict[str, Any]:
    with contextlib.suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return {"host": platform.node(), "machine": machine, "cores": sorted(os.sched_getaffinity(0)), "gpu": gpu}
    return {"host": platform.node(), "machine": platform.node(), "cores": [*range(os.cpu_count() or 1)], "gpu": gpu}


def share(world: Any, item: Any) -> list[Any]:
    """Every rank's small item, on every rank."""
    text = json.dumps(item).encode()
    width = world.tell({"width": int(world.collect([len(text)]).max(initial=0))})["width"]
    table = world.collect([*text.ljust(width)]).astype("uint8")
    return world.tell({"items": [json.loads(row.tobytes()) for row in table]})["items"]


@check("python")
def python(here: Here) -> Found:
    found = f"{platform.python_version()} on {platform.machine()}, {sys.executable}"
    if sys.version_info < PYTHON:
        return FAIL, found, "3.10 or newer: FEDLADA_PYTHON=/path/to/python3.12 bash jobs/quickstart.sh"
    return OK, found


@check("torch", "pip install --force-reinstall torch torchvision")
def torch_itself(here: Here) -> Found:
    import torch

    found = f"{torch.__version__}, " + (f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU")
    if number(torch.__version__) < number(LEAST_TORCH):
        return FAIL, found, f"pip install 'torch>={LEAST_TORCH}' torchvision"
    return OK, found


@check("torchvision", "pip install --force-reinstall torch torchvision", ("torch",))
def torchvision_fits(here: Here) -> Found:
    import torch
    import torchvision

    # Its compiled part loads only beside the torch that it was built for.
    torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    for line in importlib.metadata.requires("torchvision") or ():
        wants = re.match(r"torch\s*\(?([=>])=\s*([\d.]+)", line)
        if wants:
            mine, least = number(torch.__version__), number(wants[2])
            if mine < least or (wants[1] == "=" and mine != least):
                found = f"{torchvision.__version__} was built for torch {wants[2]}, found {torch.__version__}"
                return WARN, found, "pip install --upgrade torch torchvision"
    return OK, f"{torchvision.__version__}, fits torch"


@check("packages", "bash jobs/quickstart.sh, or pip install . in the environment of this python")
def packages(here: Here) -> Found:
    found, wrong = [], []
    for name, least in LEAST.items():
        try:
            importlib.import_module({"pillow": "PIL"}.get(name, name))
            found.append(f"{name} {importlib.metadata.version(name)}")
            if number(found[-1]) < number(least):
                wrong.append(f"{name}>={least}")
        except Exception as error:
            found.append(f"{name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
            wrong.append(f"{name}>={least}")
    if wrong:
        return FAIL, ", ".join(found), f"pip install --force-reinstall '{' '.join(wrong)}'".replace(" ", "' '")
    return OK, ", ".join(found)
