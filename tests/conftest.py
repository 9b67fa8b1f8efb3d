"""One suite for a single process and for a world of ranks.

    python -m pytest                everything
    mpirun -n 4 pytest              what communicates, which is marked ``ranks``

Folders bear the names of the package's, but for ``mpi_communication``: pytest-mpi takes ``mpi`` for its marker, and
would skip that folder.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from limits import LIMIT
from rank_plugin import RankPlugin
from ranks import SIZE, barrier, communicator, find_mpirun, is_root, python, tolerant_mpirun
from repository import ROOT
from scheduling import long_first

LAUNCHER_PREFIXES = ("OMPI_COMM_", "OMPI_FIRST_", "PMIX_", "PMI_", "PRTE_LAUNCHED")
# Where SLURM and a browser must be present, a test that skips because they are missing is a failure.
STRICT = os.environ.get("FEDLADA_TEST_STRICT") == "1"

for line in (ROOT / "jobs" / "mpi.env").read_text().splitlines():
    if line and not line.startswith("#"):
        os.environ.setdefault(*line.split("=", 1))
os.environ.setdefault("OMP_NUM_THREADS", "1")
# In Open MPI's wheel its part for libfabric, which no test needs, sleeps for a second whenever a process starts MPI.
os.environ.setdefault("OMPI_MCA_btl", "^ofi")


class FailuresAtOnce:
    """Names tests as they fail: a run of many processes that is cut off has no summary."""

    def __init__(self, config: pytest.Config):
        self.terminal = config.pluginmanager.get_plugin("terminalreporter")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.terminal.write_line(f"\nFAILED {report.nodeid} ({report.when})", red=True)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if SIZE == 1:
        if config.pluginmanager.has_plugin("dsession"):  # of pytest-xdist, in the process that prints
            config.pluginmanager.register(FailuresAtOnce(config))
        return
    if communicator().size == 1:
        os.write(
            2,
            f"error: the launcher started {SIZE} processes that do not see each other: use the mpirun of the "
            "MPI library that `python -m mpi4py --mpi-library` names, or srun --mpi=pmix\n".encode(),
        )
        os._exit(2)
    plugins = config.pluginmanager
    plugins.register(RankPlugin(config))
    if communicator().rank > 0:
        plugins.unregister(plugins.get_plugin("terminalreporter"))
        plugins.register(pytest.TerminalReporter(config, open(os.devnull, "w")), "terminalreporter")  # noqa: SIM115


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """On several ranks: a file without a test that communicates is not read, on each of them."""
    if SIZE > 1 and collection_path.name.startswith("test_") and "mark.ranks" not in collection_path.read_text():
        return True
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes > 1:
        items[:] = [items[place] for place in long_first([item.nodeid for item in items], processes)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    required = item.get_closest_marker("slurm") or item.get_closest_marker("browser")
    if STRICT and SIZE == 1 and required and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped, although FEDLADA_TEST_STRICT=1 requires it: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def world():
    """MPI.COMM_WORLD."""
    return communicator()


@pytest.fixture(scope="session")
def shared_tmp(tmp_path_factory) -> Path:
    """One temporary directory, the same on all ranks."""
    if SIZE == 1:
        return tmp_path_factory.mktemp("shared")
    path = bytearray(4096)
    if communicator().rank == 0:
        name = os.fsencode(tmp_path_factory.mktemp("shared"))
        path[: len(name)] = name
    communicator().Bcast(path, root=0)
    return Path(os.fsdecode(bytes(path).rstrip(b"\0")))


@pytest.fixture(scope="session", autouse=True)
def state_home(shared_tmp) -> Path:
    """What is remembered of the user's code, here and in processes that tests start: never in the user's own home."""
    os.environ["XDG_STATE_HOME"] = str(shared_tmp / "state")
    return shared_tmp / "state"


@pytest.fixture
def out(shared_tmp, request) -> Path:
    """A directory of the test's own for a run, the same on all ranks."""
    return shared_tmp / f"{request.module.__name__}-out" / re.sub(r"\W+", "-", request.node.name)


@pytest.fixture(scope="session")
def digits_dir(shared_tmp) -> Path:
    """The embedded digits for the preset's 50 clients in 4 silo files, as a run prepares them."""
    from data_prep import PrepareSettings, prepare

    out = shared_tmp / "digits"
    if is_root():
        prepare(PrepareSettings("digits", out=out, silos=4))
    barrier()
    return out


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    """Of runs that lose ranks, as in ``campaigns/departures.py``."""
    if SIZE > 1:
        pytest.skip("starts ranks of its own")
    tolerant_mpirun()
    sys.path.append(str(ROOT / "tests" / "campaigns"))
    from departures import Campaign

    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "helpers")))
    yield Campaign(tmp_path_factory.mktemp("departures"), 0)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def mpirun() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``mpirun(4, "--rounds", 2)`` runs ``python -m fedlada_mpi.run --rounds 2`` on 4 ranks, or alone for 1.

    ``module`` names another one, ``command`` replaces ``-m module``; ``check`` fails the test on a non-zero status. The
    ranks are forked from a process that has imported torch: they start in a fraction of a second; those of another
    ``interpreter``, such as sys.executable, do not.
    """

    def run(
        ranks: int,
        *arguments: object,
        module: str = "fedlada_mpi.run",
        command: tuple[str, ...] | None = None,
        timeout: float = LIMIT,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        check: bool = False,
        interpreter: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        launcher = []
        if ranks > 1:
            program = find_mpirun() or pytest.skip("no mpirun: install the extra [mpi] or load an MPI module")
            launcher = [program, "-n", str(ranks)]
        line = [*launcher, interpreter or python(), *(command or ("-m", module)), *map(str, arguments)]
        # The child must not take this process for its launcher.
        clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
        clean["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), clean.get("PYTHONPATH")]))
        process = subprocess.Popen(
            line, env={**clean, **(env or {})}, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            out, err = stop(process)
            pytest.fail(f"not finished after {timeout} s: {' '.join(line)}\n{out[-4000:]}\n{err[-4000:]}")
        done = subprocess.CompletedProcess(line, process.returncode, out, err)
        if check and done.returncode != 0:
            pytest.fail(f"status {done.returncode}: {' '.join(line)}\n{out[-4000:]}\n{err[-4000:]}")
        return done

    return run


def stop(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End a launcher and its ranks: it ends them itself on SIGTERM, the group is killed if that takes too long."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()
